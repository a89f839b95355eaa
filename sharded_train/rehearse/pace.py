"""Which branch of which conditional a pipeline's stages take, tick by tick, as the schedule's table has it.

One program runs on all stages, and a stage that has nothing to do takes an idle branch (see `pipeline.executor`). What
the text of the program cannot tell, its schedule does: with it FLOPs are those of the mean device, and the step lasts
as long as the stages that it waits for, each of which begins a tick when it and its neighbours have ended the last.

Conditionals, loops of one turn or none among them, are known by what their branches hold: those of the passes stand in
the loop over ticks; the head and the embedding in a branch of these; a layer that a shorter chunk does not have in the
loop over a chunk's layers. Layers with windows of several kinds choose their kernel in conditionals that say so, and
so do layers in runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from sharded_train.models.runs import RUN, Spans
from sharded_train.ops.attention import BY_KERNEL
from sharded_train.pipeline import Pipeline
from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.hlo_walk import branches_of
from sharded_train.rehearse.products import work_of
from sharded_train.rehearse.scopes import names_of, part_of, phase_of
from sharded_train.schedules.table import NONE

Pass = Literal["forward", "backward", "weights"]  # the last where the weights' gradients are left for later
Role = Literal[Pass, "embed", "head", "embed back", "layer forward", "layer backward", "layer weights"]
PASSES: tuple[Pass, ...] = get_args(Pass)


LAYER: Mapping[Role, Role] = {
    "forward": "layer forward",
    "backward": "layer backward",
    "weights": "layer weights",
}


@dataclasses.dataclass(frozen=True)
class Doing:
    """What one stage does in one tick: layers of each pass (None: no such pass), and what comes beside them."""

    forward: int | None = None
    backward: int | None = None
    weights: int | None = None
    embeds: bool = False
    heads: bool = False
    embeds_back: bool = False

    def takes(self, role: Role, there: bool = True) -> bool:
        """Whether it takes the busy branch of a conditional; of a layer's, that is `there`."""
        beside = {"embed": self.embeds, "head": self.heads, "embed back": self.embeds_back}
        if role in PASSES:
            return self.layers(role) is not None
        return beside.get(role, there)

    def layers(self, role: Role) -> int | None:
        """Layers of the pass that a conditional decides about, or stands in."""
        if role in ("embed", "forward", "layer forward"):
            return self.forward
        return self.weights if role in ("weights", "layer weights") else self.backward


@dataclasses.dataclass(frozen=True)
class Conditional:
    """What a conditional decides, and which of its branches is the busy one."""

    role: Role
    busy: int
    count: int


@dataclasses.dataclass(frozen=True)
class Pace:
    """What every stage does in each tick, and the program's conditionals by name.

    In a `ring` the last stage and the first are neighbours.
    """

    ticks: tuple[tuple[Doing, ...], ...]  # [tick][stage]
    conditionals: Mapping[str, Conditional]
    ring: bool = False
    # Of conditionals that choose a layer's kernel, or pass over a layer of a run; see `shares`.
    windows: Mapping[tuple[str, int], Fraction] = dataclasses.field(default_factory=dict)

    def critical(self, seconds: Mapping[Doing, float]) -> list[Doing]:
        """For each tick what the stage does that the end of the step waits for, directly or through its neighbours."""
        stages = np.arange(len(self.ticks[0]))
        beside = np.stack([stages, stages - 1, stages + 1]) % len(stages)  # ties: the stage itself
        if not self.ring:
            beside[1, 0], beside[2, -1] = 0, stages[-1]
        ends, came_from, found = np.zeros(len(stages)), [], []
        for doings in self.ticks:
            came_from.append(beside[ends[beside].argmax(0), stages])
            ends = ends[came_from[-1]] + np.array([seconds[doing] for doing in doings])
        stage = int(ends.argmax())
        for doings, before in zip(reversed(self.ticks), reversed(came_from), strict=True):
            found.append(doings[stage])
            stage = int(before[stage])
        return found[::-1]

    def shares(self) -> dict[tuple[str, int], Fraction]:
        """Of each conditional's branches how often the mean stage takes it, whenever it comes to the conditional."""
        all_of = Counter(itertools.chain.from_iterable(self.ticks))
        shares = dict(self.windows)
        for name, conditional in self.conditionals.items():
            share = _share(conditional.role, all_of)
            for branch in range(conditional.count):
                shares[name, branch] = share if branch == conditional.busy else 1 - share
        return shares


def pace_of(
    pipe: Pipeline | None, module: Module, windows: Sequence[int | None] = (), spans: Spans = ()
) -> Pace | None:
    """The pace of a pipeline's program, or of one whose layers have `windows` of several kinds; None of any other, or
    where a pipeline's conditionals are not understood.
    """
    of_kernels = dict(_window_shares(module, windows)) | dict(_run_shares(module, spans))
    if pipe is None:
        return Pace((), {}, windows=of_kernels) if of_kernels else None
    conditionals = dict(_conditionals(module, module.computations[module.entry], None, False))
    passes = PASSES[:2] if pipe.schedule.weights is None else PASSES
    if not set(passes) <= {each.role for each in conditionals.values()}:
        return None
    return Pace(tuple(_ticks(pipe)), conditionals, ring=pipe.num_chunks > 1, windows=of_kernels)


def _window_shares(module: Module, windows: Sequence[int | None]) -> Iterator[tuple[tuple[str, int], Fraction]]:
    """How often the mean layer takes each branch of the conditionals that choose a layer's kernel."""
    layers = Counter(windows)  # in the order of the branches
    for computation in module.computations.values():
        for instruction in computation:
            if _chooses_kernel(instruction):
                for branch, count in enumerate(layers.values()):
                    yield (instruction.name, branch), Fraction(count, len(windows))


