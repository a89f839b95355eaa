"""SIGINT and SIGTERM: the step under way is finished and saved; a second signal acts at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Listens while it is entered. With several processes, all of them stop after the same step."""

    def __init__(self) -> None:
        self._received = False
        self._distributed = jax.distributed.is_initialized()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only there can Python listen to signals
            # With several processes SIGTERM is JAX's: its service spreads the word and finds a common step.
            for number in (signal.SIGINT,) if self._distributed else (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`; to be asked after every step, by all processes."""
        if self._distributed:
            self._received = multihost_utils.reached_preemption_sync_point(step)
            if self._received and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self._received

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        self._restore()
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
