"""Killed at every stage of a save, of its clean-up and of a resume; and processes of which one cannot write."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import soak
from sharded_train.checkpoint import Checkpointer, arrays, files, record, restoring, resuming
from sharded_train.checkpoint.saving import Save


class Killed(BaseException):
    """Nothing that comes after it runs, as after SIGKILL."""


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0).reshape(10, 100) * step, "step": jnp.int32(step)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def resume(directory: Path) -> tuple[int, Any]:
    checkpointer = Checkpointer(directory)
    step, state, _ = checkpointer.resume(checkpointer.choose("auto"), ABSTRACT, lambda path, run: None)
    assert checkpointer.remarks == []
    return step, state


def killed_before(module: Any, name: str, when: Callable[..., bool] = lambda *args: True) -> tuple[Any, str, Any]:
    function = getattr(module, name)

    def kill(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise Killed
        return function(*args, **options)

    return module, name, kill


def killed_after(module: Any, name: str, when: Callable[..., bool] = lambda *args: True) -> tuple[Any, str, Any]:
    function = getattr(module, name)

    def kill(*args: Any, **options: Any) -> Any:
        function(*args, **options)
        if when(*args):
            raise Killed

    return module, name, kill


def half_deleted(path: Path, **_: Any) -> None:
    """As far as a deletion may come."""
    for file in sorted(file for file in path.rglob("*") if file.is_file())[::2]:
        file.unlink()
    raise Killed


published = lambda path, to: files.is_step(to.name)
STAGES: dict[str, tuple[tuple[Any, str, Any], int]] = {  # what is done there, and which step counts after it
    "while Orbax writes": (killed_before(Save, "_written"), 2),
    "before fsync": (killed_before(files, "sync_all"), 2),
    "before it is read back": (killed_before(arrays, "digests_on_disk"), 2),
    "before the record": (killed_before(record, "write"), 2),
    "half of a record": (killed_before(Path, "replace", lambda path, to: path.name == "VERIFIED.tmp"), 2),
    "before the rename": (killed_before(files, "rename", published), 2),
    "after the rename": (killed_after(files, "rename", published), 3),
    "before the old one is renamed": (killed_before(files, "remove"), 3),
    "before the old one is deleted": (killed_after(files, "rename", lambda path, to: "deleting" in to.name), 3),
    "half-way through the deletion": ((shutil, "rmtree", half_deleted), 3),
}


@pytest.mark.parametrize("stage", STAGES)
def test_killed_in_a_save_nothing_verified_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    (module, name, function), expected = STAGES[stage]
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        checkpointer.save(step, state_of(step), {})
        checkpointer.wait()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, function)
        checkpointer.save(3, state_of(3), {})
        with pytest.raises(Killed):
            checkpointer.wait()
    checkpointer.close()
    step, state = resume(tmp_path)
    assert step == expected
    jax.tree.map(np.testing.assert_array_equal, state, state_of(expected))
    with contextlib.closing(Checkpointer(tmp_path, keep=2)) as again:  # and the run goes on, and cleans up
        for step in range(expected + 1, 5):
            again.save(step, state_of(step), {})
            again.wait()
    assert sorted(os.listdir(tmp_path)) == ["3", "4"]


@pytest.mark.parametrize("stage", ["before it is loaded", "before the damaged one is set aside", "before a roll-back"])
def test_killed_in_a_resume_it_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), {})
    os.truncate(tmp_path / "3/state/_METADATA", 7)
    how = "1" if stage == "before a roll-back" else "auto"
    with monkeypatch.context() as patched:
        if stage == "before it is loaded":
            patched.setattr(*killed_before(restoring.arrays, "load"))
        else:
            patched.setattr(*killed_before(files, "put_aside"))
        choice = checkpointer.choose(how)
        with pytest.raises(Killed):
            checkpointer.resume(choice, ABSTRACT, lambda path, run: None)
    again = Checkpointer(tmp_path)
    step, state, _ = again.resume(again.choose(how), ABSTRACT, lambda path, run: None)
    assert step == (1 if how == "1" else 2)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    assert again.choose("auto") == resuming.Choice((1,) if how == "1" else (2, 1))


@pytest.mark.slow  # processes that start JAX again and again: 30 to 90 s each
@pytest.mark.parametrize("num_processes", [1, 2])
def test_kill_9_at_random_moments(num_processes: int) -> None:
    found = soak.kill(5, num_processes, 60, train=False, rng=random.Random(num_processes))
    assert found["runs"] >= 1
    assert found["kills"] >= 1


FAULTY = """
import sys, time
import jax
from pathlib import Path
from sharded_train.checkpoint import arrays, files, saving
how, directory, address, index = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(index))
from benchmarks import checkpoint_child
save_async = arrays.save_async
calls = []

class Fails:
    def result(self, timeout):
        raise OSError(122, "Disk quota exceeded")

def broken(*args):
    calls.append(args)
    response = save_async(*args)
    return Fails() if how == "quota" and index == "1" and len(calls) < 3 else response

def cannot_write(*args):
    calls.append(args)
    return "the folder cannot be written" if index == "1" and len(calls) < 3 else None

def twice(function, answer):
    def asked(*args):
        calls.append(args)
        return answer() if len(calls) < 3 else function(*args)
    return asked

def refuse():
    raise OSError(5, "Input/output error")

if how == "quota":
    arrays.save_async = broken
elif how == "clearing" and index == "0":
    files.remove_leftovers = twice(files.remove_leftovers, refuse)
elif how == "probe":
    saving._cannot_write = cannot_write
begun = time.monotonic()
checkpoint_child.CheckpointConfig = lambda every: saving_config
from sharded_train.checkpoint import CheckpointConfig
saving_config = CheckpointConfig(every=1, retry_seconds=0.1)
checkpoint_child.main(Path(directory), 6)
assert time.monotonic() - begun < 60
"""


@pytest.mark.slow  # two processes start JAX: 20 to 40 s each
@pytest.mark.parametrize(
    ("how", "process", "reason"),
    [
        ("quota", 1, "Disk quota exceeded"),
        ("probe", 1, "cannot be written"),
        ("clearing", 0, "Input/output error"),  # what a save that was killed has left cannot be removed
    ],
)
def test_a_process_that_cannot_write_is_named_by_all_and_the_run_goes_on(
    tmp_path: Path, how: str, process: int, reason: str
) -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        address = f"localhost:{listening.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FAULTY, how, str(tmp_path / "checkpoints"), address, str(index)],
            env={**os.environ, "PYTHONPATH": str(soak.ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for one in started:
        out, err = one.communicate()
        assert one.returncode == 0, err
        assert "done" in out
        assert f"process {process}: " in err or f"process {process} on " in err
        assert reason in err
        assert "failure 2 of at most" in err
        assert "is written, after 2 that failed" in err
    assert Checkpointer(tmp_path / "checkpoints").steps() == [5, 6]
