"""What is in the files: every document read once and hashed, and all that is wrong told before anything is built."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sharded_train.data.records import BadText, Reading, Record, read_records
from sharded_train.errors import ConfigError

PART_BYTES = 1 << 27  # of text: the work of one worker, at least a large file's and at most a few small files'


@dataclasses.dataclass(frozen=True)
class Part:
    """Neighbouring records of a file, known by their contents: `digest` is of the documents' hashes in their order."""

    start: int  # where to start to read, as in Record.next_start
    num_records: int  # empty ones included
    num_documents: int
    num_bytes: int
    digest: str
    low: str  # the lowest and the highest of the documents' hashes
    high: str


@dataclasses.dataclass(frozen=True)
class FileScan:
    """A file as it was when it was read. `max_bytes` is where reading was to stop."""

    path: str
    size: int
    modified: int  # in nanoseconds
    max_bytes: int | None
    num_empty: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> FileScan:
        return cls(**{**values, "parts": tuple(Part(**part) for part in values["parts"])})

    def is_of(self, path: Path, max_bytes: int | None) -> bool:
        """Whether the file looks as it did then, and would be read as far."""
        stat = path.stat()
        return (self.size, self.modified, self.max_bytes) == (stat.st_size, stat.st_mtime_ns, max_bytes)


@dataclasses.dataclass
class Document:
    """A document on its way through: when its pieces have been gone through, its hash and size are known."""

    prompt: str
    pieces: Iterator[str]
    sha256: str = ""
    num_bytes: int = 0


def hashed(record: Record) -> Document:
    """The document of a record, hashed as it is read; its pieces leave out nothing and add nothing."""
    digest = hashlib.sha256()
    document = Document(record.prompt, iter(()))
    if record.prompt:
        digest.update(f"{len(record.prompt)}\0{record.prompt}".encode())

    def pieces() -> Iterator[str]:
        document.num_bytes += len(record.prompt.encode())
        for piece in record.pieces:
            encoded = piece.encode()
            digest.update(encoded)
            document.num_bytes += len(encoded)
            yield piece
        document.sha256 = digest.hexdigest()

    document.pieces = pieces()
    return document


class _Growing:
    """A part while its records are read."""

    def __init__(self, start: int):
        self.start, self.num_records, self.num_documents, self.num_bytes = start, 0, 0, 0
        self.digest = hashlib.sha256()
        self.low, self.high = "g", ""  # beyond every hex digit, and before

    def add(self, document: Document, is_empty: bool) -> None:
        self.num_records += 1
        if not is_empty:
            self.num_documents += 1
            self.num_bytes += document.num_bytes
            self.digest.update(bytes.fromhex(document.sha256))
            self.low, self.high = min(self.low, document.sha256), max(self.high, document.sha256)

    def part(self) -> Part:
        counts = (self.start, self.num_records, self.num_documents, self.num_bytes)
        return Part(*counts, self.digest.hexdigest(), self.low, self.high)


def scan_file(path: Path, reading: Reading, max_bytes: int | None = None) -> FileScan:
    """Read a file through, to its end or until its documents hold `max_bytes`. Raises BadText."""
    try:
        stat = path.stat()
    except OSError as error:
        raise BadText(f"{path}: cannot be read: {error}") from error
    parts: list[Part] = []
    growing, num_bytes, num_empty = _Growing(0), 0, 0
    for record in read_records(path, reading):
        document = hashed(record)
        is_empty = not any([bool(piece) for piece in document.pieces])
        growing.add(document, is_empty)
        num_empty += is_empty
        num_bytes += 0 if is_empty else document.num_bytes
        full = growing.num_bytes >= PART_BYTES and record.next_start >= 0
        stop = max_bytes is not None and num_bytes >= max_bytes
        if full or stop:
            parts.append(growing.part())
            growing = _Growing(record.next_start)
        if stop:
            break
    if growing.num_documents:
        parts.append(growing.part())
    return FileScan(
        str(path), stat.st_size, stat.st_mtime_ns, max_bytes, num_empty, tuple(p for p in parts if p.num_documents)
    )


def documents_of(path: Path, reading: Reading, part: Part) -> Iterator[Document]:
    """The documents of a part that was scanned, empty ones left out; of text, the hash is known before it is read.

    Raises ConfigError when they are not the ones that were scanned.
    """
    changed = f"data: {path} changed while it was being read; start again when it is at rest"
    growing = _Growing(part.start)
    try:
        for record in read_records(path, reading, part.start):
            document = hashed(record)
            if reading.format_of(path) == "text":
                document.sha256 = part.low
                yield document
                is_empty = False
            else:
                pieces = [piece for piece in document.pieces if piece]
                document.pieces, is_empty = iter(pieces), not pieces
                if not is_empty:
                    yield document
            growing.add(document, is_empty)
            if growing.num_records == part.num_records:
                break
    except BadText as error:
        raise ConfigError([changed, f"  {error}"]) from error
    if growing.part() != part:
        raise ConfigError(changed)


def not_readable(problems: Iterable[str], limit: int = 10) -> ConfigError:
    """The error for files that cannot be used: each with its place and reason, as far as they fit."""
    words = list(problems)
    more = [f"  and {len(words) - limit} more"] if len(words) > limit else []
    return ConfigError(["data: this cannot be read as text:", *(f"  {word}" for word in words[:limit]), *more])
