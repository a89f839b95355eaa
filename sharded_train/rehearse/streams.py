"""Runs the schedule of a compiled program on paper: one stream that computes, and one for each kind of link.

Kernels run one after another in schedule order. A collective goes onto the stream of its link (of both, when its groups
mix them) when its start is reached and that stream is free: collectives over one link share its bandwidth, so that one
after another is as good as together, while NVLink and the network do not disturb each other. Where its done is reached
too early, computing waits; that is *exposed* communication. One that is not asynchronous is waited for at once.

Of a loop the first iterations are run, until two take the same time, and that is multiplied: the work here does not
grow with trip counts. Of a conditional the slowest branch is taken, but in a pipeline the one that its schedule says,
in each tick for the stage that the step waits for: a stage begins a tick when it and its neighbours have ended the last
one. What is nowhere waited for within its computation is not waited for at all. But for conditionals of which nothing
is known, this only leaves time out: given the costs, the result is a lower bound.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from sharded_train.devices import MICROSECOND, Device
from sharded_train.rehearse.costs import Cost, cost_of, seconds_on_links
from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.hlo_walk import branches_of, trip_count
from sharded_train.rehearse.pace import Conditional, Doing, Pace
from sharded_train.rehearse.scopes import words_of
from sharded_train.rehearse.streams_state import COMPUTE, Event, Key, LoopRun, Result, State, mean_of, repeat, wait
from sharded_train.rehearse.wires import Collective
from sharded_train.rehearse.wires_totals import axes_in_words

_SLOWEST = (
    "Conditionals whose branches differ: the slowest is taken every time, as though all devices waited for one that "
    "takes it. Where that is not so a step may be shorter than this bound."
)
ITERATIONS = 6  # of a loop at most, before the last is taken for the steady state
Turn = Callable[["State"], "State"]


class Streams:
    """Runs one module on one kind of device.

    Totals: ("kind", kind), ("kernel", computation, name), ("busy", lane), ("on", axes, lane), ("sent", axes, link),
    ("exposed", axes, link), ("loop", name) and with it ("turns", name), which are no seconds; of a pipeline ("idle",):
    what the mean stage is not at work.
    """

    def __init__(
        self, module: Module, device: Device, collectives: Sequence[Collective], pace: Pace | None = None
    ) -> None:
        self.module, self.device, self.pace = module, device, pace
        self.collectives = {(each.computation, each.name): each for each in collectives}
        self.costs: dict[tuple[str, str], Cost] = {}
        self._steps: dict[str, list[Instruction]] = {}
        self._branches: dict[str, list[Computation | None] | None] = {}
        self._notes: dict[str, None] = {}
        self._doing: Doing | None = None  # of the stage that is followed, in a tick of a pipeline
        self._layer_there = True

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
                    wait(state, *arrival)
                elif collective.done != instruction.name:
                    pending[collective.done] = arrival
                else:
                    self._notes[f"{instruction.name}: what waits for it stands elsewhere, and is not waited for."] = (
                        None
                    )
            elif instruction.name in pending:
                wait(state, *pending.pop(instruction.name))
            elif branches := self._branches_of(instruction):
                state = self._conditional(state, instruction, branches, level)
            elif opcode == "while":
                state = self._loop(state, computation, instruction, level)
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
        key = (axes_in_words(collective.axes) if collective.axes else ""), collective.link
        arrival, begins = (state.now, "", key), []
        for lane, seconds in seconds_on_links(collective, self.device).items():
            start = max(state.now, state.free[lane])
            end = state.free[lane] = start + seconds
            state.sent[lane] = [each for each in state.sent[lane] if each[1] > state.now]
            state.sent[lane].append((start, end, key))
            state.events.append(Event(lane, collective.name, key[0], start, seconds, collective.place))
            state.totals["busy", lane] += seconds
            state.totals["on", key[0], lane] += seconds
            arrival = max(arrival, (end, lane, key))
            begins.append(start)
        if begins:
            state.totals[("sent", *key)] += arrival[0] - min(begins)
        return arrival

    # ---- conditionals and loops -----------------------------------------------------------------------------------

    def _branches_of(self, instruction: Instruction) -> list[Computation | None] | None:
        if instruction.name not in self._branches:
            self._branches[instruction.name] = branches_of(self.module, instruction)
        return self._branches[instruction.name]

    def _conditional(
        self, state: State, conditional: Instruction, branches: Sequence[Computation | None], level: int
    ) -> State:
        """The branch that the stage takes that is followed; of those that layers take in turn, their mean; where it is
        not known, the slowest.
        """
        take = lambda state, branch: state if branch is None else self._computation(state, branch, level)
        known = self._known(conditional)
        if known is not None and self._doing is not None:
            busy = self._doing.takes(known.role, self._layer_there)
            # A conditional with two branches, or more of which all but one are idle.
            index = known.busy if busy else next(i for i in range(known.count) if i != known.busy)
            return take(state, branches[index])  # type: ignore[no-any-return]
        states = [take(state.copy(), branch) for branch in branches]
        shares = {} if self.pace is None else self.pace.windows
        if (conditional.name, 0) in shares:
            return mean_of(states, [float(shares[conditional.name, i]) for i in range(len(states))], state.now)
        ends = [each.now for each in states]
        if max(ends) - min(ends) > MICROSECOND:
            self._notes[_SLOWEST] = None
        return states[ends.index(max(ends))]

    def _known(self, instruction: Instruction) -> Conditional | None:
        return None if self.pace is None else self.pace.conditionals.get(instruction.name)

    def _loop(self, state: State, computation: Computation, loop: Instruction, level: int) -> State:
        condition, body = (self.module.computations[loop.attributes[key].lstrip("%")] for key in ("condition", "body"))
        trips = trip_count(self.module, computation, loop)
        if trips is None:
            self._notes[f"{loop.name}: the program does not tell how often this loop runs; once is taken."] = None
            trips = 1
        began, longest = state.now, None
        for count, turn in self._segments(state, body, trips, level):
            state, length, start = self._turns(state, condition, count, turn, loop.name, level)
            if count and (longest is None or count * length > longest[0] * longest[1]):
                longest = count, length, start
        if longest is not None:
            turns, steady, start = longest
            words = "tick" if self._is_tick(body, trips) else ""
            state.loops.append(LoopRun(loop.name, loop.scope, trips, level, began, state.now, steady, start, words))
            state.totals["turns", loop.name] += trips if words else turns
            state.totals["loop", loop.name] += state.now - began
        return self._computation(state, condition, level + 1)

    def _segments(self, state: State, body: Computation, trips: int, level: int) -> Iterator[tuple[int, Turn]]:
        """Turns of a loop that are alike: all, but for a pipeline's ticks and for layers that a chunk does not have."""
        plain: Turn = lambda state: self._computation(state, body, level + 1)
        if self._is_tick(body, trips):
            for (doing, stages), ticks in itertools.groupby(self._followed(state, body, level)):
                follow = functools.partial(self._tick, body=body, level=level, doing=doing, stages=stages)
                yield len(list(ticks)), follow
            return
        known = [self._known(each) for each in body]
        role = next((each.role for each in known if each is not None and each.role.startswith("layer")), None)
        if role is None or self._doing is None:
            yield trips, plain
            return
        there = min(trips, self._doing.layers(role) or 0)
        for count, is_there in ((there, True), (trips - there, False)):
            yield count, functools.partial(self._layer, body=body, level=level, there=is_there)

    def _is_tick(self, body: Computation, trips: int) -> bool:
        known = [self._known(each) for each in body]
        roles = {each.role for each in known if each is not None}
        return self.pace is not None and {"forward", "backward"} <= roles and trips == len(self.pace.ticks)

    def _layer(self, state: State, body: Computation, level: int, there: bool) -> State:
        self._layer_there = there
        state = self._computation(state, body, level + 1)
        self._layer_there = True
        return state

    def _followed(self, state: State, body: Computation, level: int) -> Iterator[tuple[Doing, Counter[Doing]]]:
        """For each tick what the stage does that the step waits for, and what all of them do."""
        assert self.pace is not None
        seconds = {}
        for doing in dict.fromkeys(itertools.chain.from_iterable(self.pace.ticks)):
            before = self._as(doing, state, body, level)  # so that what it left on the links counts
            seconds[doing] = self._as(doing, before, body, level).now - before.now
        return zip(self.pace.critical(seconds), map(Counter, self.pace.ticks), strict=True)

    def _as(self, doing: Doing, state: State, body: Computation, level: int) -> State:
        """A tick of a stage that does this."""
        self._doing = doing
        state = self._computation(state.copy(), body, level + 1)
        self._doing = None
        return state

    def _tick(self, state: State, body: Computation, level: int, doing: Doing, stages: Counter[Doing]) -> State:
        """A tick of the stage that is followed. What the mean stage has less to do than that one is idle time."""
        ends = {each: self._as(each, state, body, level) for each in stages}
        own = sum(num_stages * (ends[each].now - state.now) for each, num_stages in stages.items()) / stages.total()
        ends[doing].totals["idle",] += ends[doing].now - state.now - own
        return ends[doing]

    def _turns(
        self, state: State, condition: Computation, count: int, turn: Turn, name: str, level: int
    ) -> tuple[State, float, float]:
        """So many turns that are alike; how long the last of those took that were run, and when it began."""
        lengths: list[float] = []
        start = state.now
        while len(lengths) < count:
            start, totals = state.now, state.totals.copy()
            state = turn(self._computation(state, condition, level + 1))
            lengths.append(state.now - start)
            rest = count - len(lengths)
            same = len(lengths) > 1 and abs(lengths[-1] - lengths[-2]) <= 1e-9 * lengths[-1]
            if rest and (same or len(lengths) == ITERATIONS):
                repeat(state, rest, start, totals, name)
                break
        return state, (lengths[-1] if lengths else 0.0), start
