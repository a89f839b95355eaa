"""What is asked of a run's first start alone: a supervisor that starts it again asks for it again, word for word."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sharded_train.faults.lock import born
from sharded_train.faults.progress import SUPERVISOR

FILE = "resumed_for"  # in the workdir: the supervisor whose --resume=never or --resume=STEP has been done


class Once:
    """For process 0, which chooses for all. Without a supervisor every start is a first one."""

    def __init__(self, workdir: Path, environ: Mapping[str, str] = os.environ):
        self._path = workdir / FILE
        pid = environ.get(SUPERVISOR)
        self._supervisor = None if pid is None else f"{pid} {born(int(pid))}\n"

    def resume(self, asked: str) -> str:
        """`asked`, of `--resume`, until it has been done; "auto" in the starts after that."""
        if asked in ("auto", "must") or self._supervisor is None or not self._path.exists():
            return asked
        return "auto" if self._path.read_text() == self._supervisor else asked

    def done(self, asked: str) -> None:
        """The run has begun as it was asked to."""
        if asked not in ("auto", "must") and self._supervisor is not None:
            self._path.write_text(self._supervisor)