def _run_shares(module: Module, spans: Spans) -> Iterator[tuple[tuple[str, int], Fraction]]:
    """How often the mean chunk has the layer that a conditional of a run decides about, see `models.runs`."""
    for computation in module.computations.values():
        for instruction in computation:
            branches = branches_of(module, instruction) if _of_run(instruction) else None
            if branches is None or _chooses_kernel(instruction):
                continue
            span = spans[next(i for i in range(len(spans)) if f"{RUN}{i}" in names_of(instruction.scope))]
            weights = [_weight(module, branch) for branch in branches]
            there = Fraction(int(span.count.sum()), span.count.size * int(span.count.max()))
            for branch in range(len(branches)):
                yield (instruction.name, branch), there if weights[branch] == max(weights) else 1 - there


def _of_run(instruction: Instruction) -> bool:
    return any(name.startswith(RUN) for name in names_of(instruction.scope))


def _chooses_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "conditional" and BY_KERNEL in names_of(instruction.scope)


def _ticks(pipe: Pipeline) -> Iterator[tuple[Doing, ...]]:
    schedule, counts = pipe.schedule, pipe.split.layers
    first, last = schedule.is_first, schedule.is_last
    flags = first(schedule.forward), last(schedule.backward), first(schedule.backward)
    stages = np.arange(schedule.num_stages)
    weights = np.full_like(schedule.forward, NONE) if schedule.weights is None else schedule.weights
    passes = [
        np.where(items == NONE, NONE, counts[stages, schedule.chunk(items)])
        for items in (schedule.forward, schedule.backward, weights)
    ]
    layers = lambda n: None if n == NONE else int(n)
    for tick in range(schedule.num_ticks):
        yield tuple(
            Doing(
                layers(passes[0][tick, stage]),
                layers(passes[1][tick, stage]),
                layers(passes[2][tick, stage]),
                *(bool(flag[tick, stage]) for flag in flags),
            )
            for stage in stages
        )


def _share(role: Role, doings: Counter[Doing]) -> Fraction:
    """How often the busy branch is taken of the times that a stage comes to the conditional."""

    def total(of: Mapping[Doing, int]) -> int:
        return sum(of.values())

    if role in PASSES:
        return Fraction(total({d: n for d, n in doings.items() if d.takes(role)}), total(doings))
    inside = {d: n for d, n in doings.items() if d.layers(role) is not None}
    if role.startswith("layer"):
        counts = {d: d.layers(role) or 0 for d in inside}
        return Fraction(sum(counts[d] * n for d, n in inside.items()), max(counts.values()) * total(inside))
    return Fraction(total({d: n for d, n in inside.items() if d.takes(role)}), total(inside))


def _conditionals(
    module: Module, computation: Computation, within: Role | None, looped: bool
) -> Iterator[tuple[str, Conditional]]:
    """Every conditional of a role that is known, by name. `within` is the pass it stands in, `looped` a loop there."""
    for instruction in computation:
        if _chooses_kernel(instruction) or (_of_run(instruction) and branches_of(module, instruction) is not None):
            continue
        if (branches := branches_of(module, instruction)) is not None:
            weights = [_weight(module, branch) for branch in branches]
            busy = weights.index(max(weights))
            role = _role(module, branches[busy], within, looped)
            if role is not None:
                yield instruction.name, Conditional(role, busy, len(branches))
            inside = role if role in PASSES else within
            for branch in branches:
                if branch is not None:
                    yield from _conditionals(module, branch, inside, False if inside != within else looped)
        elif instruction.opcode == "while":
            body = module.computations[instruction.attributes["body"].lstrip("%")]
            yield from _conditionals(module, body, within, within is not None)
        elif instruction.opcode in ("call", "async-start", "call-start"):
            for called in module.called(instruction):
                yield from _conditionals(module, called, within, looped)


def _role(module: Module, busy: Computation | None, within: Role | None, looped: bool) -> Role | None:
    """What a conditional decides, told by the products of its busy branch and where it stands."""
    scopes = set(_scopes(module, busy)) if busy is not None else set()
    parts = {part_of(scope) for scope in scopes} - {"step"}
    backward = any(phase_of(scope) == "backward" and part_of(scope) != "head" for scope in scopes)
    if within is None:
        if not parts or all(phase_of(scope) == "weights later" for scope in scopes):
            return "weights" if scopes else None
        return "backward" if backward else "forward"
    if looped:
        return LAYER[within]
    if "head" in parts:
        return "head"
    return None if parts else "embed" if within == "forward" else "embed back"


def _scopes(module: Module, computation: Computation) -> Iterator[str]:
    """The scopes of all matrix products in a computation and what it calls."""
    for instruction in computation:
        if instruction.opcode in ("while", "conditional", "call"):
            for called in module.called(instruction):
                yield from _scopes(module, called)
        else:
            yield from (product.scope for product in work_of(module, computation, instruction).products)


def _weight(module: Module, computation: Computation | None) -> tuple[int, int]:
    """How much a branch holds: FLOPs of its products, and instructions, all that it calls once."""
    flops = instructions = 0
    if computation is None:
        return flops, instructions
    for instruction in computation:
        instructions += 1
        if instruction.opcode in ("while", "conditional", "call"):
            inner = [_weight(module, called) for called in module.called(instruction)]
            flops += sum(each[0] for each in inner)
            instructions += sum(each[1] for each in inner)
        else:
            flops += sum(product.flops for product in work_of(module, computation, instruction).products)
    return flops, instructions
