"""Documents to tokens on disk: shards of ArrayRecord, each of them the work of one worker, kept whole or not at all.

A shard is named after its contents: the documents, the tokenizer, how they are read, and where the border between
training and validation is. So work that is done is found again, whoever did it, for as long as nothing changes.
For a shard K there are `K.train.arrayrecord` and `K.validation.arrayrecord`, each a stream of tokens (rows.py says how
it is laid out), `K.hashes` with 8 bytes of every document's hash, sorted, and, written last, `K.json`: how much there
is, and the size and SHA-256 of each file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import secrets
import shutil
from array import array
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sharded_train.data.cache import digest, file_sha256
from sharded_train.data.corpus import Corpus, SourceFiles
from sharded_train.data.parallel import Advance
from sharded_train.data.records import Reading, pieces_of
from sharded_train.data.scan import PART_BYTES, FileScan, Part, documents_of
from sharded_train.data.token_files import TokenWriter
from sharded_train.data.tokenizer import TextTokenizer
from sharded_train.errors import ConfigError

LAYOUT = "shards-1"  # part of a shard's name: change it with anything that is written
SIDES = ("train", "validation")
_PIECES_AT_ONCE, _CHARACTERS_AT_ONCE = 1 << 12, 1 << 20


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a worker has to do: some documents of a source."""

    folder: Path
    key: str
    reading: Reading
    border: str
    parts: tuple[tuple[Path, Part], ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for _, part in self.parts)

    def path(self, name: str) -> Path:
        return self.folder / f"{self.key}.{name}"


def plan(source: SourceFiles, corpus: Corpus, tokenizer: TextTokenizer, folder: Path) -> list[Shard]:
    """The shards of a source: each large part alone, and small files together whose hashes begin alike.

    So a file that is added or changed changes one shard, until there is twice as much text.
    """
    bits = (source.num_bytes // PART_BYTES).bit_length()

    def together(part_of: tuple[FileScan, Part]) -> tuple[int, str | None]:
        scan, part = part_of
        first = int(scan.parts[0].digest[:8], 16) >> (32 - bits)
        return first, part.digest if part.num_bytes >= PART_BYTES else None

    how = (LAYOUT, tokenizer.sha256, source.reading.prompt is not None, corpus.border)
    shards = []
    for _, group in groupby(((scan, part) for scan in source.scans for part in scan.parts), together):
        parts = tuple((Path(scan.path), part) for scan, part in group)
        key = digest(*how, [part.digest for _, part in parts])[:32]
        shards.append(Shard(folder, key, source.reading, corpus.border, parts))
    return shards


def note_of(shard: Shard, *, verify: bool) -> dict[str, Any] | None:
    """The note of a shard that is there and whole: its files have their sizes and, with `verify`, their contents."""
    try:
        note: dict[str, Any] = json.loads(shard.path("json").read_text())
        for name, (size, sha256) in note["files"].items():
            path = shard.path(name)
            if path.stat().st_size != size or (verify and file_sha256(path) != sha256):
                return None
        return note
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_shard(tokenizer: TextTokenizer, shard: Shard, advance: Advance) -> tuple[str, dict[str, Any]]:
    """Tokenize a shard's documents and write its files; its key and its note. `advance` is told of bytes of text.

    A shard that is there by now, as another process has written it, is left as it is.
    """
    if (there := note_of(shard, verify=False)) is not None:
        advance(shard.num_bytes)
        return shard.key, there
    host = platform.node()
    work = shard.folder / f".{shard.key}.{host}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        for abandoned in shard.folder.glob(f".{shard.key}.{host}.*.tmp"):
            if not _is_running(abandoned.name.split(".")[-3]):
                shutil.rmtree(abandoned, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            is_masked = shard.reading.prompt is not None
            sides = {side: TokenWriter(work / f"{side}.arrayrecord", tokenizer, is_masked) for side in SIDES}
            hashes = array("Q")
            _write_documents(tokenizer, shard, sides, hashes, advance)
            note = {side: writer.close() for side, writer in sides.items()}
            np.sort(np.array(hashes, "<u8")).tofile(work / "hashes")
            files = {path.name: [path.stat().st_size, file_sha256(path)] for path in sorted(work.iterdir())}
            note["files"] = files
            (work / "json").write_text(json.dumps(note))
            for name in (*files, "json"):
                os.replace(work / name, shard.path(name))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"data: cannot write in {shard.folder}: {error}. Give data.cache_dir a directory with room"
        ) from error
    return shard.key, note


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


@dataclasses.dataclass(frozen=True)
class _Piece:
    side: str
    text: str
    path: Path
    is_first: bool
    is_prompt: bool


def _write_documents(
    tokenizer: TextTokenizer, shard: Shard, sides: dict[str, TokenWriter], hashes: array[int], advance: Advance
) -> None:
    for batch in _batches(_pieces(shard, hashes)):
        encoded = tokenizer.encode_pieces([piece.text for piece in batch], [not piece.is_first for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            if tokenizer.end_of_text in tokens:
                raise ConfigError(f"data.tokenizer: text in {piece.path} became the end-of-text token")
            sides[piece.side].add(tokens, len(piece.text.encode()), is_first=piece.is_first, is_prompt=piece.is_prompt)
        advance(sum(len(piece.text.encode()) for piece in batch))


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces to encode together: enough to keep all cores busy, and never much memory."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _CHARACTERS_AT_ONCE or len(batch) >= _PIECES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(shard: Shard, hashes: array[int]) -> Iterator[_Piece]:
    for path, part in shard.parts:
        for document in documents_of(path, shard.reading, part):
            hashes.append(int(document.sha256[:16], 16))
            side = "validation" if document.sha256 < shard.border else "train"
            is_first = True
            for is_prompt, texts in (
                (True, pieces_of(io.StringIO(document.prompt, newline=""))),
                (False, document.pieces),
            ):
                for text in texts:
                    yield _Piece(side, text, path, is_first, is_prompt)
                    is_first = False
