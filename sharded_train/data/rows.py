"""Packing: documents laid end to end in one stream of tokens, and rows cut from it.

The stream is `E d d d E d d E d d d d E`: every document comes after an end-of-text token E, documents stand in an
order of their contents, and one more E closes the stream. A row takes its tokens from [start, stop) and its targets
from one place to the right, so that

- every token of every document, its first one included, and every end of a document is a target exactly once;
- the target of a document's last token is the E after it, and what E itself predicts belongs to the document that
  begins there: no target crosses into another document, and the cut between two rows loses none;
- what a row does not fill is padded, at its end: tokens E, targets -1, segments 0, positions 0.

E is in no document, so the stream is its own index: a row is read from T + 1 neighbouring tokens on disk, and the
memory of the host does not grow with the text. A segment begins at each E and at the start of a row; a document
that goes on in the next row is a new segment there, from position 0, and does not see its part in the row before.

Row r is [r T, (r + 1) T), and only the last one has padding. Where documents have prompts, a cut would part a
completion from its prompt: there each row begins with a document and holds as many whole ones as fit, and only what
is longer than a row goes on in the next (`aligned_starts`). Tokens of prompts carry a bit that makes them no target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

PACKING = "stream-2"  # part of the data's fingerprint: change it with the layout above
KEYS = ("tokens", "targets", "segments", "positions")
Row = dict[str, npt.NDArray[np.int32]]
_TOKENS_AT_ONCE = 1 << 18


class Stream(Protocol):
    """An array of tokens, on disk or not."""

    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]: ...


@dataclasses.dataclass(frozen=True)
class ArrayStream:
    """A stream in memory."""

    tokens: npt.NDArray[np.unsignedinteger]

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        return self.tokens[start:stop]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a stream: `rows[i]` is a dict of four int32 arrays [sequence_length], `len(rows)` their number."""

    stream: Stream
    sequence_length: int
    end_of_text: int
    mask_bit: int = 0  # of the tokens that are not to be predicted
    starts: npt.NDArray[np.int64] | None = None  # of the rows, where they are not of equal length

    @property
    def num_places(self) -> int:
        """How many tokens have a token after them: all of the documents, and one end for each."""
        return len(self.stream) - 1

    def __len__(self) -> int:
        return -(-self.num_places // self.sequence_length) if self.starts is None else len(self.starts)

    def span(self, index: int) -> tuple[int, int]:
        """Where in the stream a row begins and ends."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self.starts is None:
            start = index * self.sequence_length
            return start, min(start + self.sequence_length, self.num_places)
        return int(self.starts[index]), int([*self.starts[index + 1 : index + 2], self.num_places][0])

    def __getitem__(self, index: int) -> Row:
        start, stop = self.span(index)
        size = stop - start
        stored = self.stream.read(start, stop + 1).astype(np.int64)
        part = (stored & ~self.mask_bit).astype(np.int32)
        row = self.empty()
        row["tokens"][:size] = part[:-1]
        row["targets"][:size] = np.where(stored[1:] & self.mask_bit, -1, part[1:])
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

    def chunks(self) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """The stream in parts, as it is stored."""
        for start in range(0, len(self.stream), _TOKENS_AT_ONCE):
            yield self.stream.read(start, min(start + _TOKENS_AT_ONCE, len(self.stream)))


def aligned_starts(rows: Rows) -> Iterator[int]:
    """Where the rows of a stream begin when no document is cut that fits into a row."""
    length, place, row, last = rows.sequence_length, 0, 0, 0
    if rows.num_places:
        yield 0
    for tokens in rows.chunks():
        for begin in np.flatnonzero(tokens == rows.end_of_text).tolist():
            here = place + begin  # of a document, or the end of the stream
            while here - row > length:
                row = last if last > row else row + length
                yield row
            last = here
        place += len(tokens)
