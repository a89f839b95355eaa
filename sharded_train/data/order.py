"""The order of the samples: a shuffle that is computed, not stored."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUM_ROUNDS = 8


def shuffled(index: npt.ArrayLike, length: int, key: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Where a keyed permutation of 0 ... length - 1 sends `index`: O(1) in memory, the same on every machine for ever.

    `index` (each in [0, length)) and `key` broadcast. A Feistel network permutes the numbers of an even number of
    bits, fewer than 4 x length of them; a number that lands at length or above goes through again until it does
    not, which leaves a permutation of those below (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). Grain has a shuffle of this kind; ours is not limited to 32 bits, does not make epoch 1 of a
    seed epoch 0 of the next, and cannot change under a run that resumes with a newer Grain.
    """
    index, key = np.broadcast_arrays(np.asarray(index), np.asarray(key).astype(np.uint64))
    value, keys = index.astype(np.uint64).reshape(-1), key.reshape(-1)
    half = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))
    pending = np.arange(value.size)
    while pending.size:
        value[pending] = _feistel(value[pending], keys[pending], half)
        pending = pending[value[pending] >= length]
    return value.astype(np.int64).reshape(index.shape)


def train_sample(rows: Sized, seed: int, sample: npt.ArrayLike, stream: int = 0) -> npt.NDArray[np.int64]:
    """The row that the training sample of this number is: a pure function of (seed, stream, sample).

    Every epoch, `len(rows)` samples, holds every row once, in an order that is a pure function of (seed, stream,
    epoch). Each source of a weighted mixture has a stream of its own.
    """
    epoch, index = np.divmod(np.asarray(sample, np.int64), len(rows))
    key = _mix(np.array([seed % 2**64], np.uint64))
    if stream:
        key = _mix(key ^ _mix(_mix(np.array([stream], np.uint64)) + _GOLDEN))
    epoch_key = _mix(key + np.atleast_1d(epoch).astype(np.uint64) * _GOLDEN)
    return shuffled(index, len(rows), epoch_key.reshape(epoch.shape))


def _feistel(value: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64], half: np.uint64) -> Any:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for _ in range(_NUM_ROUNDS):
        key = key + _GOLDEN
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); arrays only, as numpy warns where scalars wrap."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
