"""Who is late is named by process, host and what it is late with."""

from __future__ import annotations

import json

import pytest

from sharded_train.faults import late
from sharded_train.faults.group import Group
from sharded_train.faults.late import Lateness


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(
    busy: list[float], probes: list[float], monkeypatch: pytest.MonkeyPatch, step_seconds: float = 1.0
) -> list[str]:
    """What process 0 tells after ten steps, in each of which process i is busy for busy[i] seconds."""
    monkeypatch.setattr(late, "probe", lambda: probes[0])
    clock = Clock()

    def gather(text: str) -> list[str]:
        mine = json.loads(text)
        others = zip(range(1, len(busy)), busy[1:], probes[1:], strict=True)
        return [text, *(json.dumps([f"host{i}", b, p, mine[3]]) for i, b, p in others)]

    lateness = Lateness(clock)
    lateness.restart(20)
    for _ in range(10):
        clock.now += busy[0]
        with lateness.waiting():
            clock.now += step_seconds - busy[0]
    found = lateness.told(Group(0, len(busy), gather), 30)
    with lateness.waiting():
        clock.now += 5
    assert lateness._waited == 5  # counted anew
    return found


def test_alike_nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told([0.1, 0.12, 0.09], [0.01, 0.011, 0.012], monkeypatch) == []


def test_a_busy_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told([0.01, 0.4, 0.02], [0.01] * 3, monkeypatch) == [
        "process 1 on host1 is late: its host is busy 0.4 s a step, others 0.015"
    ]


def test_of_two_the_other_is_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = told([0.6, 0.1], [0.01, 0.01], monkeypatch)
    assert line.startswith("process 0 on ")
    assert "0.6 s a step, others 0.1" in line


def test_slow_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told([0.1] * 4, [0.02, 0.02, 0.02, 0.05], monkeypatch) == [
        "process 3 on host3 is late: its devices take 0.05 s for a piece of work that takes others 0.02"
    ]


def test_what_is_small_beside_the_step_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told([0.01, 0.04], [0.01, 0.013], monkeypatch) == []


def test_the_probe_measures_something() -> None:
    assert 0 < late.probe() < 10
