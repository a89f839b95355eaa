"""Checkpoints on toy states: what comes back, what is kept, and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.checkpoint import Checkpointer, CheckpointError
from sharded_train.errors import ConfigError


def make_state(mesh: Mesh, size: int = 64) -> Any:
    """A state with a named tuple in it, as optax has them, and leaves that are split and replicated."""

    def put(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w = put(jax.random.normal(jax.random.key(0), (size, 32)), "data", "tensor")
    b = put(jnp.arange(32, dtype=jnp.float32), "tensor")
    adam = optax.ScaleByAdamState(put(jnp.int32(7)), {"w": w * 2, "b": b * 2}, {"w": w * 3, "b": b * 3})
    return {"params": {"w": w, "b": b}, "opt_state": (adam, optax.EmptyState()), "step": put(jnp.int32(7))}


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def mesh_of(data: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor])
    return Mesh(devices.reshape(data, tensor), ("data", "tensor"))


@pytest.fixture(scope="module")
def state() -> Any:
    return make_state(mesh_of(4, 2))


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", keep=2)) as checkpointer:
        yield checkpointer


def save_steps(checkpointer: Checkpointer, state: Any, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state, {"step": step})
    checkpointer.wait()


def wait_by_polling(checkpointer: Checkpointer) -> None:
    while checkpointer._pending is not None:
        checkpointer.check()
        time.sleep(0.01)


@pytest.mark.parametrize(("data", "tensor"), [(4, 2), (2, 1), (1, 8), (1, 1), (2, 2)])
def test_state_and_record_come_back_on_any_mesh(checkpointer: Checkpointer, state: Any, data: int, tensor: int) -> None:
    record = {"step": 7, "tokens_seen": 2**40, "mesh": {"data": 4}, "none": None, "loss": 0.1, "files": ["a", "b"]}
    checkpointer.save(7, state, record)
    checkpointer.wait()
    wanted = abstract(make_state(mesh_of(data, tensor)))
    restored, read = checkpointer.restore(None, wanted)
    assert read == record
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, wanted)


def test_a_directory_may_be_named_through_its_parent(tmp_path: Path, state: Any) -> None:
    (tmp_path / "here").mkdir()
    with contextlib.closing(Checkpointer(tmp_path / "here/../runs")) as checkpointer:
        save_steps(checkpointer, state, 1)
        jax.tree.map(np.testing.assert_array_equal, checkpointer.restore(1, abstract(state))[0], state)
    assert (tmp_path / "runs/1").is_dir()


def test_the_state_may_be_donated_while_it_is_being_saved(checkpointer: Checkpointer) -> None:
    state = make_state(mesh_of(4, 2), size=2**15)
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = advance(state)  # compiled before the race begins
    expected = jax.tree.map(np.array, state)
    wanted = abstract(state)
    checkpointer.save(1, state, {})
    for _ in range(5):
        state = advance(state)
    jax.block_until_ready(state)
    checkpointer.wait()
    jax.tree.map(np.testing.assert_array_equal, checkpointer.restore(1, wanted)[0], expected)


def test_the_last_ones_are_kept_and_nothing_foreign_is_touched(checkpointer: Checkpointer, state: Any) -> None:
    directory = checkpointer.directory
    for foreign in ("4", "007", "notes", "4.old", "x.deleting"):
        (directory / foreign).mkdir(parents=True)
        (directory / foreign / "file").write_text("somebody's")
    for leftover in ("2.orbax-checkpoint-tmp", "1.deleting", "3.4.saving", "3.4.saving.orbax-checkpoint-tmp"):
        (directory / leftover).mkdir()
    (directory / ".probe-0-4711").write_text("")
    assert checkpointer.steps() == []  # 4 is somebody's, and no candidate
    save_steps(checkpointer, state, 5, 6, 7)
    assert checkpointer.latest_step() == 7
    assert sorted(os.listdir(directory)) == ["007", "4", "4.old", "6", "7", "notes", "x.deleting"]


def test_a_partial_checkpoint_is_no_checkpoint(checkpointer: Checkpointer, state: Any) -> None:
    save_steps(checkpointer, state, 1)
    for name in ("2.orbax-checkpoint-tmp", "3.deleting"):
        shutil.copytree(checkpointer.path(1), checkpointer.directory / name)
    assert Checkpointer(checkpointer.directory).latest_step() == 1


def test_no_checkpoint_is_said_and_reading_makes_no_directory(checkpointer: Checkpointer, state: Any) -> None:
    assert checkpointer.latest_step() is None
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpointer.restore(None, abstract(state))
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3"):
        checkpointer.restore(3, abstract(state))
    assert not checkpointer.directory.exists()


def test_differences_are_told_in_words(checkpointer: Checkpointer, state: Any) -> None:
    save_steps(checkpointer, state, 1)
    wanted = abstract(state)
    replicated = wanted["step"].sharding
    wanted["params"] = {
        "w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=replicated),
        "c": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=replicated),
    }
    wanted["step"] = jax.ShapeDtypeStruct((), jnp.uint32, sharding=replicated)
    with pytest.raises(ConfigError) as caught:
        checkpointer.restore(1, wanted)
    assert [problem.strip() for problem in caught.value.problems[1:]] == [
        "params/b: float32[32] in the checkpoint, nothing in this run",
        "params/c: float32[3] in this run, nothing in the checkpoint",
        "params/w: float32[64,32] in the checkpoint, float32[64,16] in this run",
        "step: int32[] in the checkpoint, uint32[] in this run",
    ]


def test_a_save_that_fails_in_the_background_is_raised_by_the_next_check(checkpointer: Checkpointer) -> None:
    state = make_state(mesh_of(4, 2), size=2**13)  # more than the file size that is allowed below
    save_steps(checkpointer, state, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
    try:
        checkpointer.save(2, state, {})
        with pytest.raises(CheckpointError, match=r"step 2 was not written to .*/checkpoints/2: .*File too large"):
            wait_by_polling(checkpointer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpointer.latest_step() == 1
    save_steps(checkpointer, state, 2)  # and the run can go on
    assert checkpointer.steps() == [1, 2]


def test_a_step_is_not_overwritten(checkpointer: Checkpointer, state: Any) -> None:
    save_steps(checkpointer, state, 1)
    with pytest.raises(CheckpointError, match="already there"):
        checkpointer.save(1, state, {})


def largest_file(path: Path) -> Path:
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def empty(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            file.unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated arrays": lambda path: os.truncate(largest_file(path), 1000),
    "no arrays": lambda path: largest_file(path).unlink(),
    "no record": lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
    "half a record": lambda path: os.truncate(path / "_CHECKPOINT_METADATA", 50),
    "no tree": lambda path: (path / "state/_METADATA").unlink(),
    "half a tree": lambda path: os.truncate(path / "state/_METADATA", 50),
    "half a manifest": lambda path: os.truncate(path / "state/manifest.ocdbt", 20),
    "no state": lambda path: shutil.rmtree(path / "state"),
    "nothing": empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_so_is_the_one_before(
    checkpointer: Checkpointer, state: Any, damage: str
) -> None:
    save_steps(checkpointer, state, 1, 2)
    DAMAGES[damage](checkpointer.path(2))
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(None, abstract(state))
    path = str(checkpointer.path(2))
    assert str(caught.value).startswith(f"{path} cannot be read: ")
    assert "that of step 1" in str(caught.value)
    assert f"mv {path} {path}.damaged" in str(caught.value)
    checkpointer.path(2).rename(f"{path}.damaged")  # as advised
    assert checkpointer.restore(None, abstract(state))[1] == {"step": 1}
