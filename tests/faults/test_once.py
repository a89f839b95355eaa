"""A run that was to begin anew does so once, and not again after each fault."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharded_train.faults.once import Once
from sharded_train.faults.progress import SUPERVISOR


@pytest.mark.parametrize("asked", ["never", "40"])
def test_once_for_each_supervisor(tmp_path: Path, asked: str) -> None:
    first, second = ({SUPERVISOR: str(pid)} for pid in (os.getpid(), os.getppid()))
    assert Once(tmp_path, first).resume(asked) == asked
    assert Once(tmp_path, first).resume(asked) == asked  # it died before it was done
    Once(tmp_path, first).done(asked)
    assert Once(tmp_path, first).resume(asked) == "auto"
    assert Once(tmp_path, second).resume(asked) == asked
    assert Once(tmp_path, {}).resume(asked) == asked


def test_what_may_be_asked_every_time(tmp_path: Path) -> None:
    once = Once(tmp_path, {SUPERVISOR: str(os.getpid())})
    for asked in ("auto", "must"):
        once.done(asked)
        assert once.resume(asked) == asked
    assert list(tmp_path.iterdir()) == []
