"""A supervised process's side: it dies with its supervisor, and tells it which step is done."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path

SUPERVISOR = "SHARDED_TRAIN_SUPERVISOR"  # its pid
PROGRESS = "SHARDED_TRAIN_PROGRESS"  # a file of this process alone, on a disk of this host
_DIGITS = 20
_PR_SET_PDEATHSIG = 1


def die_with_supervisor(environ: Mapping[str, str] = os.environ) -> None:
    """Has the kernel kill this process when its supervisor dies, by whatever signal: nobody would stop it otherwise."""
    if SUPERVISOR not in environ or not hasattr(os, "getppid"):
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != int(environ[SUPERVISOR]):  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


class Progress:
    """Writes the number of the last step done where the supervisor reads it; does nothing when there is none."""

    def __init__(self, environ: Mapping[str, str] = os.environ):
        path = environ.get(PROGRESS)
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def step(self, step: int) -> None:
        """`step` steps are done. Costs a write of twenty bytes into the page cache."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: the supervisor then knows less, and the run goes on
                os.pwrite(self._file, f"{step:{_DIGITS}d}".encode(), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_step(path: Path) -> int:
    """The step in a file that `Progress` writes; -1 before the first."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
