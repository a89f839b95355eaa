"""Batches: the samples of a step are the same on any mesh, for any number of processes, and after any resume."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharded_train.data.loader import (
    Loader,
    LocalBatches,
    batch_number,
    device_part,
    local_rows,
    num_train_samples,
    num_train_steps,
    slow_loader,
    validation_batches,
)
from sharded_train.data.mixture import Member, Mixture
from sharded_train.data.rows import KEYS, ArrayStream, Row, Rows
from sharded_train.errors import ConfigError

BATCH = (8, 16)


def made(num_rows: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    stream = rng.integers(1, 1000, num_rows * BATCH[1] - 5).astype(np.uint16)
    stream[::13] = stream[-1] = 0
    return Rows(ArrayStream(stream), BATCH[1], 0)


@pytest.fixture(scope="module")
def rows() -> Mixture:
    return Mixture((Member("only", made(37)),))


def mixed(*, weighted: bool) -> Mixture:
    weights = [5.0, 1.0, 2.0] if weighted else [None] * 3
    epochs = [None, 3, None]
    members = [Member(str(n), made(20 + 9 * n, n), w, e) for n, (w, e) in enumerate(zip(weights, epochs, strict=True))]
    return Mixture(tuple(members))


def placed(shape: tuple[int, int], *spec: str | tuple[str, ...] | None) -> NamedSharding:
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    return NamedSharding(Mesh(devices, ("data", "tensor")), PartitionSpec(*spec))


def expected_batch(rows: Mixture, seed: int, step: int) -> Row:
    chosen = [rows[int(row)] for row in rows.order(seed, step * BATCH[0] + np.arange(BATCH[0]))]
    return {key: np.stack([row[key] for row in chosen]) for key in KEYS}


SHARDINGS = {
    "one device": ((1, 1), ()),
    "data": ((8, 1), ("data",)),
    "two rows a device, tensor shares them": ((4, 2), ("data",)),
    "all devices hold everything": ((2, 4), ()),
    "rows cut too": ((2, 4), ("data", "tensor")),
    "data from two axes": ((4, 2), (("data", "tensor"),)),
}


@pytest.mark.parametrize(("shape", "spec"), SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("num_threads", [0, 3])
def test_batches_do_not_depend_on_the_mesh_or_the_threads(
    rows: Mixture, shape: tuple[int, int], spec: tuple[str, ...], num_threads: int
) -> None:
    sharding = placed(shape, *spec)
    with Loader(rows, batch_shape=BATCH, sharding=sharding, seed=4, num_threads=num_threads) as loader:
        for step, batch in enumerate(islice(loader, 11)):  # over two ends of an epoch
            assert set(batch) == set(KEYS)
            for key, value in expected_batch(rows, 4, step).items():
                assert batch[key].sharding == sharding
                assert batch[key].dtype == np.int32
                np.testing.assert_array_equal(batch[key], value)


@pytest.mark.parametrize("start_step", [1, 4, 5, 40])
def test_restarting_gives_the_batches_of_running_through(rows: Mixture, start_step: int) -> None:
    sharding = placed((4, 2), "data")
    with Loader(rows, batch_shape=BATCH, sharding=sharding, seed=9, start_step=start_step) as loader:
        for step, batch in enumerate(islice(loader, 3), start_step):
            for key, value in expected_batch(rows, 9, step).items():
                np.testing.assert_array_equal(batch[key], value)


def test_epochs_come_to_an_end_with_every_row_seen_as_often(rows: Mixture) -> None:
    sharding, num_epochs = placed((8, 1), "data"), 3
    num_steps = num_train_steps(len(rows), BATCH[0], num_epochs)
    assert num_steps == 14  # ceil(3 epochs x 37 rows / 8)
    with Loader(rows, batch_shape=BATCH, sharding=sharding, seed=1, num_epochs=num_epochs) as loader:
        batches = [jax.device_get(batch) for batch in loader]
    assert len(batches) == num_steps
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    held = np.concatenate([batch["segments"] for batch in batches])[:, 0] > 0
    assert held.sum() == num_epochs * len(rows)
    assert held[: held.sum()].all()
    targets = np.concatenate([batch["targets"] for batch in batches])
    assert (targets >= 0).sum() == num_epochs * rows.members[0].rows.num_places
    assert (targets[~held] == -1).all()
    # The first epoch does not depend on how many there are.
    with Loader(rows, batch_shape=BATCH, sharding=sharding, seed=1, num_epochs=1) as loader:
        first = np.concatenate([np.asarray(batch["tokens"]) for batch in loader])[: len(rows)]
    np.testing.assert_array_equal(first, tokens[: len(rows)])


def test_a_loader_that_starts_at_the_end_is_empty(rows: Mixture) -> None:
    with Loader(rows, batch_shape=BATCH, sharding=placed((1, 1)), seed=1, num_epochs=1, start_step=5) as loader:
        assert list(loader) == []


def test_a_batch_larger_than_an_epoch_goes_on_into_the_next() -> None:
    few = Mixture((Member("few", made(3)),))
    with Loader(few, batch_shape=BATCH, sharding=placed((1, 1)), seed=1) as loader:
        batch = next(loader)
    np.testing.assert_array_equal(batch["tokens"], expected_batch(few, 1, 0)["tokens"])
    assert len(np.unique(np.asarray(batch["tokens"])[:3], axis=0)) == 3


@pytest.mark.parametrize("num_threads", [0, 2])
def test_validation_has_every_row_once_and_then_padding(rows: Mixture, num_threads: int) -> None:
    arguments: dict[str, Any] = {"batch_shape": BATCH, "sharding": placed((4, 2), "data"), "num_threads": num_threads}
    with validation_batches(rows, **arguments) as batches:
        values = [jax.device_get(batch) for batch in batches]
    assert len(values) == 5  # ceil(37 rows / 8)
    for key in KEYS:
        got = np.concatenate([value[key] for value in values])
        np.testing.assert_array_equal(got[: len(rows)], np.stack([rows[index][key] for index in range(len(rows))]))
        np.testing.assert_array_equal(got[len(rows) :], np.stack([rows.empty()[key]] * 3))
    with validation_batches(rows, **arguments, num_batches=2) as batches:
        some = [jax.device_get(batch) for batch in batches]
    assert len(some) == 2
    np.testing.assert_array_equal(some[1]["tokens"], values[1]["tokens"])


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """What a process of several sees of a sharding: the devices that are its own."""

    whole: NamedSharding
    process: int
    num_processes: int

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[jax.Device, tuple[slice, ...]]:
        every: dict[jax.Device, Any] = dict(self.whole.devices_indices_map(shape))
        own = np.array_split(np.array(self.whole.mesh.devices).reshape(-1), self.num_processes)[self.process]
        return {device: every[device] for device in own}


class CountingRows:
    """Rows that note which of them were read."""

    def __init__(self, rows: Mixture):
        self.rows = rows
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Row:
        self.read.append(index)
        return self.rows[index]


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, 1), ("data",)), ((4, 2), ("data",)), ((2, 4), ("data",)), ((4, 2), ("tensor",)), ((1, 8), ())],
)
@pytest.mark.parametrize("rows", [mixed(weighted=True), mixed(weighted=False)], ids=["weighted", "joined"])
def test_processes_read_only_their_rows_and_together_the_same_batch(
    rows: Mixture, num_processes: int, shape: tuple[int, int], spec: tuple[str, ...]
) -> None:
    step = 3
    expected = expected_batch(rows, 2, step)
    seen = set()
    for process in range(num_processes):
        sharding = OneProcess(placed(shape, *spec), process, num_processes)
        places = local_rows(sharding, BATCH)  # type: ignore[arg-type]
        counting = CountingRows(rows)
        source = LocalBatches(
            counting,  # type: ignore[arg-type]
            partial(rows.order, 2),
            places,
            BATCH[0],
            range(step, step + 1),
            np.arange(BATCH[1])[::-1],
        )
        local = {key: array[:, ::-1] for key, array in source[0].items()}
        for key in KEYS:
            np.testing.assert_array_equal(local[key], expected[key][places])
        assert counting.read == rows.order(2, step * BATCH[0] + places).tolist()
        for index in sharding.addressable_devices_indices_map(BATCH).values():
            part = device_part(local["tokens"], places, index, BATCH)
            np.testing.assert_array_equal(part, expected["tokens"][index])
        held = {
            place
            for rows_of, _ in sharding.addressable_devices_indices_map(BATCH).values()
            for place in range(BATCH[0])[rows_of]
        }
        assert set(places.tolist()) == held
        seen |= held
    assert seen == set(range(BATCH[0]))


class BadDisk:
    """A stream on a disk that fails."""

    def __len__(self) -> int:
        return 1000

    def read(self, start: int, stop: int) -> Any:
        raise OSError(f"place {start} cannot be read")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_while_reading_reaches_the_loop(num_threads: int) -> None:
    unreadable = Mixture((Member("only", Rows(BadDisk(), BATCH[1], 0)),))
    arguments: dict[str, Any] = {"batch_shape": BATCH, "sharding": placed((1, 1)), "num_threads": num_threads}
    with Loader(unreadable, seed=0, **arguments) as loader, pytest.raises(OSError, match=r"place \d+ cannot be read"):
        next(loader)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("start_step", [0, 3])
def test_mixtures_are_the_same_for_any_mesh_threads_and_start(weighted: bool, start_step: int) -> None:
    rows = mixed(weighted=weighted)
    for shape, num_threads in (((1, 1), 0), ((4, 2), 3)):
        arguments: dict[str, Any] = {"batch_shape": BATCH, "sharding": placed(shape, "data"), "seed": 7}
        with Loader(rows, **arguments, num_threads=num_threads, start_step=start_step) as loader:
            for step, batch in enumerate(islice(loader, 6), start_step):
                np.testing.assert_array_equal(batch["tokens"], expected_batch(rows, 7, step)["tokens"])


@pytest.mark.parametrize("weighted", [True, False])
def test_a_mixture_ends_when_a_source_may_not_be_gone_through_again(weighted: bool) -> None:
    rows = mixed(weighted=weighted)
    num_samples = num_train_samples(rows)
    assert num_samples == rows.num_samples
    with Loader(rows, batch_shape=BATCH, sharding=placed((1, 1)), seed=0) as loader:
        batches = [jax.device_get(batch) for batch in loader]
    held = np.concatenate([batch["segments"] for batch in batches])[:, 0] > 0
    assert held.sum() == num_samples
    assert len(batches) == -(-num_samples // BATCH[0])


class SlowDisk(ArrayStream):
    """A stream of which every read takes a while."""

    def read(self, start: int, stop: int) -> Any:
        time.sleep(0.02)
        return super().read(start, stop)


@pytest.mark.parametrize(("num_threads", "least", "most"), [(0, 0.48, 9.0), (4, 0.0, 0.4)])
def test_waiting_is_measured_and_overlapped(num_threads: int, least: float, most: float) -> None:
    fast = made(37)
    rows = Mixture((Member("slow", dataclasses.replace(fast, stream=SlowDisk(fast.stream.tokens))),))  # type: ignore
    arguments: dict[str, Any] = {"batch_shape": BATCH, "sharding": placed((1, 1)), "num_threads": num_threads}
    with Loader(rows, seed=0, **arguments) as loader:
        next(loader)  # nothing can be read ahead of it
        before = loader.seconds_waited
        for _ in range(3):  # a batch takes 0.16 seconds of reading
            time.sleep(0.3)
            next(loader)
        assert least <= loader.seconds_waited - before <= most


def test_a_slow_loader_is_told_of_only_when_it_is() -> None:
    assert slow_loader(0.04, 1.0, 2) is None
    words = slow_loader(3.0, 10.0, 2)
    assert words is not None
    assert "30% of the time" in words
    assert "read_threads (now 2)" in words


def test_more_documents_than_a_row_may_hold_are_refused() -> None:
    """cuDNN's table would be too small, and its output no number."""
    rows = mixed(weighted=False)
    most = max(int(rows[i]["segments"].max() + (rows[i]["segments"].min() == 0)) for i in range(len(rows)))
    places = np.arange(BATCH[0])
    order = lambda samples: samples % len(rows)
    source = partial(LocalBatches, rows, order, places, BATCH[0], range(len(rows)), np.arange(BATCH[1]))
    every = range(-(-len(rows) // BATCH[0]))
    assert all(source(most)[i].keys() == set(KEYS) for i in every)
    with pytest.raises(ConfigError, match=rf"attention.max_documents = {most - 1}: set it to {most} or more"):
        [source(most - 1)[i] for i in every]


def test_a_row_of_one_document_may_have_padding() -> None:
    class One:
        def __getitem__(self, index: int) -> Row:
            row = {key: np.ones(BATCH[1], np.int32) for key in KEYS}
            row["segments"][-3:] = 0
            return row

    order = lambda samples: samples
    source = LocalBatches(One(), order, np.arange(2), BATCH[0], range(1), np.arange(BATCH[1]), 1)  # type: ignore[arg-type]
    assert source[0]["segments"].min() == 0


@pytest.mark.parametrize("left_out", [(), (0,), (3,), (3, 4), (4, 3, 9), (0, 1, 2)])
def test_batches_left_out_are_passed_over(left_out: tuple[int, ...]) -> None:
    taken = [number for number in range(30) if number not in left_out]
    assert [batch_number(step, left_out) for step in range(20)] == taken[:20]


def test_a_resume_passes_over_the_same_batches(rows: Mixture) -> None:
    """Two epochs of 37 rows are 10 batches; two of them are left out."""
    options: dict[str, Any] = {"batch_shape": BATCH, "sharding": placed((4, 2), "data"), "seed": 4, "num_epochs": 2}
    with Loader(rows, left_out=(2, 5), **options) as loader:
        through = list(loader)
    assert len(through) == 8
    for step, number in enumerate([0, 1, 3, 4, 6, 7, 8]):
        np.testing.assert_array_equal(through[step]["tokens"], expected_batch(rows, 4, number)["tokens"])
    with Loader(rows, left_out=(2, 5), start_step=3, **options) as loader:
        for batch, expected in zip(loader, through[3:], strict=True):
            np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
