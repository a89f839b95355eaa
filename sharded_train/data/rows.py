"""Packing: documents laid end to end in one stream of tokens, and rows of equal length cut from it.

The stream is `E d d d E d d E d d d d E`: every document comes after an end-of-text token E, documents stand in the
order of their hashes, and one more E closes the stream. Row r takes its tokens from [r T, (r + 1) T) and its
targets from one place to the right, so that

- every token of every document, its first one included, and every end of a document is a target exactly once;
- the target of a document's last token is the E after it, and what E itself predicts belongs to the document that
  begins there: no target crosses into another document, and the cut between two rows loses none;
- only the last row is padded, at its end: tokens E, targets -1, segments 0, positions 0.

E is in no document, so the stream is its own index: a row is read from T + 1 neighbouring tokens of a memory map,
and the memory of the host does not grow with the text. A segment begins at each E and at the start of a row; a
document that goes on in the next row is a new segment there, from position 0, and does not see its part in the row
before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sharded_train.data.corpus import Document
from sharded_train.data.tokenizer import TextTokenizer
from sharded_train.errors import ConfigError

PACKING = "stream-1"  # part of the data's fingerprint: change it with the layout above
KEYS = ("tokens", "targets", "segments", "positions")
Row = dict[str, npt.NDArray[np.int32]]
_PIECES_AT_ONCE = 512


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a stream: `rows[i]` is a dict of four int32 arrays [sequence_length], `len(rows)` their number."""

    stream: npt.NDArray[np.unsignedinteger]
    sequence_length: int
    end_of_text: int

    @classmethod
    def open(cls, path: Path, *, sequence_length: int, tokenizer: TextTokenizer) -> Rows:
        """The rows of a stream on disk, memory-mapped."""
        stream = np.asarray(np.memmap(path, dtype=stream_dtype(tokenizer), mode="r"))
        return cls(stream, sequence_length, tokenizer.end_of_text)

    @property
    def num_targets(self) -> int:
        """How many tokens an epoch predicts: those of the documents, and one end for each."""
        return len(self.stream) - 1

    def __len__(self) -> int:
        return -(-self.num_targets // self.sequence_length)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self.sequence_length
        part = self.stream[start : start + self.sequence_length + 1].astype(np.int32)
        size = len(part) - 1
        row = self.empty()
        row["tokens"][:size] = part[:-1]
        row["targets"][:size] = part[1:]
        begins = part[:-1] == self.end_of_text
        begins[0] = True
        place = np.arange(size, dtype=np.int32)
        row["segments"][:size] = np.cumsum(begins)
        row["positions"][:size] = place - np.maximum.accumulate(np.where(begins, place, 0))
        return row

    def empty(self) -> Row:
        """A row of padding."""
        fill = {"tokens": self.end_of_text, "targets": -1, "segments": 0, "positions": 0}
        return {key: np.full(self.sequence_length, fill[key], np.int32) for key in KEYS}


def stream_dtype(tokenizer: TextTokenizer) -> np.dtype[np.unsignedinteger]:
    """How a token is stored: in two bytes if every one fits."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def write_stream(path: Path, documents: Sequence[Document], tokenizer: TextTokenizer) -> None:
    """Encode documents, a batch of pieces at a time, and write their stream."""
    dtype = stream_dtype(tokenizer)
    end = np.array([tokenizer.end_of_text], dtype).tobytes()
    pieces = _pieces(documents)
    with path.open("wb") as file:
        while batch := list(islice(pieces, _PIECES_AT_ONCE)):
            encoded = tokenizer.encode_batch([text for *_, text in batch])
            for (document, first, _), tokens in zip(batch, encoded, strict=True):
                if tokenizer.end_of_text in tokens:
                    raise ConfigError(f"data.tokenizer: text in {document.path} became the end-of-text token")
                file.write(end * first + np.array(tokens, dtype).tobytes())
        file.write(end)


def _pieces(documents: Sequence[Document]) -> Iterator[tuple[Document, bool, str]]:
    for document in documents:
        for number, text in enumerate(document.pieces()):
            yield document, number == 0, text
