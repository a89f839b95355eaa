"""Where every array of a compiled program lies in a device's memory, and when, from what XLA's compiler leaves on disk.

XLA gives all temporaries one allocation and each value a place in it, again and again for values that are not alive at
the same time. Told to (`xla_dump_to`), it writes both down: places in `*-buffer-assignment.txt`, lives, counted in
instructions of the flattened schedule, in `*-live-range.txt`. The fullest moment is the one at which the places of the
values alive cover most of the allocation; what they do not cover even then are gaps.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)$")
_STEP = re.compile(r"^ +\d+:(\S+)$")
_LIFE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True)
class Value:
    """The result of an instruction, or a part of it: element `index` of its (nested) tuple.

    `size` bytes from `offset` of the allocation of temporaries, from instruction `first` to `last` of the schedule.
    `within` names what starts the instruction, where that may be something asynchronous whose inside is not printed.
    """

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str  # as HLO writes it, layout included
    first: int
    last: int
    within: str = ""


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """The allocation of temporaries: its size, and what it holds at its fullest moment, each place once."""

    size: int
    fullest: tuple[Value, ...]

    @property
    def gaps(self) -> int:
        """Bytes that hold nothing even at the fullest moment."""
        return self.size - sum(value.size for value in self.fullest)


def options(folder: Path) -> dict[str, str | bool]:
    """Compiler options that make XLA write into a folder what `read` reads."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def read(folder: Path) -> Temporaries | None:
    """The temporaries of the largest program that was compiled into the folder; None if there is none to read."""
    found = sorted(folder.glob("*buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    lives = found[-1].with_name(found[-1].name.replace("buffer-assignment", "live-range"))
    if not lives.is_file():
        return None
    return parse(found[-1].read_text(), lives.read_text())


def parse(assignment: str, lives: str) -> Temporaries:
    """From the texts of both files. Raises ValueError if a value has no life, which would make it vanish."""
    size, values = _values(assignment.splitlines(), _lives(lives.splitlines()))
    starts = _starts(lives.splitlines())
    values = [dataclasses.replace(value, within=starts.get(value.name, "")) for value in values]
    return Temporaries(size, _fullest(values))


def _lives(lines: Iterable[str]) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    return {
        (match[1], _index(match[2])): (int(match[3]), int(match[4])) for line in lines if (match := _LIFE.match(line))
    }


def _starts(lines: Iterable[str]) -> dict[str, str]:
    """What is done asynchronously stands in the flattened schedule right before what starts it."""
    names = [match[1] for line in lines if (match := _STEP.match(line))]
    return {name: after for name, after in itertools.pairwise(names) if "-start" in after}


def _values(lines: Iterable[str], lives: dict[tuple[str, tuple[int, ...]], tuple[int, int]]) -> tuple[int, list[Value]]:
    """Size and values of the allocation of temporaries, which a trivial program has none of."""
    size, inside, values = 0, False, []
    for line in lines:
        if match := _ALLOCATION.match(line):
            inside = "preallocated-temp" in line
            size = int(match[1]) if inside else size
        elif inside and line.startswith(" value:"):
            match = _VALUE.match(line)
            if match is None:
                raise ValueError(f"buffer assignment: cannot read {line!r}")
            key = (match[1], _index(match[2]))
            if key not in lives:
                raise ValueError(f"buffer assignment: {match[1]}{{{match[2] or ''}}} has no live range")
            values.append(Value(*key, int(match[3]), int(match[4]), match[5], *lives[key]))
    return size, values


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def _fullest(values: Sequence[Value]) -> tuple[Value, ...]:
    """The values at the fullest moment, from the largest; of those that share a place the last to be made.

    A moment is fuller only where something begins, so only those are looked at, from the greatest sum of sizes on,
    which is at least what they cover, until no other can be fuller.
    """
    starts = sorted({value.first for value in values})
    alive = {t: [v for v in values if v.first <= t <= v.last] for t in starts}
    best: tuple[Value, ...] = ()
    covered = -1
    for t in sorted(starts, key=lambda t: -sum(v.size for v in alive[t])):
        if sum(v.size for v in alive[t]) <= covered:
            break
        distinct = _distinct(alive[t])
        if (total := sum(v.size for v in distinct)) > covered:
            best, covered = tuple(distinct), total
    return tuple(sorted(best, key=lambda v: -v.size))


def _distinct(values: Iterable[Value]) -> list[Value]:
    """Values that cover the bytes of all, none of them twice: of those that overlap, the larger, then later."""
    kept: list[Value] = []
    end_of: list[tuple[int, int]] = []
    for value in sorted(values, key=lambda v: (-v.size, -v.first)):
        begin, end = value.offset, value.offset + value.size
        if all(end <= b or e <= begin for b, e in end_of):
            kept.append(value)
            end_of.append((begin, end))
    return kept
