"""Runs the schedule of a compiled program on paper: one stream that computes, and one for each kind of link.

Kernels run one after another in schedule order. A collective goes onto the stream of its link (of both, when its groups
mix them) when its start is reached and that stream is free: collectives over one link share its bandwidth, so that one
after another is as good as together, while NVLink and the network do not disturb each other. Where its done is reached
too early, computing waits; that is *exposed* communication. One that is not asynchronous is waited for at once.

Of a loop the first iterations are run, until two take the same time, and that is multiplied: the work here does not
grow with trip counts. Of a conditional the slowest branch is taken. What is nowhere waited for within its computation
is not waited for at all. But for conditionals, this only leaves time out: given the costs, the result is a lower bound.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from sharded_train.devices import MICROSECOND, Device
from sharded_train.rehearse.costs import LANES, Cost, cost_of, seconds_on_links
from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.hlo_walk import trip_count
from sharded_train.rehearse.scopes import words_of
from sharded_train.rehearse.wires import Collective

COMPUTE = "compute"
_SLOWEST = (
    "Conditionals whose branches differ: the slowest is taken every time, as though all devices waited for one that "
    "takes it. Where that is not so a step may be shorter than this bound."
)
ITERATIONS = 6  # of a loop at most, before the last is taken for the steady state
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
    """A loop, once: iterations take `first` seconds, later `steady`; one of the latter begins at `steady_start`."""

    name: str
    scope: str
    trips: int
    level: int
    start: float
    end: float
    first: float
    steady: float
    steady_start: float


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


class Streams:
    """Runs one module on one kind of device.

    Totals: ("kind", kind), ("kernel", computation, name), ("busy", lane), ("on", axes, lane), ("sent", axes, link),
    ("exposed", axes, link).
    """

    def __init__(self, module: Module, device: Device, collectives: Sequence[Collective]) -> None:
        self.module, self.device = module, device
        self.collectives = {(each.computation, each.name): each for each in collectives}
        self.costs: dict[tuple[str, str], Cost] = {}
        self._steps: dict[str, list[Instruction]] = {}
        self._notes: dict[str, None] = {}

    def run(self) -> Result:
        """The whole step."""
        state = self._computation(State(), self.module.computations[self.module.entry], level=0)
        for lane, free in state.free.items():
            if free > state.now + 1e-12:
                self._notes[f"The step ends before what {lane} still carries, for which nothing waits."] = None
        return Result(state.now, state.totals, state.events, state.loops, tuple(self._notes))

    # ---- one computation, instruction by instruction ------------------------------------------------------------

    def _computation(self, state: State, computation: Computation, level: int) -> State:
        pending: dict[str, tuple[float, str, Key]] = {}
        for instruction in self._steps_of(computation):
            opcode = instruction.opcode
            if collective := self.collectives.get((computation.name, instruction.name)):
                arrival = self._send(state, collective)
                if not collective.asynchronous:
                    _wait(state, *arrival)
                elif collective.done != instruction.name:
                    pending[collective.done] = arrival
                else:
                    self._notes[f"{instruction.name}: what waits for it stands elsewhere, and is not waited for."] = (
                        None
                    )
            elif instruction.name in pending:
                _wait(state, *pending.pop(instruction.name))
            elif opcode == "while":
                state = self._loop(state, computation, instruction, level)
            elif opcode == "conditional":
                branches = [self._computation(state.copy(), each, level) for each in self.module.called(instruction)]
                ends = [branch.now for branch in branches]
                if max(ends) - min(ends) > MICROSECOND:
                    self._notes[_SLOWEST] = None
                state = branches[ends.index(max(ends))]
            elif opcode in ("call", "async-start", "call-start"):
                for called in self.module.called(instruction)[:1]:
                    state = self._computation(state, called, level)
            elif (computation.name, instruction.name) in self.costs:
                self._kernel(state, computation, instruction)
        return state

    def _steps_of(self, computation: Computation) -> list[Instruction]:
        """The instructions of a computation that may take time."""
        if computation.name not in self._steps:
            self._steps[computation.name] = list(self._that_take_time(computation))
        return self._steps[computation.name]

    def _that_take_time(self, computation: Computation) -> Iterator[Instruction]:
        control = ("while", "conditional", "call", "async-start", "call-start")
        dones = {each.done for each in self.collectives.values() if each.computation == computation.name}
        for instruction in computation:
            key = computation.name, instruction.name
            if key in self.collectives or instruction.opcode in control or instruction.name in dones:
                yield instruction
                continue
            cost = cost_of(self.module, computation, instruction, self.device)
            if cost.seconds > 0:
                self.costs[key] = cost
                yield instruction

    def _kernel(self, state: State, computation: Computation, instruction: Instruction) -> None:
        cost = self.costs[computation.name, instruction.name]
        place = words_of(instruction.scope)
        state.events.append(Event(COMPUTE, instruction.name, cost.kind, state.now, cost.seconds, place))
        state.now += cost.seconds
        state.totals["kind", cost.kind] += cost.seconds
        state.totals["kernel", computation.name, instruction.name] += cost.seconds

    def _send(self, state: State, collective: Collective) -> tuple[float, str, Key]:
        """Put a collective onto its streams; when it arrives, on which of them last, and what it is."""
        key = "+".join(collective.axes), collective.link
        arrival = state.now, "", key
        for lane, seconds in seconds_on_links(collective, self.device).items():
            start = max(state.now, state.free[lane])
            end = state.free[lane] = start + seconds
            state.sent[lane] = [each for each in state.sent[lane] if each[1] > state.now]
            state.sent[lane].append((start, end, key))
            state.events.append(Event(lane, collective.name, key[0], start, seconds, collective.place))
            state.totals["busy", lane] += seconds
            state.totals["on", key[0], lane] += seconds
            arrival = max(arrival, (end, lane, key))
        state.totals[("sent", *key)] += max(seconds_on_links(collective, self.device).values(), default=0.0)
        return arrival

    # ---- loops --------------------------------------------------------------------------------------------------

    def _loop(self, state: State, computation: Computation, loop: Instruction, level: int) -> State:
        condition, body = (self.module.computations[loop.attributes[key].lstrip("%")] for key in ("condition", "body"))
        trips = trip_count(self.module, computation, loop)
        if trips is None:
            self._notes[f"{loop.name}: the program does not tell how often this loop runs; once is taken."] = None
            trips = 1
        began, before, lengths = state.now, (state.now, state.totals), list[float]()
        while len(lengths) < trips:
            before = state.now, state.totals.copy()
            state = self._computation(state, condition, level + 1)
            state = self._computation(state, body, level + 1)
            lengths.append(state.now - before[0])
            rest = trips - len(lengths)
            same = len(lengths) > 1 and abs(lengths[-1] - lengths[-2]) <= 1e-9 * lengths[-1]
            if rest and (same or len(lengths) == ITERATIONS):
                _repeat(state, rest, *before, name=loop.name)
                break
        if trips:
            steady_start = before[0]
            state.loops.append(
                LoopRun(loop.name, loop.scope, trips, level, began, state.now, lengths[0], lengths[-1], steady_start)
            )
        return self._computation(state, condition, level + 1)


def _repeat(state: State, times: int, began: float, totals: Totals, name: str) -> None:
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


def _wait(state: State, until: float, lane: str, key: Key) -> None:
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
