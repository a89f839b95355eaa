"""When a run saves and what it does when saves fail, with a clock and a disk that do as they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharded_train.checkpoint import CheckpointConfig, CheckpointError, NotSaved, SavePolicy
from sharded_train.checkpoint.policy import _LEAD

STATE = object()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Service:
    """What processes leave for each other."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


class Peers:
    def __init__(self, service: Service, index: int = 0, count: int = 1):
        self.service, self.index, self.count = service, index, count

    def post(self, name: str, value: Any) -> None:
        self.service.values[name] = value

    def posted(self, name: str) -> Any:
        return self.service.values.get(name)


class Disk:
    """As a Checkpointer: each save ends, well or not, when it is next asked."""

    def __init__(self, peers: Peers, fallback: bool = False):
        self.peers, self.remarks = peers, ["found at start"]
        self.saves_to, self._fallback = Path("/first"), fallback
        self.broken: set[str] = set()
        self.saved: list[tuple[int, str]] = []
        self._pending: int | None = None

    @property
    def is_saving(self) -> bool:
        return self._pending is not None

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        assert state is STATE
        self._pending = step

    def check(self) -> None:
        self.wait()

    def wait(self) -> None:
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        if str(self.saves_to) in self.broken:
            raise CheckpointError(f"step {step} was not written to {self.saves_to}")
        self.saved.append((step, str(self.saves_to)))

    def use_fallback(self) -> bool:
        usable = self._fallback and str(self.saves_to) == "/first"
        self.saves_to = Path("/second") if usable else self.saves_to
        return usable


class Run:
    """The loop's part of one process."""

    def __init__(self, fallback: bool = False, peers: Peers | None = None, **settings: Any):
        self.clock, self.told = Clock(), list[str]()
        self.disk = Disk(peers or Peers(Service()), fallback)
        disk: Any = self.disk
        self.policy = SavePolicy(disk, CheckpointConfig(**settings), self.told.append, self.clock)

    def turn(self, step: int, seconds: float = 1.0) -> bool:
        due = self.policy.due(step)
        if due:
            self.policy.save(step, STATE, {})
        self.clock.now += seconds
        return due

    def steps(self, *steps: int) -> list[int]:
        return [step for step in steps if self.turn(step)]


def test_every_so_many_steps() -> None:
    run = Run(every=3)
    assert run.steps(*range(1, 11)) == [3, 6, 9]
    assert run.told == ["found at start"]
    assert run.steps(10, 11) == []
    assert Run().steps(1, 2, 3) == []


def test_every_so_many_minutes_since_the_last_one() -> None:
    run = Run(every=50, every_minutes=0.2)
    assert run.steps(*range(1, 45)) == [13, 25, 37]
    assert run.steps(*range(45, 64)) == [49, 50, 62]


def test_a_failure_is_told_at_the_next_step_and_tried_again_with_growing_pauses() -> None:
    run = Run(every=10, retry_seconds=4, max_failures=9)
    run.disk.broken.add("/first")
    assert run.steps(*range(10, 20)) == [10, 11, 16]  # at once, after 4 seconds, and then after 8
    assert [text.splitlines()[1].strip() for text in run.told[1:]] == [
        "(failure 1 of at most 9 in a row; tried again at the next step. Checkpoints before it are as they were.)",
        "(failure 2 of at most 9 in a row; tried again in 4 s. Checkpoints before it are as they were.)",
        "(failure 3 of at most 9 in a row; tried again in 8 s. Checkpoints before it are as they were.)",
    ]
    run.disk.broken.clear()
    run.clock.now += 10
    assert run.steps(20, 21, 22) == [20]
    assert run.told[-1] == "the checkpoint of step 20 is written, after 3 that failed"
    assert run.disk.saved == [(20, "/first")]


def test_a_failure_that_is_waited_for_before_a_roll_back_counts() -> None:
    run = Run(every=10, retry_seconds=4)
    run.disk.broken.add("/first")
    run.steps(10)
    run.policy.settle()
    assert run.told[1].startswith("step 10 was not written to /first\n  (failure 1 of at most 5 in a row")
    run.disk.broken.clear()
    assert run.steps(4, 5) == [4]  # the run has gone back, and tries again
    assert run.told[2:] == ["the checkpoint of step 4 is written, after 1 that failed"]


def test_after_so_many_failures_the_fallback_is_used_and_then_the_run_ends() -> None:
    run = Run(fallback=True, every=1, max_failures=2, retry_seconds=0.1)
    run.disk.broken.add("/first")
    run.steps(1, 2, 3, 4)
    assert run.disk.saved == [(3, "/second")]
    assert any("from now on checkpoints go to /second" in text for text in run.told)
    run.disk.broken.add("/second")
    with pytest.raises(NotSaved, match=r"not written to /second\n2 saves in a row have failed in /second"):
        run.steps(5, 6, 7, 8)


def test_the_end_waits_until_the_last_step_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(max_failures=4, retry_seconds=2)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        run.clock.now += seconds
        if len(slept) == 3:
            run.disk.broken.clear()

    monkeypatch.setattr("time.sleep", sleep)
    run.disk.broken.add("/first")
    run.policy.save(8, STATE, {})
    run.policy.finish(8, lambda: STATE)
    assert slept == [0, 2, 4]
    assert run.disk.saved == [(8, "/first")]
    run.policy.finish(8, lambda: STATE)  # nothing is saved twice
    run.disk.broken.add("/first")
    run.policy.save(9, STATE, {})
    with pytest.raises(NotSaved, match="4 saves in a row"):
        run.policy.finish(9, lambda: STATE)


def test_process_0_decides_for_all_and_all_hear_in_time() -> None:
    """The others' clocks are never asked; in the loop they are at most two turns ahead, or any number behind."""
    service = Service()
    first, second = (Run(peers=Peers(service, i, 2), every_minutes=0.2) for i in range(2))
    second.clock.now = 1e9
    saved: list[list[int]] = [[], []]
    for step in range(1, 40):
        if first.turn(step):
            saved[0].append(step)
        if second.turn(step):
            saved[1].append(step)
    assert saved[0] == saved[1] == [13 + _LEAD, 27 + _LEAD]
    first.disk.broken.add("/first")
    second.disk.broken.add("/first")
    ended = []
    for step in range(40, 400):
        for run in (first, second):
            try:
                run.turn(step)
            except NotSaved:
                ended.append(step)
        if len(ended) == 2:
            break
    assert ended == [step, step]
