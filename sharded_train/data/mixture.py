"""Which row of which source a sample is: computed, not stored, for one source as for many."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_train.data.config import PERIOD
from sharded_train.data.order import train_sample
from sharded_train.data.rows import Row, Rows

IntArray = npt.NDArray[np.int64]
_EXACT = 1 << 30  # products of two numbers up to here, and twice that, fit into an int64


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

    Sample n is a pure function of (seed, n). The sources take turns, each in its share, as evenly as can be, and each
    goes through its own rows epoch by epoch, in an order that is a pure function of (seed, source, epoch). The shares
    are the weights; without weights, the rows that a source has, times its `num_epochs`, so that all of them come to
    the end of their last epoch with the same sample.
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
        """After how many samples the turns begin again; without weights, everything has been gone through then."""
        return sum(self._turns.counts)

    @property
    def shares(self) -> list[float]:
        """The part of the samples that each member has."""
        return [count / max(1, self.epoch_size) for count in self._turns.counts]

    @functools.cached_property
    def num_samples(self) -> int | None:
        """How many samples there are before a member would be gone through more often than it may; None: no end."""
        limited = [(n, member.num_epochs) for n, member in enumerate(self.members) if member.num_epochs is not None]
        if not self._is_weighted:
            return self.epoch_size if limited else None
        ends = (self._turns.sample_of(n, epochs * len(self.members[n].rows)) for n, epochs in limited)
        return min(ends, default=None)

    def order(self, seed: int, samples: npt.ArrayLike) -> IntArray:
        """The rows that these training samples are."""
        numbers = np.asarray(samples, np.int64)
        whose, turn = self._turns.of_samples(numbers.reshape(-1))
        rows = np.zeros_like(turn)
        for number in np.unique(whose).tolist():
            own = whose == number
            places = train_sample(self.members[number].rows, seed, turn[own], stream=number)
            rows[own] = self._begins[number] + places
        return rows.reshape(numbers.shape)

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
            f"{member.name} {asked[member.name]:,.1f} times (num_epochs = {member.num_epochs or 1}, "
            f"{len(member.rows):,} rows)"
            for member in self.members
            if (member.num_epochs or not self._is_weighted) and asked[member.name] > (member.num_epochs or 1)
        ]
        return [
            f"{num_samples:,} rows of training would go through {', '.join(short) or 'the sources'}, more often than "
            f"the sources allow, which is {self.num_samples:,} rows"
        ]

    @functools.cached_property
    def _begins(self) -> IntArray:
        return np.cumsum([0, *(len(member.rows) for member in self.members)], dtype=np.int64)

    @property
    def _is_weighted(self) -> bool:
        return self.members[0].weight is not None

    @functools.cached_property
    def _turns(self) -> Turns:
        if self._is_weighted:
            return Turns(parts_of_period([member.weight or 0.0 for member in self.members]))
        return Turns([len(member.rows) * (member.num_epochs or 1) for member in self.members])


class Turns:
    """Members taking turns: in every round, member i has counts[i] of them.

    Its k-th is at the time (k + 1/2) / counts[i] of the round, and of two at the same time the first member's comes
    first (the order in which Webster's method gives out seats). So after any number of samples each has had its share,
    give or take about one. All in whole numbers: nothing is stored, and nothing is rounded.
    """

    def __init__(self, counts: Sequence[int]):
        self.counts = list(counts)
        self._active = np.flatnonzero(self.counts)
        dtype = np.int64 if sum(self.counts) < _EXACT else object
        self._all = np.array(self.counts, dtype)[None, :, None]
        self._own = np.array([self.counts[n] for n in self._active], dtype)[:, None]
        self._is_later = (np.arange(len(self.counts))[None, :] > self._active[:, None]).astype(dtype)[:, :, None]

    def of_samples(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Whose turn each sample is, and how many turns that member had before; samples are [n], and so are both."""
        size, near = sum(self.counts), len(self.counts) + 3
        rounds, place = np.divmod(samples, size)
        place = place.astype(self._own.dtype)
        # For each member, the first of its turns that does not come before the sample, near its share of those before.
        low = np.maximum(0, place * self._own // size - near)
        high = np.minimum(self._own, low + 2 * near)
        for _ in range((2 * near).bit_length()):
            middle = (low + high) // 2
            is_before = self._ranks(middle) < place
            low, high = np.where(is_before, middle + 1, low), np.where(is_before, high, middle)
        active = np.argmax(self._ranks(low) == place, axis=0)
        whose = self._active[active]
        turn = low[active, np.arange(len(samples))].astype(np.int64)
        return whose, rounds * np.array(self.counts, np.int64)[whose] + turn

    def sample_of(self, member: int, turn: int) -> int:
        """The sample that is this turn, counted from 0, of a member: the inverse of `of_samples`."""
        rounds, turn = divmod(turn, self.counts[member])
        ranks = self._ranks(np.full((len(self._active), 1), turn, self._own.dtype))
        return rounds * sum(self.counts) + int(ranks[self._active == member].item())

    def _ranks(self, turns: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[active, n] How many turns of all members come before each of these turns of a round.

        Turn k' of j comes before turn k of i when (2 k' + 1) counts[i] < (2 k + 1) counts[j], or they are equal and
        j <= i; their number is a floor, and of those of i itself one is k.
        """
        own = self._own[:, :, None]
        before = ((2 * turns[:, None, :] + 1) * self._all + own - self._is_later) // (2 * own)
        return before.sum(axis=1) - 1


def parts_of_period(weights: Sequence[float]) -> list[int]:
    """Weights as whole parts of PERIOD, at least one each: the largest remainders are rounded up."""
    exact = np.array(weights, np.float64) / math.fsum(weights) * PERIOD
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    counts[by_remainder[: max(0, PERIOD - int(counts.sum()))]] += 1
    counts[int(np.argmax(counts))] += PERIOD - counts.sum()  # what tiny weights were raised by
    return [int(count) for count in counts]
