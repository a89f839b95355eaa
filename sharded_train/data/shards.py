"""Documents to tokens on disk: shards of ArrayRecord, each of them the work of one worker, kept whole or not at all.

A shard is named after its contents: the documents, the tokenizer, how they are read, and where the border between
training and validation is. So work that is done is found again, whoever did it, for as long as nothing changes.
For a shard K there are `K.train.arrayrecord` and `K.validation.arrayrecord`, each a stream of tokens in records of
RECORD_TOKENS (see rows.py for its layout), `K.hashes` with 8 bytes of every document's hash, sorted, and, written
last, `K.json`: how much there is, and the size and SHA-256 of each file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import platform
import secrets
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_train.data.cache import digest, file_sha256
from sharded_train.data.corpus import Corpus, SourceFiles
from sharded_train.data.parallel import Advance
from sharded_train.data.records import Reading, pieces_of
from sharded_train.data.scan import PART_BYTES, Part, documents_of
from sharded_train.data.tokenizer import TextTokenizer
from sharded_train.errors import ConfigError

LAYOUT = "shards-1"  # part of a shard's name: change it with anything that is written
RECORD_TOKENS = 1 << 13
SIDES = ("train", "validation")
_PIECES_AT_ONCE, _CHARACTERS_AT_ONCE = 1 << 12, 1 << 20
_OPEN_READERS = 256  # files beyond them are closed and opened again
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,index_storage_option:offloaded,footer_prefetch_bytes:0"


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
    """The shards of a source: its parts, as many small ones together as make about one large one."""
    groups: list[list[tuple[Path, Part]]] = []
    filled = PART_BYTES
    for path, part in source.parts:
        if filled + part.num_bytes > PART_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append((path, part))
        filled += part.num_bytes
    how = (LAYOUT, tokenizer.sha256, source.reading.prompt is not None, corpus.border)

    def key(group: list[tuple[Path, Part]]) -> str:
        return digest(*how, [part.digest for _, part in group])[:32]

    return [Shard(folder, key(group), source.reading, corpus.border, tuple(group)) for group in groups]


def token_dtype(tokenizer: TextTokenizer, is_masked: bool) -> np.dtype[np.unsignedinteger]:
    """How a token is stored: in two bytes if every one fits, beside the bit that masks it where there are prompts."""
    return np.dtype("<u2" if tokenizer.vocab_size << is_masked <= 1 << 16 else "<u4")


def mask_bit(dtype: np.dtype[np.unsignedinteger], is_masked: bool) -> int:
    """The bit of a token that is not to be predicted; 0 in streams without any."""
    return 1 << (8 * dtype.itemsize - 1) if is_masked else 0


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
    """Tokenize a shard's documents and write its files; its key and its note. `advance` is told of bytes of text."""
    host = platform.node()
    work = shard.folder / f".{shard.key}.{host}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        for abandoned in shard.folder.glob(f".{shard.key}.{host}.*.tmp"):
            if not _is_running(abandoned.name.split(".")[-3]):
                shutil.rmtree(abandoned, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            is_masked = shard.reading.prompt is not None
            sides = {side: _SideWriter(work / f"{side}.arrayrecord", tokenizer, is_masked) for side in SIDES}
            hashes = array("Q")
            _write_documents(tokenizer, shard, sides, hashes, advance)
            note = {side: writer.close() for side, writer in sides.items()}
            np.sort(np.array(hashes, "<u8")).tofile(work / "hashes")
            files = {path.name: (path.stat().st_size, file_sha256(path)) for path in sorted(work.iterdir())}
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


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """ArrayRecord tells of a full disk in its own way."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error


class _SideWriter:
    """The stream of one side of a shard, and what is counted on the way."""

    def __init__(self, path: Path, tokenizer: TextTokenizer, is_masked: bool):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._dtype = token_dtype(tokenizer, is_masked)
        self._mask = mask_bit(self._dtype, is_masked)
        self._end = tokenizer.end_of_text
        self._writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        self._path = path
        self._waiting: list[npt.NDArray[np.unsignedinteger]] = []
        self._num_waiting = self._length = self._num_masked = self._num_bytes = 0
        self._num_documents = self._document = 0
        self._lengths: dict[int, int] = {}

    def add(self, piece: _Piece, tokens: Sequence[int]) -> None:
        stored = np.array(tokens, self._dtype)
        if piece.is_prompt:
            stored |= self._dtype.type(self._mask)
            self._num_masked += len(stored)
        if piece.is_first:
            self._count_document()
            self._num_documents += 1
            self._put(np.array([self._end], self._dtype))
        self._document += len(stored)
        self._num_bytes += len(piece.text.encode())
        self._put(stored)

    def close(self) -> dict[str, Any]:
        """Finish the file, and say what is in it. Lengths are counted by their number of binary digits."""
        self._count_document()
        self._flush(1)
        num_records = -(-self._length // RECORD_TOKENS)
        with _as_os_error():
            self._writer.close()
            if num_records and _reader(self._path, -1).num_records() != num_records:
                raise OSError(f"{self._path} was not written whole")
        if not num_records:
            self._path.unlink()
        return {
            "length": self._length,
            "num_documents": self._num_documents,
            "num_tokens": self._length - self._num_documents,
            "num_bytes": self._num_bytes,
            "num_masked": self._num_masked,
            "lengths": {str(digits): count for digits, count in sorted(self._lengths.items())},
        }

    def _count_document(self) -> None:
        if self._num_documents:
            digits = self._document.bit_length()
            self._lengths[digits] = self._lengths.get(digits, 0) + 1
        self._document = 0

    def _put(self, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        self._length += len(tokens)
        if self._num_waiting >= RECORD_TOKENS:
            self._flush(RECORD_TOKENS)

    def _flush(self, at_least: int) -> None:
        """Write records while there are tokens for one."""
        tokens = np.concatenate([np.array([], self._dtype), *self._waiting])
        while len(tokens) >= at_least:
            with _as_os_error():
                self._writer.write(tokens[:RECORD_TOKENS].tobytes())
            tokens = tokens[RECORD_TOKENS:]
        self._waiting, self._num_waiting = [tokens], len(tokens)


def _write_documents(
    tokenizer: TextTokenizer, shard: Shard, sides: dict[str, _SideWriter], hashes: array[int], advance: Advance
) -> None:
    for batch in _batches(_pieces(shard, hashes)):
        encoded = tokenizer.encode_pieces([piece.text for piece in batch], [not piece.is_first for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            if tokenizer.end_of_text in tokens:
                raise ConfigError(f"data.tokenizer: text in {piece.path} became the end-of-text token")
            sides[piece.side].add(piece, tokens)
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


@functools.lru_cache(_OPEN_READERS)
def _reader(path: Path, _: int) -> Any:
    """Small reads anywhere, in memory that does not grow with the file. The number tells a file from its successor."""
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(path), _READ_OPTIONS, file_reader_buffer_size=1 << 15)


class ShardStream:
    """The streams of some shards, one after the other, and the end of text that closes them, as one array of tokens."""

    def __init__(self, shards: Sequence[tuple[Path, int]], dtype: np.dtype[np.unsignedinteger], end_of_text: int):
        self.dtype, self._end = dtype, end_of_text
        self._files = [(path, path.stat().st_ino) for path, length in shards if length]
        self._ends = np.cumsum([length for _, length in shards if length], dtype=np.int64)

    def __len__(self) -> int:
        return 1 + (int(self._ends[-1]) if len(self._ends) else 0)

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """The tokens at start ... stop - 1, as they are stored. Raises ConfigError where the file is damaged."""
        tokens = np.full(stop - start, self._end, self.dtype)
        place = start
        while place < min(stop, len(self) - 1):
            shard = int(np.searchsorted(self._ends, place, side="right"))
            begin = int(self._ends[shard - 1]) if shard else 0
            last = min(stop, int(self._ends[shard]))
            tokens[place - start : last - start] = self._read(*self._files[shard], place - begin, last - begin)
            place = last
        return tokens

    def _read(self, path: Path, number: int, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        first = start // RECORD_TOKENS
        try:
            records = _reader(path, number).read(list(range(first, -(-stop // RECORD_TOKENS))))
        except Exception as error:  # pybind turns every status into an exception of its choice
            raise ConfigError(
                f"data: {path} is damaged or gone ({error}). `sharded-train data` builds it again, given the text"
            ) from error
        tokens = np.frombuffer(b"".join(records), self.dtype)
        return tokens[start - first * RECORD_TOKENS : stop - first * RECORD_TOKENS]
