"""SIGINT and SIGTERM: the step under way is finished and saved; a second signal acts at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Listens to SIGTERM while it is entered. With several processes, all of them stop after the same step."""

    def __init__(self) -> None:
        self._received = self._agreed = False
        self._turns = 0
        self._distributed = jax.distributed.is_initialized()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if not self._distributed:  # else SIGTERM is JAX's: its service spreads the word and finds a common step
            self._listen(signal.SIGTERM)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Listens to SIGINT too: while nothing is done yet that could be lost, Ctrl-C ends a run at once."""
        self._listen(signal.SIGINT)
        yield
        self._restore(signal.SIGINT)

    @property
    def early(self) -> bool:
        """Whether to stop before the first step, where no other process has to agree: there is nothing to save."""
        return self._received and not self._distributed

    def agreed(self) -> bool:
        """Whether to stop after this step; to be asked once a step, by all processes.

        JAX waits for the number after the last that any process has asked with: turns are counted from 1 in every life,
        as a resume begins with a step beyond that number, and a roll-back goes back before it.
        """
        self._turns += 1
        if not self._distributed:
            return self._received
        if not self._agreed and multihost_utils.reached_preemption_sync_point(self._turns):
            self._agreed = True
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self._agreed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        self._restore()
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self, number: int) -> None:
        # Only in the main thread can Python listen to signals.
        if threading.current_thread() is threading.main_thread() and not self._received:
            self._before[number] = signal.signal(number, self._on_signal)

    def _restore(self, *numbers: int) -> None:
        for number in numbers or tuple(self._before):
            if number in self._before:
                signal.signal(number, self._before.pop(number))
