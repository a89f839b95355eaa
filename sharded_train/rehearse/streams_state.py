"""How far the streams of a device are, and what they have done: the records of `rehearse.streams`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sharded_train.rehearse.costs import LANES

COMPUTE = "compute"
Key = tuple[str, str]  # axes joined by "+", link
Totals = defaultdict[tuple[str, ...], float]


@dataclasses.dataclass(frozen=True)
class Event:
    """What a stream does from `start` on, for `seconds`.

    `what` is a kernel's kind, a collective's axes, "wait" or "more" (iterations that are multiplied, not run; `shares`
    are seconds of what they do). `place` says where in the model; of a wait, for which axes and link.
    """

    lane: str
    name: str
    what: str
    start: float
    seconds: float
    place: str = ""
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A loop, once: most turns take `steady` seconds, and one of those begins at `steady_start`.

    `turn` is what one is where that is known ("tick"), else empty.
    """

    name: str
    scope: str
    trips: int
    level: int
    start: float
    end: float
    steady: float
    steady_start: float
    turn: str = ""


@dataclasses.dataclass
class State:
    """How far each stream is, what was added up until now, and what can be drawn."""

    now: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    totals: Totals = dataclasses.field(default_factory=lambda: defaultdict(float))
    sent: dict[str, list[tuple[float, float, Key]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    events: list[Event] = dataclasses.field(default_factory=list)
    loops: list[LoopRun] = dataclasses.field(default_factory=list)

    def copy(self) -> State:
        sent = defaultdict(list, {lane: list(each) for lane, each in self.sent.items()})
        return State(self.now, dict(self.free), self.totals.copy(), sent, list(self.events), list(self.loops))


@dataclasses.dataclass(frozen=True)
class Result:
    """A step on paper. `totals` are seconds by (what, ...), see `Streams`; `notes` what was left out."""

    seconds: float
    totals: Mapping[tuple[str, ...], float]
    events: Sequence[Event]
    loops: Sequence[LoopRun]
    notes: tuple[str, ...]


def repeat(state: State, times: int, began: float, totals: Totals, name: str) -> None:
    """Add `times` iterations like the one that began at `began`, with these totals before it."""
    seconds = times * (state.now - began)
    added = {key: total - totals[key] for key, total in state.totals.items()}
    label = f"{times:,} more iterations of {name}"
    shares = {key[1]: times * total for key, total in added.items() if key[0] == "kind" and total > 0}
    for key, total in added.items():
        if key[0] == "exposed" and total > 0:
            shares[f"wait {key[1]}"] = shares.get(f"wait {key[1]}", 0.0) + times * total
    if seconds > 0:
        state.events.append(Event(COMPUTE, label, "more", state.now, seconds, shares=shares))
    for lane in LANES:
        if added.get(("busy", lane)):
            start = max(state.now, state.free[lane])
            carried = {key[1]: times * total for key, total in added.items() if key[0] == "on" and key[2] == lane}
            state.events.append(Event(lane, label, "more", start, seconds, shares=carried))
            state.sent[lane] = [(a + seconds, b + seconds, key) for a, b, key in state.sent[lane]]
            state.free[lane] += seconds
    for key, total in added.items():
        state.totals[key] += times * total
    state.now += seconds


def mean_of(states: Sequence[State], shares: Sequence[float], began: float) -> State:
    """Where the mean of several branches is, each taken so often; the longest is drawn, as long as the mean takes."""
    mean = lambda values: sum(share * value for share, value in zip(shares, values, strict=True))
    longest, now = max(states, key=lambda state: state.now), mean([state.now for state in states])
    scale = (now - began) / (longest.now - began) if longest.now > began else 1.0
    at = lambda time: began + (time - began) * scale if time > began else time
    events = [
        event
        if event.start < began
        else dataclasses.replace(event, start=at(event.start), seconds=event.seconds * scale)
        for event in longest.events
    ]
    sent = {lane: [(at(a), at(b), key) for a, b, key in each] for lane, each in longest.sent.items()}
    totals: Totals = defaultdict(float)
    for key in set().union(*(state.totals for state in states)):
        totals[key] = mean([state.totals.get(key, 0.0) for state in states])
    free = {lane: mean([state.free[lane] for state in states]) for lane in longest.free}
    return State(now, free, totals, defaultdict(list, sent), events, longest.loops)


def wait(state: State, until: float, lane: str, key: Key) -> None:
    """Compute nothing until then; the time is exposed communication of what the link carries meanwhile."""
    if until <= state.now:
        return
    left = until - state.now
    for start, end, its_key in state.sent[lane]:
        overlap = min(end, until) - max(start, state.now)
        if overlap > 0:
            state.totals[("exposed", *its_key)] += overlap
            left -= overlap
    state.totals[("exposed", *key)] += max(left, 0.0)
    state.events.append(Event(COMPUTE, "wait", "wait", state.now, until - state.now, f"{key[0]} over {key[1]}"))
    state.now = until
