"""Disks that are full, that cannot be written, and that come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sharded_train.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, SavePolicy, saving

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def state_of(step: int, mebibytes: int = 6) -> Any:
    return {"w": jnp.full((mebibytes, MIB // 4), step, jnp.float32)}


def steps_on(folder: Path) -> list[int]:
    return Checkpointer(folder).steps()


def test_too_little_room_is_told_with_the_numbers_before_anything_is_written(disk: Path) -> None:
    with contextlib.closing(Checkpointer(disk / "checkpoints")) as checkpointer:
        checkpointer.save(1, state_of(1), {})
        checkpointer.wait()
        with pytest.raises(CheckpointError, match=r"has 18,\d+,\d+ bytes free.*takes 6,291,456 \+ .* bytes free"):
            checkpointer.save(2, state_of(2), {})
        assert os.listdir(disk / "checkpoints") == ["1"]


def test_a_disk_that_fills_up_on_the_way_leaves_what_was_there_and_the_run_goes_on(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.files, "free_bytes", lambda directory: 1 << 40)  # somebody else fills it meanwhile
    told: list[str] = []
    with contextlib.closing(Checkpointer(disk / "checkpoints")) as checkpointer:
        policy = SavePolicy(checkpointer, CheckpointConfig(every=1, retry_seconds=0.01, max_failures=50), told.append)

        def turn(step: int) -> None:
            if policy.due(step):
                policy.save(step, state_of(step), {})
            checkpointer._pending and checkpointer._pending[1].result()

        turn(1)
        (disk / "others").write_bytes(bytes(14 * MIB))
        turn(2)
        turn(3)
        assert "the checkpoint of step 2 was not written to" in told[0]
        assert "No space left" in told[0] or "RESOURCE_EXHAUSTED" in told[0]
        assert steps_on(disk / "checkpoints") == [1]
        assert os.listdir(disk / "checkpoints") == ["1"]  # half a checkpoint would only take room
        (disk / "others").unlink()
        turn(4)
        turn(5)
        assert steps_on(disk / "checkpoints")[-1] >= 4
        assert any("is written, after" in text for text in told)


def test_a_disk_that_cannot_be_written_is_told_in_no_time_and_the_fallback_used(disk: Path, tmp_path: Path) -> None:
    told: list[str] = []
    checkpointer = Checkpointer(disk / "checkpoints", fallback=tmp_path / "second")
    with contextlib.closing(checkpointer):
        settings = CheckpointConfig(every=1, retry_seconds=0.01, max_failures=2)
        policy = SavePolicy(checkpointer, settings, told.append)
        policy.save(1, state_of(1, 1), {})
        policy.finish(1, lambda: None)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        policy.save(2, state_of(2, 1), {})
        policy.finish(2, lambda: state_of(2, 1))
        assert "Read-only file system" in told[0]
        assert told[1].endswith(f"from now on checkpoints go to {tmp_path}/second.)")
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.path(2) == tmp_path / "second/2"
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    again = Checkpointer(disk / "checkpoints", fallback=tmp_path / "second")
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0, 1))
    step, state, _ = again.resume(again.choose("auto"), wanted, lambda path, run: None)
    assert (step, float(state["w"][0, 0])) == (2, 2.0)
    shutil.rmtree(disk / "checkpoints")


def test_old_ones_go_only_after_a_newer_one_is_verified_and_every_mth_stays(tmp_path: Path) -> None:
    with contextlib.closing(Checkpointer(tmp_path, keep=2, keep_every=4)) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, state_of(step, 1), {})
            checkpointer.wait()
        assert checkpointer.steps() == [4, 8, 10, 11]
        (checkpointer.path(11) / "VERIFIED").unlink()  # one that cannot be trusted does not count as kept
        checkpointer.save(12, state_of(12, 1), {})
        checkpointer.wait()
        assert checkpointer.steps() == [4, 8, 10, 12]
        assert checkpointer.roll_back(8) == [tmp_path / f"{step}.rolled_back" for step in (10, 11, 12)]
        checkpointer.save(9, state_of(9, 1), {})
        checkpointer.wait()
        assert checkpointer.steps() == [4, 8, 9]
