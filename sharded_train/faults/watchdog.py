"""A thread that ends the process when a phase of the run takes longer than it may.

A hang in a collective or in a file system raises nothing: the training thread cannot notice its own. The stacks of all
threads say where it hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from sharded_train.exits import Exit

_STDERR = 2  # as pytest and others replace sys.stderr by something without a file
_SLEPT = 5.0  # seconds; later than this the thread itself was stopped (Ctrl-Z), and so was the run


class Watchdog:
    """Deadlines in seconds by phase; 0, like a phase that is not named, has none. Nothing is watched before `enter`.

    Where a thread holds Python's lock for ever this one cannot run: then, after twice the deadline, a timer of the
    kernel ends the process by SIGALRM, the stacks being printed from C.
    """

    def __init__(self, deadlines: Mapping[str, float], leave: Callable[[int], object] = os._exit):
        self._deadlines, self._leave = dict(deadlines), leave
        self._phase: tuple[str, str, float] | None = None  # name, what exactly, since when
        self._stop = threading.Event()
        self._tick = min([1.0, *(seconds / 10 for seconds in self._deadlines.values() if seconds > 0)])
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._timer = threading.current_thread() is threading.main_thread()  # only there may signals be set up

    def __enter__(self) -> Watchdog:
        if self._timer:
            faulthandler.register(signal.SIGALRM, file=_STDERR, all_threads=True, chain=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._timer:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)

    def enter(self, phase: str, what: str = "") -> None:
        """From now on the deadline of `phase` counts; `what` is for the message, such as "step 7"."""
        self._phase = phase, what or phase, time.monotonic()

    def _watch(self) -> None:
        last = armed = time.monotonic()
        while not self._stop.wait(self._tick):
            now = time.monotonic()
            slept = max(0.0, now - last - self._tick)
            last = now
            if self._phase is None:
                continue
            phase, what, since = self._phase
            if slept > _SLEPT:
                self._phase = phase, what, since + slept
                continue
            deadline = self._deadlines.get(phase, 0)
            if self._timer and now > armed + 1:
                armed = now
                signal.setitimer(signal.ITIMER_REAL, since + 2 * deadline - now + 1 if deadline else 0)
            if deadline and now - since > deadline:
                self._bark(phase, what, now - since, deadline)
                return

    def _bark(self, phase: str, what: str, seconds: float, deadline: float) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        text = f"watchdog: {what} has taken {seconds:.0f} s, more than watchdog.{phase} = {deadline:g}; all stacks:\n"
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._leave(Exit.WATCHDOG)
