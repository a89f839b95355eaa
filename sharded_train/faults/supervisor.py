"""Keeps the processes of one host running: when one dies all are stopped, and started again from the last checkpoint.

A fault of one process leaves the others waiting in a collective, and JAX ends them by aborting in C++: no process can
mend that from inside. The supervisor imports neither JAX nor anything of the run, so that nothing which breaks a run
breaks it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from sharded_train.exits import Exit, in_words, is_final
from sharded_train.faults.child import Child
from sharded_train.faults.progress import PROGRESS, SUPERVISOR, read_step

_POLL = 0.1
_ENDED_WELL = (Exit.DONE, Exit.PREEMPTED)
_OF_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Policy:
    """When to start again, and when not. Times in seconds."""

    max_restarts: int = 100
    same_step: int = 3  # failures at one step, with no step beyond it in between, end it for good
    backoff: float = 1.0  # before the first restart; doubled at each failure at the same step
    max_backoff: float = 60.0
    grace: float = 120.0  # that the others may take when one process has ended well
    settle: float = 1.0  # that the others have, when one has failed, to say more about why


class Supervisor:
    """Runs processes until they are done.

    `command(attempt)` gives the command lines, one for each process, and `environ` what each has beyond this process's
    variables, if anything; the first has the number `first_process`.
    `logs` is the folder of process-0.log and so on and of supervisor.log; all of it is printed to `terminal` too.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[Sequence[str]]],
        logs: Path,
        policy: Policy,
        terminal: TextIO | None = None,
        first_process: int = 0,
        environ: Sequence[Mapping[str, str]] = (),
    ):
        self._command, self._logs, self._policy = command, logs, policy
        self._terminal = sys.stdout if terminal is None else terminal
        self._first, self._environ = first_process, environ
        self._signals = 0
        self._attempt = 0

    def run(self) -> int:
        """The exit code of it all. SIGTERM and SIGINT are passed on once; the second time all is killed."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._until_done()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _until_done(self) -> int:
        failures: Counter[int] = Counter()  # by the step, since the run came further than ever
        furthest = -1
        while True:
            code, step = self._once()
            if self._signals or is_final(code):
                self._say(f"ended: {in_words(code)}")
                return code
            if step > furthest:
                furthest = step
                failures.clear()
            failures[step] += 1
            where = f"after step {step}" if step >= 0 else "before the first step"
            if failures[step] >= self._policy.same_step:
                self._say(f"{in_words(code)}, {where}, for the {_nth(failures[step])} time: a restart does not cure it")
                return Exit.REPEATED
            if self._attempt > self._policy.max_restarts:
                self._say(f"{in_words(code)}, {where}: all of --max-restarts={self._policy.max_restarts} are used up")
                return Exit.REPEATED
            delay = min(self._policy.backoff * 2 ** (failures[step] - 1), self._policy.max_backoff)
            self._say(f"{in_words(code)}, {where}: restart {self._attempt} in {delay:g} s")
            if not self._wait(delay):
                self._say("stopped by a signal before the restart")
                return Exit.PREEMPTED

    def _once(self) -> tuple[int, int]:
        """One life of all processes: how it ended, and the last step that any of them had done."""
        self._attempt += 1
        with tempfile.TemporaryDirectory(prefix="sharded-train-") as folder:
            files = []
            children: list[Child] = []
            try:
                for number, argv in enumerate(self._command(self._attempt), self._first):
                    files.append(Path(folder) / str(number))
                    children.append(self._start(number, argv, files[-1]))
                codes = self._watch(children)
            finally:
                for child in children:
                    child.kill()
                for child in children:
                    child.join()
            return self._verdict(codes), max(map(read_step, files))

    def _start(self, number: int, argv: Sequence[str], progress: Path) -> Child:
        environ = {**os.environ, SUPERVISOR: str(os.getpid()), PROGRESS: str(progress), "PYTHONUNBUFFERED": "1"}
        environ |= self._environ[number - self._first] if self._environ else {}
        header = f"---- attempt {self._attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        prefix = f"[{number}] "
        if self._terminal.isatty():  # what the process prints is to fit it, though it writes into a pipe
            environ["COLUMNS"] = str(shutil.get_terminal_size().columns - len(prefix))
        return Child(argv, environ, self._logs / f"process-{number}.log", header, self._terminal, prefix)

    def _watch(self, children: list[Child]) -> list[int | None]:
        """Waits for the end of all: their codes, None of those that are still to be killed."""
        told_to_stop, deadline = False, float("inf")
        while True:
            codes = [child.poll() for child in children]
            if self._signals >= 2 or None not in codes or time.monotonic() > deadline:
                return codes
            if self._signals and not told_to_stop:
                told_to_stop = True
                self._say("a signal: the step under way is finished and saved; a second signal stops at once")
                for child in children:
                    child.terminate()
            ended = [code for code in codes if code is not None]
            if any(code not in _ENDED_WELL for code in ended):
                deadline = min(deadline, time.monotonic() + self._policy.settle)
            elif ended:
                deadline = min(deadline, time.monotonic() + self._policy.grace)
            time.sleep(_POLL)

    def _verdict(self, codes: list[int | None]) -> int:
        """One code for all: the one that says most about why."""
        for process, code in enumerate(codes, self._first):
            if code not in (*_ENDED_WELL, None):
                self._say(f"process {process}: {in_words(code)}")  # type: ignore[arg-type]
        own = [code for code in codes if code is not None]
        if self._signals >= 2:
            return Exit.INTERRUPTED
        bad = [code for code in own if code not in _ENDED_WELL]
        if self._signals and all(code in _OF_SIGTERM for code in bad):
            return Exit.DONE if codes == [Exit.DONE] * len(codes) else Exit.PREEMPTED
        if bad:
            return min(bad, key=_says_little)
        if len(own) < len(codes):
            self._say(f"some processes had ended well, others did not end within {self._policy.grace:g} s")
            return Exit.RETRYABLE
        return max(own)  # done, or preempted

    def _wait(self, seconds: float) -> bool:
        """False if a signal came meanwhile."""
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(min(_POLL, max(0.0, end - time.monotonic())))
        return not self._signals

    def _on_signal(self, number: int, frame: FrameType | None) -> Any:
        self._signals += 1

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {text}\n"
        with contextlib.suppress(OSError):  # a full disk or a closed terminal is no reason to end
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / "supervisor.log").open("a") as file:
                file.write(line)
        with contextlib.suppress(OSError, ValueError):
            self._terminal.write(line)
            self._terminal.flush()


def _says_little(code: int) -> int:
    """Our own final codes first, then our others, then the rest: a signal, or an abort because of a lost peer."""
    if code in set(Exit):
        return 0 if is_final(code) else 1
    return 3 if code in (-signal.SIGABRT, 128 + signal.SIGABRT) else 2


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
