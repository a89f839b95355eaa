"""Streams of tokens on disk: ArrayRecord files, whose records are checksummed and read at random.

A file is a stream cut into records of RECORD_TOKENS tokens; only its last one is shorter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_train.data.tokenizer import TextTokenizer
from sharded_train.errors import ConfigError

RECORD_TOKENS = 1 << 13
_OPEN_READERS = 256  # files beyond them are closed and opened again
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,index_storage_option:offloaded,footer_prefetch_bytes:0"


def token_dtype(tokenizer: TextTokenizer, is_masked: bool) -> np.dtype[np.unsignedinteger]:
    """How a token is stored: in two bytes if every one fits, beside the bit that masks it where there are prompts."""
    return np.dtype("<u2" if tokenizer.vocab_size << is_masked <= 1 << 16 else "<u4")


def mask_bit(dtype: np.dtype[np.unsignedinteger], is_masked: bool) -> int:
    """The bit of a token that is not to be predicted; 0 in streams without any."""
    return 1 << (8 * dtype.itemsize - 1) if is_masked else 0


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """ArrayRecord tells of a full disk in its own way."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error


class TokenWriter:
    """A stream of tokens on its way to a file, and what is counted on the way."""

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

    def add(self, tokens: Sequence[int], num_bytes: int, *, is_first: bool, is_prompt: bool) -> None:
        """The tokens of a piece of a document, which is so many bytes of text."""
        stored = np.array(tokens, self._dtype)
        if is_prompt:
            stored |= self._dtype.type(self._mask)
            self._num_masked += len(stored)
        if is_first:
            self._count_document()
            self._num_documents += 1
            self._put(np.array([self._end], self._dtype))
        self._document += len(stored)
        self._num_bytes += num_bytes
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
