"""Rows to global batches: each process reads the rows that its devices hold, a few steps ahead, in Grain's threads.

The batch of the next step is on the devices before it is asked for, as far as the threads keep up; for how long they
did not is measured.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import grain
import jax
import numpy as np
import numpy.typing as npt

from sharded_train.data.mixture import Mixture
from sharded_train.data.rows import KEYS, Row
from sharded_train.errors import ConfigError

IntArray = npt.NDArray[np.int64]
_STEPS_AHEAD = 2  # per thread
_SLOW = 0.05  # of the time spent waiting is worth a word


def num_train_samples(rows: Mixture, num_epochs: int | None = None) -> int:
    """How many samples there are for training: so many epochs, and what the sources allow. Without either, no end."""
    epochs = sys.maxsize if num_epochs is None else num_epochs * rows.epoch_size
    return min(epochs, sys.maxsize if rows.num_samples is None else rows.num_samples)


def num_train_steps(num_rows: int, global_batch_size: int, num_epochs: int | None) -> int:
    """How many steps the epochs last; the last batch may be filled up with empty rows. Without a number, no end."""
    return sys.maxsize if num_epochs is None else -(-num_epochs * num_rows // global_batch_size)


def batch_number(step: int, left_out: Sequence[int]) -> int:
    """Of the batch that the step after `step` steps takes: the step's own, were none left out."""
    number = step
    for left in sorted(left_out):
        number += left <= number
    return number


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

    `order` tells for global samples (batch number * batch size + place in the batch) which rows they are, -1 for none.
    """

    rows: Mixture
    order: Callable[[IntArray], IntArray]
    places: IntArray  # in the global batch, of the rows to read
    batch_size: int
    steps: range
    token_order: IntArray  # which token of a row comes to each place
    max_documents: int | None = None  # that a row may hold, padding counted as one; None: any number
    left_out: Sequence[int] = ()  # numbers of batches

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, item: int) -> Row:
        chosen = self.order(batch_number(self.steps[item], self.left_out) * self.batch_size + self.places)
        read = [self.rows[int(row)] if row >= 0 else self.rows.empty() for row in chosen]
        self._check_documents(item, read)
        return {key: np.stack([row[key] for row in read])[:, self.token_order] for key in KEYS}

    def _check_documents(self, item: int, rows: Sequence[Row]) -> None:
        """Padding counts as a document too, but not after a single one: the causal mask alone hides it."""
        limit = self.max_documents
        padded = limit is not None and limit > 1
        most = max((int(row["segments"].max() + (padded and row["segments"].min() == 0)) for row in rows), default=0)
        if limit is not None and most > limit:
            raise ConfigError(
                f"a row of the batch of step {self.steps[item]} holds {most} documents{' with its padding' * padded}, "
                f"more than attention.max_documents = {limit}: set it to {most} or more (each costs memory in cuDNN's "
                "attention), or use model.attention = xla"
            )


def slow_loader(seconds_waited: float, seconds: float, read_threads: int) -> str | None:
    """What to say when steps waited for their batches in a noticeable part of the time; None when they did not."""
    if seconds_waited <= _SLOW * seconds:
        return None
    return (
        f"the loader is the bottleneck: steps waited for their batches {seconds_waited / seconds:.0%} of the time; "
        f"raise data.read_threads (now {read_threads}), or put data.cache_dir on a faster disk"
    )


class Batches(Iterator[dict[str, jax.Array]]):
    """Global batches, dicts of int32 arrays [batch_shape] placed by `sharding`. Close it after use.

    `token_order` is which token of a row comes to each place, where they are not in their own order.

    `seconds_waited` is how long `next` has taken so far, all calls together.
    """

    def __init__(
        self,
        rows: Mixture,
        order: Callable[[IntArray], IntArray],
        *,
        batch_shape: tuple[int, int],
        sharding: jax.sharding.Sharding,
        steps: range,
        num_threads: int,
        token_order: IntArray | None,
        max_documents: int | None = None,
        left_out: Sequence[int] = (),
    ):
        assert batch_shape[1] == rows.sequence_length, (batch_shape, rows.sequence_length)
        self._batch_shape, self._sharding = batch_shape, sharding
        self._places = local_rows(sharding, batch_shape)
        token_order = np.arange(batch_shape[1]) if token_order is None else token_order
        source = LocalBatches(rows, order, self._places, batch_shape[0], steps, token_order, max_documents, left_out)
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=_STEPS_AHEAD * num_threads)
        batches = grain.MapDataset.source(source).to_iter_dataset(options).map(self._place)
        if num_threads:
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=1)
        self._batches = iter(batches)
        self.seconds_waited = 0.0

    def __next__(self) -> dict[str, jax.Array]:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds_waited += time.perf_counter() - start

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, local: Row) -> dict[str, jax.Array]:
        return {key: self._global_array(local[key]) for key in KEYS}

    def _global_array(self, local: npt.NDArray[np.int32]) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            assert index is not None
            return device_part(local, self._places, index, self._batch_shape)

        return jax.make_array_from_callback(self._batch_shape, self._sharding, shard)


class Loader(Batches):
    """The training batches of steps start_step, start_step + 1, ...

    Place b of the batch of step s holds the training sample s * batch_shape[0] + b (see `Mixture.order`): batches do
    not depend on the mesh, on the number of processes, or on where a run was resumed. With `num_epochs`, or when a
    source may not be gone through more often, they come to an end, and the last of them is filled up with empty rows.
    Batches whose numbers are in `left_out` are passed over, so that later steps have later batches than their own.
    Each process has a loader of its own, all with the same arguments.
    """

    def __init__(
        self,
        rows: Mixture,
        *,
        batch_shape: tuple[int, int],
        sharding: jax.sharding.Sharding,
        seed: int,
        start_step: int = 0,
        num_threads: int = 2,
        num_epochs: int | None = None,
        token_order: IntArray | None = None,
        max_documents: int | None = None,
        left_out: Sequence[int] = (),
    ):
        num_samples = num_train_samples(rows, num_epochs)

        def order(samples: IntArray) -> IntArray:
            return np.where(samples < num_samples, rows.order(seed, samples), -1)

        num_batches = -(-num_samples // batch_shape[0])
        steps = range(start_step, num_batches - sum(left < num_batches for left in set(left_out)))
        super().__init__(
            rows,
            order,
            batch_shape=batch_shape,
            sharding=sharding,
            steps=steps,
            num_threads=num_threads,
            token_order=token_order,
            max_documents=max_documents,
            left_out=left_out,
        )


def validation_batches(
    rows: Mixture,
    *,
    batch_shape: tuple[int, int],
    sharding: jax.sharding.Sharding,
    num_threads: int = 2,
    num_batches: int | None = None,
    token_order: IntArray | None = None,
    max_documents: int | None = None,
) -> Batches:
    """Every row once, in order, the last batch filled up with empty rows; at most `num_batches`, if that is given."""
    steps = range(num_train_steps(len(rows), batch_shape[0], num_epochs=1))[:num_batches]

    def order(samples: IntArray) -> IntArray:
        return np.where(samples < len(rows), samples, -1)

    return Batches(
        rows,
        order,
        batch_shape=batch_shape,
        sharding=sharding,
        steps=steps,
        num_threads=num_threads,
        token_order=token_order,
        max_documents=max_documents,
    )
