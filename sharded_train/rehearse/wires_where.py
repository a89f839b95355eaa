"""Where in the program a collective stands: what its loops are, what is computed meanwhile, the part of the model."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from sharded_train.rehearse import scopes
from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.hlo_walk import Loop, Run
from sharded_train.rehearse.origins import Origins
from sharded_train.rehearse.pace import Pace
from sharded_train.rehearse.products import work_of

CONTROL = ("while", "conditional", "call", "async-start", "call-start")
# What one turn of a loop is, by the name that stands before "while" in the scopes of what is in it.
TURNS = {"shard_map": "microbatch", "layers": "layer", "head": "chunk of tokens"}
# What is sent outside of the model's parts, by the function that sends it.
FUNCTIONS = {
    "send": "sends of the pipeline",
    "global_norm": "the global norm",
    "over_tokens": "sums over tokens",
    "settle": "sums of gradients",
    "collect": "sums of gradients",
    "summed": "sums of gradients",
    "_many": "sums of gradients",
    "_one": "sums of gradients",
    "loss_and_grads": "the loss",
}

Shares = Mapping[tuple[str, int], Fraction]  # how often a branch is taken, by its conditional's name and its number


def name_loops(runs: Iterable[Run], pace: Pace | None = None) -> dict[str, str]:
    """What one turn of each loop is ("layer"), by the loop's name: most of its instructions' scopes decide.

    The loop at depth d, those of one turn or none counted, is the d-th "while" of the scope of whatever stands in it;
    XLA drops the scope of a loop that it has changed, hence not from the loop's own. "turn" where the scopes tell
    nothing. A pipeline's ticks are what its passes stand in.
    """
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    depths: dict[str, int] = {}
    passes = {name for name, each in pace.conditionals.items() if each.role == "forward"} if pace else set()
    ticks = set()
    for run in runs:
        if run.instruction.opcode == "while":
            depths[run.instruction.name] = (
                1 + len(run.loops) + sum(branch.conditional in depths for branch in run.branches)
            )
        if run.instruction.name in passes and run.loops:
            ticks.add(run.loops[-1].name)
        if run.loops and (turn := _turn(run.instruction.scope, depths[run.loops[-1].name])):
            votes[run.loops[-1].name][turn] += 1
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items()} | dict.fromkeys(ticks, "tick")


def mean_times(run: Run, shares: Shares) -> tuple[int | Fraction, bool]:
    """How often the mean device does it in a step, each branch without a share counting as always taken; is it sure?"""
    keys = [(branch.conditional, branch.index) for branch in run.branches]
    times = run.times * math.prod((shares.get(key, Fraction(1)) for key in keys), start=Fraction(1))
    certain = all(key in shares for key in keys) and all(loop.trips is not None for loop in run.loops)
    return (int(times) if times.denominator == 1 else times), certain


def _turn(scope: str, depth: int) -> str:
    names = [name for name in scopes.names_of(scope) if name]
    whiles = [i for i, name in enumerate(names) if name == "while"]
    if len(whiles) < depth:
        return ""
    first = whiles[depth - 2] + 1 if depth > 1 else 0
    before = [name for name in names[first : whiles[depth - 1]] if name in TURNS and scopes.is_ours(scope)]
    return TURNS[before[-1]] if before else ""


def turn_of(loop: Loop, names: dict[str, str]) -> str:
    """What one turn of the loop is, in words; a loop of unknown length is none of those that the step is made of."""
    return names.get(loop.name, "turn") if loop.trips is not None else "turn"


class Spans:
    """The matrix products that a schedule puts between two instructions, those in what stands there included."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._products: dict[str, dict[str, tuple[str, ...]]] = {}

    def between(self, computation: Computation, start: str, done: str) -> tuple[str, ...]:
        """Names of the products after `start` and before `done`."""
        products = self._of(computation)
        names = list(products)
        return tuple(p for name in names[names.index(start) + 1 : names.index(done)] for p in products[name])

    def _of(self, computation: Computation) -> dict[str, tuple[str, ...]]:
        """Products by instruction, in schedule order."""
        if computation.name not in self._products:
            self._products[computation.name] = {each.name: self._in(computation, each) for each in computation}
        return self._products[computation.name]

    def _in(self, computation: Computation, instruction: Instruction) -> tuple[str, ...]:
        if instruction.opcode in CONTROL:
            called = self._module.called(instruction)
            return tuple(product for each in called for names in self._of(each).values() for product in names)
        return tuple(product.name for product in work_of(self._module, computation, instruction).products)


def scope_near(computation: Computation, instruction: Instruction) -> str:
    """The scope of an instruction, or where XLA made it and gave it none, of the nearest that leads to it."""
    near = [instruction]
    for _ in range(4):
        if found := next((each.scope for each in near if each.scope), ""):
            return found
        near = [operand for each in near for operand in computation.operands(each)]
    return ""


def argument_of(module: Module, origins: Origins, name: str) -> str:
    """The argument of the program that an array comes from, a weight by its name in the state; "" if it is none."""
    made = origins.of(name)
    if made is None or made.opcode != "parameter" or made.name not in module.computations[module.entry].instructions:
        return ""
    keys = re.findall(r"\['([^']+)'\]", made.scope)
    return "/".join(keys) if keys and made.scope.startswith("state.params") else made.scope


def words_of(scope: str, source: str, parameters: Sequence[str] = (), gradients: bool = False) -> str:
    """The part of the model and the pass: "attention + mlp, recomputed"; outside of the model what is done there.

    Weights that are gathered are told as such, by where they stand in the state: "weights: layers", and gradients that
    are reduced to where those lie: "gradients: layers". Of a function that is not ours its own scopes are told, and
    which of its arguments is gathered: "block: w".
    """
    if named := scopes.words_of(scope) if not scopes.is_ours(scope) else "":
        return f"{named}: {', '.join(dict.fromkeys(parameters))}" if any(parameters) else named
    names = set(re.split(r"[^\w]+", scope))
    parts = [part for part in scopes.PARTS if part in names]
    inner = [part for part in parts if part != "layers"] or parts
    if tops := list(dict.fromkeys(name.partition("/")[0] for name in parameters)):
        backward = ", backward" if inner and scopes.phase_of(scope) == "backward" else ""
        return f"weights: {' + '.join(tops) if len(tops) < 4 else 'all kinds'}{backward}"
    if gradients:
        return f"gradients: {' + '.join(inner)}" if inner else "gradients"
    if inner:
        return f"{' + '.join(inner)}, {scopes.phase_of(scope)}"
    functions = re.split(r"\W+", source.rpartition(" in ")[2])
    return next((FUNCTIONS[name] for name in reversed(functions) if name in FUNCTIONS), "step")
