"""Which row of which source a sample is: computed, not stored, for one source as for many."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sharded_train.data.order import train_sample
from sharded_train.data.rows import Row, Rows

IntArray = npt.NDArray[np.int64]
PERIOD = 1 << 16  # samples after which the turns of weighted sources repeat; weights are rounded to parts of it


@dataclasses.dataclass(frozen=True)
class Member:
    """The rows of a source, its weight (all members have one, or none has), and how often they may be gone through."""

    name: str
    rows: Rows
    weight: float | None = None
    num_epochs: int | None = None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The rows of some sources under one numbering, and the order in which training sees them.

    Sample n is a pure function of (seed, n). Without weights there is one shuffle of all rows, those of a source with
    `num_epochs` = k k times among them, and an epoch of the mixture ends for all at once. With weights the sources take
    turns, each in its share as evenly as can be, and each goes through its own rows epoch by epoch, in an order that
    is a pure function of (seed, source, epoch).
    """

    members: tuple[Member, ...]

    def __len__(self) -> int:
        """How many rows there are, each counted once."""
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Row:
        member, row = self.place_of(index)
        return self.members[member].rows[row]

    def place_of(self, index: int) -> tuple[int, int]:
        """The member that a row is of, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        member = int(np.searchsorted(self._begins, index, side="right")) - 1
        return member, index - int(self._begins[member])

    def empty(self) -> Row:
        """A row of padding."""
        return self.members[0].rows.empty()

    @property
    def sequence_length(self) -> int:
        return self.members[0].rows.sequence_length

    @property
    def epoch_size(self) -> int:
        """Without weights, how many samples go through everything."""
        return int(self._places[-1])

    @property
    def shares(self) -> list[float]:
        """The part of the samples that each member has."""
        if self._turns is not None:
            return [count / PERIOD for count in self._turns.counts]
        return [float(size) / max(1, self.epoch_size) for size in np.diff(self._places)]

    @property
    def num_samples(self) -> int | None:
        """How many samples there are before a member would be gone through more often than it may; None: no end."""
        if self._turns is None:
            limited = any(member.num_epochs is not None for member in self.members)
            return self.epoch_size if limited else None
        limits = [
            self._turns.num_samples(number, member.num_epochs * len(member.rows))
            for number, member in enumerate(self.members)
            if member.num_epochs is not None
        ]
        return min(limits, default=None)

    def order(self, seed: int, samples: npt.ArrayLike) -> IntArray:
        """The rows that these training samples are."""
        numbers = np.asarray(samples, np.int64)
        if self._turns is None:
            place = train_sample(range(self.epoch_size), seed, numbers)
            member = np.searchsorted(self._places, place, side="right") - 1
            return self._begins[member] + (place - self._places[member]) % self._sizes[member]
        turn, count = self._turns.of_samples(numbers)
        rows = np.zeros_like(numbers)
        for number in np.unique(turn):
            own = turn == number
            rows[own] = self._begins[number] + train_sample(
                self.members[number].rows, seed, count[own], stream=int(number)
            )
        return rows

    def epochs_after(self, num_samples: int) -> dict[str, float]:
        """How often each member has been gone through after so many samples."""
        return {
            member.name: num_samples * share / max(1, len(member.rows))
            for member, share in zip(self.members, self.shares, strict=True)
        }

    def shortfalls(self, num_samples: int) -> list[str]:
        """What is too little for so many samples, in words."""
        if self.num_samples is None or num_samples <= self.num_samples:
            return []
        asked = self.epochs_after(num_samples)
        short = [
            f"{member.name} {asked[member.name]:.3g} times (num_epochs = {member.num_epochs or 1}, "
            f"{len(member.rows):,} rows)"
            for member in self.members
            if (member.num_epochs or self._turns is None) and asked[member.name] > (member.num_epochs or 1)
        ]
        return [
            f"{num_samples:,} rows of training would go through {', '.join(short) or 'the sources'}, more often than "
            f"the sources allow; there are {self.num_samples:,} rows"
        ]

    @functools.cached_property
    def _sizes(self) -> IntArray:
        return np.array([len(member.rows) for member in self.members], np.int64)

    @functools.cached_property
    def _begins(self) -> IntArray:
        return np.cumsum([0, *self._sizes], dtype=np.int64)

    @functools.cached_property
    def _places(self) -> IntArray:
        """Where the members' rows begin when each is repeated as often as its epochs ask for."""
        return np.cumsum([0, *(len(member.rows) * (member.num_epochs or 1) for member in self.members)], dtype=np.int64)

    @functools.cached_property
    def _turns(self) -> Turns | None:
        weights = [member.weight for member in self.members if member.weight is not None]
        return Turns.of(weights) if weights else None


@dataclasses.dataclass(frozen=True)
class Turns:
    """Weighted members taking turns, in a pattern of PERIOD samples.

    In it member i has `counts[i]` turns, the k-th at the time (k + 1/2) / counts[i] of the period (Webster's order), so
    that after any number of samples each has its share, give or take about one.
    """

    counts: IntArray
    member: npt.NDArray[np.int32]  # [PERIOD] whose turn it is
    rank: npt.NDArray[np.int32]  # [PERIOD] how many turns that member had before, in this period

    @classmethod
    def of(cls, weights: Sequence[float]) -> Turns:
        counts = _parts(weights)
        member = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        rank = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        time = (rank + 0.5) / counts[member]
        by_time = np.lexsort((member, time))
        return cls(counts, member[by_time], rank[by_time])

    def of_samples(self, samples: IntArray) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Whose turn each sample is, and how many turns that member had before."""
        period, place = np.divmod(samples, PERIOD)
        member = self.member[place]
        return member, period * self.counts[member] + self.rank[place]

    def num_samples(self, member: int, num_turns: int) -> int:
        """How many samples there are before a member's turn number `num_turns`, counted from 0."""
        period, rank = divmod(num_turns, int(self.counts[member]))
        places = np.flatnonzero(self.member == member)
        return period * PERIOD + int(places[rank])


def _parts(weights: Sequence[float]) -> IntArray:
    """Weights as whole parts of PERIOD, at least one each: the largest remainders are rounded up."""
    exact = np.array(weights, np.float64) / math.fsum(weights) * PERIOD
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    for index in by_remainder[: max(0, PERIOD - int(counts.sum()))]:
        counts[index] += 1
    counts[int(np.argmax(counts))] += PERIOD - counts.sum()  # what tiny weights were raised by
    return counts
