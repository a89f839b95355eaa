"""What the training loop tells of itself: to the watchdog, to the accounts of its time, and to the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.faults.config import WatchdogConfig
from sharded_train.faults.goodput import STEP, GoodputLog
from sharded_train.faults.lock import WorkdirLock
from sharded_train.faults.progress import Progress
from sharded_train.faults.watchdog import Watchdog


class Guard:
    """Of one life of a run. It begins in phase "startup"; the others are those of `WatchdogConfig`, and "evaluate"."""

    def __init__(self, deadlines: WatchdogConfig, began: float):
        """`began` is when the process did, seconds since 1970."""
        # An evaluation is steps without a backward pass.
        self._watchdog = Watchdog({**dataclasses.asdict(deadlines), "evaluate": deadlines.step})
        self._progress = Progress()
        self._goodput = GoodputLog(began)
        self._phase = "startup"
        self._lock: WorkdirLock | None = None
        self.code: int | None = None  # how the run has ended, once that is known

    def __enter__(self) -> Guard:
        self._watchdog.__enter__()
        self._watchdog.enter(self._phase)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watchdog.__exit__()
        self._progress.close()
        if self.code is None:
            self.code = Exit.CONFIG if kind is not None and issubclass(kind, ConfigError) else Exit.RETRYABLE
        self._goodput.close(self.code)

    def claimed(self, workdir: Path, lock: WorkdirLock) -> None:
        """The workdir is this run's, by `lock`: from now on process 0 writes there where the time goes."""
        self._lock = lock
        if jax.process_index() == 0:
            self._goodput.open(workdir)

    def event(self, name: str, **facts: Any) -> None:
        """Something for the accounts, such as a roll-back."""
        self._goodput.event(name, **facts)

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._watchdog.enter(phase)
        self._goodput.enter(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside is of phase `name`; after it the one before goes on."""
        before = self._phase
        self.enter(name)
        yield
        self.enter(before)

    def step_done(self, step: int) -> None:
        """In phase "step": `step` is done, or on its way on the devices. Raises InUse, see `WorkdirLock.check`."""
        assert self._phase == STEP, self._phase
        self._watchdog.enter(STEP, f"step {step + 1}")
        self._goodput.step(step)
        self._progress.step(step)
        if self._lock is not None:
            self._lock.check()
