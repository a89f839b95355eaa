"""Two runs that would save to one place: the later start has it, and the other's saves fail and say why."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from sharded_train.checkpoint import Checkpointer, CheckpointError, owner
from sharded_train.checkpoint.owner import Owner

STATE = {"w": jnp.arange(8.0)}


def test_the_latest_start_has_the_place(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Checkpointer(place))) for _ in range(2))
        first.claim(Owner("one", "runs/one"), [place])
        first.save(1, STATE, {})
        first.wait()
        second.claim(Owner("two", "runs/two"), [place])
        with pytest.raises(CheckpointError, match=f"{place} is by now that of the run in runs/two, started by process"):
            first.save(2, STATE, {})
        second.save(3, STATE, {})
        second.wait()
        assert second.steps() == [1, 3]
        first.claim(Owner("two", "a copy of runs/two"), [place])  # the same run, from a copy of its workdir
        with pytest.raises(CheckpointError, match="by now that of the run in a copy of runs/two"):
            second.save(4, STATE, {})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', "\0" * 100])
def test_a_damaged_record_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / owner.NAME).write_text(text)
    assert owner.read(tmp_path) is None
    Owner("one", "runs/one").write(tmp_path)
    assert owner.read(tmp_path) is not None


def test_a_place_that_cannot_be_written_yet_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Checkpointer(tmp_path / "first").claim(Owner("one", "runs/one"), [tmp_path / "file/place"])
