"""Rows to global batches: each process reads the rows that its devices hold, a few steps ahead, in Grain's threads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import grain
import jax
import numpy as np
import numpy.typing as npt

from sharded_train.data.order import train_sample
from sharded_train.data.rows import KEYS, Row, Rows

IntArray = npt.NDArray[np.int64]
_STEPS_AHEAD = 2  # per thread


def num_train_steps(num_rows: int, global_batch_size: int, num_epochs: int | None) -> int:
    """How many steps the epochs last; the last batch may be filled up with empty rows. Without a number, no end."""
    return sys.maxsize if num_epochs is None else -(-num_epochs * num_rows // global_batch_size)


def local_rows(sharding: jax.sharding.Sharding, batch_shape: tuple[int, int]) -> IntArray:
    """The rows of a global batch that this process's devices hold any part of, ascending, each once."""
    held = np.zeros(batch_shape[0], bool)
    for index in sharding.addressable_devices_indices_map(batch_shape).values():
        assert index is not None
        held[index[0]] = True
    return np.flatnonzero(held)


def device_part(
    local: npt.NDArray[np.int32], places: IntArray, index: tuple[slice, ...], batch_shape: tuple[int, int]
) -> npt.NDArray[np.int32]:
    """What a device holds of a global batch, cut from `local`: its process's rows, those of `places`."""
    first, end, _ = index[0].indices(batch_shape[0])
    start = int(np.searchsorted(places, first))
    return local[start : start + end - first, index[1]]


@dataclasses.dataclass(frozen=True)
class LocalBatches:
    """A data source for Grain: item i is what this process holds of the batch of step `steps[i]`, int32 [rows, length].

    `order` tells for global samples (step * batch size + place in the batch) which rows they are, -1 for none.
    """

    rows: Rows
    order: Callable[[IntArray], IntArray]
    places: IntArray  # in the global batch, of the rows to read
    batch_size: int
    steps: range

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, item: int) -> Row:
        chosen = self.order(self.steps[item] * self.batch_size + self.places)
        read = [self.rows[int(row)] if row >= 0 else self.rows.empty() for row in chosen]
        return {key: np.stack([row[key] for row in read]) for key in KEYS}


class Batches(Iterator[dict[str, jax.Array]]):
    """Global batches, dicts of int32 arrays [batch_shape] placed by `sharding`. Close it after use."""

    def __init__(
        self,
        rows: Rows,
        order: Callable[[IntArray], IntArray],
        *,
        batch_shape: tuple[int, int],
        sharding: jax.sharding.Sharding,
        steps: range,
        num_threads: int,
    ):
        assert batch_shape[1] == rows.sequence_length, (batch_shape, rows.sequence_length)
        self._batch_shape, self._sharding = batch_shape, sharding
        self._places = local_rows(sharding, batch_shape)
        source = LocalBatches(rows, order, self._places, batch_shape[0], steps)
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=_STEPS_AHEAD * num_threads)
        self._local = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    def __next__(self) -> dict[str, jax.Array]:
        local = next(self._local)
        return {key: self._global_array(local[key]) for key in KEYS}

    def close(self) -> None:
        """Stop reading ahead."""
        self._local.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _global_array(self, local: npt.NDArray[np.int32]) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            assert index is not None
            return device_part(local, self._places, index, self._batch_shape)

        return jax.make_array_from_callback(self._batch_shape, self._sharding, shard)


class Loader(Batches):
    """The training batches of steps start_step, start_step + 1, ...

    Place b of the batch of step s holds the training sample s * batch_shape[0] + b (see `train_sample`): batches do
    not depend on the mesh, on the number of processes, or on where a run was resumed. With `num_epochs` they come
    to an end, after `num_train_steps`, and the last of them is filled up with empty rows. Each process has a loader
    of its own, all with the same arguments.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_shape: tuple[int, int],
        sharding: jax.sharding.Sharding,
        seed: int,
        start_step: int = 0,
        num_threads: int = 2,
        num_epochs: int | None = None,
    ):
        num_samples = sys.maxsize if num_epochs is None else num_epochs * len(rows)

        def order(samples: IntArray) -> IntArray:
            return np.where(samples < num_samples, train_sample(rows, seed, samples), -1)

        steps = range(start_step, num_train_steps(len(rows), batch_shape[0], num_epochs))
        super().__init__(rows, order, batch_shape=batch_shape, sharding=sharding, steps=steps, num_threads=num_threads)


def validation_batches(
    rows: Rows,
    *,
    batch_shape: tuple[int, int],
    sharding: jax.sharding.Sharding,
    num_threads: int = 2,
    num_batches: int | None = None,
) -> Batches:
    """Every row once, in order, the last batch filled up with empty rows; at most `num_batches`, if that is given."""
    steps = range(num_train_steps(len(rows), batch_shape[0], num_epochs=1))[:num_batches]

    def order(samples: IntArray) -> IntArray:
        return np.where(samples < len(rows), samples, -1)

    return Batches(rows, order, batch_shape=batch_shape, sharding=sharding, steps=steps, num_threads=num_threads)
