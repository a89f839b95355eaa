"""What became of a run's wall time, over all its restarts: read from a small file that is only ever appended to.

Process 0 writes a line of JSON when a phase ends, and for steps at least every half minute. What was going on when a
life was cut off has no line: that time is lost, as are the steps that come again after a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sharded_train.exits import Exit

FILE = "goodput.jsonl"
STEP = "step"
_EVERY = 30.0  # seconds
KINDS = {
    "productive": "steps that count",
    "redone": "steps done again after a restart or a roll-back",
    "startup": "imports, devices, data, first state",
    "compile": "compiling the step, FP8's first scales",
    "save": "waiting for checkpoints",
    "restore": "reading checkpoints",
    "evaluate": "validation, and the sample at the end",
    "lost": "lost to faults",  # from the last record before one to the next start
    "idle": "not running",  # from an orderly stop to the next start
}


class GoodputLog:
    """Writes the phases of one life of a run. Nothing is written before `open`: until then the run may be refused."""

    def __init__(self, began: float):
        """`began` is when the process did, seconds since 1970."""
        self._lines: list[str] = []
        self._file: int | None = None
        self._phase, self._since = "startup", time.monotonic() - (time.time() - began)
        self._steps: tuple[int, int] | None = None  # first and last since the last line
        self._note({"event": "begin", "at": began})

    def open(self, workdir: Path) -> None:
        path = workdir / FILE
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if (size := os.fstat(self._file).st_size) and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # the line that a killed process was writing
        self._write()

    def enter(self, phase: str) -> None:
        """The phase under way ends, and `phase` begins."""
        self._end_phase()
        self._phase = phase

    def step(self, step: int) -> None:
        """`step` is done; in phase "step"."""
        first = step if self._steps is None else self._steps[0]
        self._steps = first, step
        if time.monotonic() - self._since > _EVERY:
            self._end_phase()

    def event(self, name: str, **facts: Any) -> None:
        """Something worth a line, such as a roll-back."""
        self._note({"event": name, "at": time.time(), **facts})
        self._write()

    def close(self, code: int) -> None:
        self._end_phase()
        if self._file is not None:
            self.event("end", code=int(code))
            os.close(self._file)
            self._file = None

    def _end_phase(self) -> None:
        now = time.monotonic()
        line = {"phase": self._phase, "at": time.time(), "seconds": round(now - self._since, 3)}
        if self._steps is not None:
            line |= {"first": self._steps[0], "last": self._steps[1]}
        if self._phase != STEP or self._steps is not None:  # seconds without a whole step go to the next line
            self._since, self._steps = now, None
            self._note(line)
            self._write()

    def _note(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line) + "\n")

    def _write(self) -> None:
        if self._file is not None and self._lines:
            with contextlib.suppress(OSError):  # a full disk: the accounts are not worth a run
                os.write(self._file, "".join(self._lines).encode())
            self._lines.clear()


@dataclasses.dataclass
class Goodput:
    """Seconds by kind (see KINDS), which add up to the wall time, and counts."""

    seconds: dict[str, float]
    lives: int
    faults: int  # lives that were cut off, or ended with a code that is neither done nor preempted
    last_step: int
    running: bool  # the last life has no end yet; its time is counted up to its last line

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of productive steps in the time that the run was meant to run."""
        meant = self.wall - self.seconds["idle"]
        return self.seconds["productive"] / meant if meant > 0 else 0.0


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `GoodputLog` wrote; one that was cut off is left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("at"), int | float):
                lines.append(line)
    return lines


def account(lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """Adds up. A step that an earlier line has had already is done again."""
    seconds = dict.fromkeys(KINDS, 0.0)
    lives = faults = furthest = 0
    running = False
    for life in _lives(lines):
        lives += 1
        running = life.is_last and life.code is None
        faults += life.is_fault and not running
        for line in life.phases:
            kind = line["phase"] if line["phase"] in KINDS else "startup"
            if line["phase"] != STEP:
                seconds[kind] += line["seconds"]
                continue
            first, last = line["first"], line["last"]
            again = max(0, min(last, furthest) - first + 1) / (last - first + 1)
            seconds["redone"] += line["seconds"] * again
            seconds["productive"] += line["seconds"] * (1 - again)
            furthest = max(furthest, last)
        # Inside a life, time without a line is what led to its end.
        seconds["lost"] += max(0.0, life.end - life.begin - sum(line["seconds"] for line in life.phases))
        seconds["lost" if life.is_fault else "idle"] += life.gap
    return Goodput(seconds, lives, faults, furthest, running)


@dataclasses.dataclass
class _Life:
    begin: float
    end: float  # its last line
    phases: list[Mapping[str, Any]]
    code: int | None = None  # None: cut off
    gap: float = 0.0  # until the next begins
    is_last: bool = False

    @property
    def is_fault(self) -> bool:
        return self.code not in (Exit.DONE, Exit.PREEMPTED)


def _lives(lines: Iterable[Mapping[str, Any]]) -> Iterator[_Life]:
    life: _Life | None = None
    for line in lines:
        if line.get("event") == "begin":
            if life is not None:
                life.gap = max(0.0, line["at"] - life.end)
                yield life
            life = _Life(line["at"], line["at"], [])
        elif life is not None:
            life.end = max(life.end, line["at"])
            if "phase" in line:
                life.phases.append(line)
            elif line.get("event") == "end":
                life.code = line["code"]
    if life is not None:
        life.is_last = True
        yield life
