"""What of an HLO module runs, in schedule order, and how often: loops, branches and calls resolved."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from sharded_train.rehearse.hlo import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop that an instruction stands in; `trips` is None where the text does not tell how often it runs."""

    name: str
    scope: str
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a conditional: number `index` of `count`. Which one runs is known only when it runs.

    A loop of one turn or none is one of two branches, the other of which is nothing.
    """

    conditional: str
    index: int
    count: int


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that runs, `times` a step, in `computation`, within `loops` and `branches` from the outside in.

    A loop of unknown trips counts once; `certain` says that there is none, and no branch.
    `wrapper` is the asynchronous start whose called computation it stands in.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[Loop, ...] = ()
    branches: tuple[Branch, ...] = ()
    wrapper: Instruction | None = None

    @property
    def certain(self) -> bool:
        """Whether `times` is what the program does, and not a bound or a guess."""
        return not self.branches and all(loop.trips is not None for loop in self.loops)


def walk(module: Module) -> Iterator[Run]:
    """Every instruction that runs, a caller before what it calls, in schedule order.

    The insides of fusions and of reductions are no instructions of their own here (see `Module.called`); the insides of
    loops, calls, asynchronous wrappers and all branches of conditionals are.
    """
    return _walk(module, Run(_nothing(module), module.computations[module.entry], 1))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a while loop in `computation` runs: as XLA noted it, else read from the condition.

    The condition is understood where it compares a counter, that the body moves by a constant, with a constant; None
    otherwise.
    """
    if known := re.search(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)', loop.attributes.get("backend_config", "")):
        return int(known[1])
    return _counted(module, computation, loop)


def branches_of(module: Module, instruction: Instruction) -> list[Computation | None] | None:
    """The branches of a conditional, or of a loop of one turn or none: its body, and nothing. None: it is neither."""
    if instruction.opcode == "conditional":
        return list(module.called(instruction))
    if instruction.opcode != "while":
        return None
    condition, body = (module.computations[instruction.attributes[key].lstrip("%")] for key in ("condition", "body"))
    asked, made = condition.instructions[condition.root], body.instructions[body.root]
    if asked.opcode != "get-tuple-element" or condition.instructions[asked.operands[0]].opcode != "parameter":
        return None
    if made.opcode != "tuple":
        return None
    again = body.instructions[made.operands[int(asked.attributes["index"])]]
    while again.opcode in ("copy", "bitcast"):
        again = body.instructions[again.operands[0]]
    return [body, None] if again.opcode == "constant" and again.literal == "false" else None


def _nothing(module: Module) -> Instruction:
    """A stand-in for what calls the entry."""
    return Instruction(module.name, "call", (), (), "", "")


def _walk(module: Module, caller: Run) -> Iterator[Run]:
    for instruction in caller.computation:
        run = dataclasses.replace(caller, instruction=instruction)
        yield run
        for inner in _inside(module, run):
            yield from _walk(module, inner)


def _inside(module: Module, run: Run) -> list[Run]:
    """One run for each computation that an instruction hands control to."""
    opcode, called = run.instruction.opcode, run.instruction.called
    if not called:
        return []
    if (branches := branches_of(module, run.instruction)) is not None:
        name, count = run.instruction.name, len(branches)
        return [
            dataclasses.replace(run, computation=branch, branches=(*run.branches, Branch(name, i, count)))
            for i, branch in enumerate(branches)
            if branch is not None
        ]
    if opcode == "while":
        return _inside_loop(module, run)
    if opcode == "call":
        return [dataclasses.replace(run, computation=module.computations[name]) for name in called]
    if opcode in ("async-start", "call-start"):
        wrapped = dataclasses.replace(run, wrapper=run.instruction)
        return [dataclasses.replace(wrapped, computation=module.computations[name]) for name in called]
    return []


def _inside_loop(module: Module, run: Run) -> list[Run]:
    loop = run.instruction
    trips = trip_count(module, run.computation, loop)
    inside = dataclasses.replace(run, loops=(*run.loops, Loop(loop.name, loop.scope, trips)))
    times = run.times * (1 if trips is None else trips)
    condition, body = (module.computations[loop.attributes[key].lstrip("%")] for key in ("condition", "body"))
    checks = times + (0 if trips is None else run.times)  # the last of them ends the loop
    return [
        dataclasses.replace(inside, computation=condition, times=checks),
        dataclasses.replace(inside, computation=body, times=times),
    ]


@dataclasses.dataclass(frozen=True)
class _Linear:
    """An integer: the loop's carried value number `element`, where there is one, plus `offset`."""

    element: int | None
    offset: int


def _counted(module: Module, outer: Computation, loop: Instruction) -> int | None:
    condition, body = (module.computations[loop.attributes[key].lstrip("%")] for key in ("condition", "body"))
    compared = _comparison(module, condition)
    if compared is None:
        return None
    left, right, direction = compared
    if left.element is None:
        left, right, direction = right, left, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left.element is None or right.element is not None:
        return None
    first = _operand_of_tuple(module, outer, outer.instructions[loop.operands[0]], left.element)
    step = _operand_of_tuple(module, body, body.instructions[body.root], left.element)
    if first is None or first.element is not None or step is None or step.element != left.element:
        return None
    return _trips(first.offset + left.offset, step.offset, right.offset, direction)


def _trips(first: int, step: int, bound: int, direction: str) -> int | None:
    """How often `first + i step` meets the condition, i = 0, 1, ..., before it first does not."""
    if direction in ("GT", "GE"):
        first, step, bound, direction = -first, -step, -bound, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    if direction != "LT" or (step <= 0 and first < bound):
        return None
    return max(0, -(-(bound - first) // step)) if first < bound else 0


def _comparison(module: Module, condition: Computation) -> tuple[_Linear, _Linear, str] | None:
    """Both sides and the direction of the comparison that is the condition's result."""
    root, arguments, where = condition.instructions[condition.root], None, condition
    while root.opcode == "fusion":
        arguments = [_linear(module, where, name, arguments) for name in root.operands]
        where = module.called(root)[0]
        root = where.instructions[where.root]
    if root.opcode != "compare":
        return None
    left, right = (_linear(module, where, name, arguments) for name in root.operands)
    return None if left is None or right is None else (left, right, root.attributes["direction"])


def _operand_of_tuple(module: Module, where: Computation, made: Instruction, index: int) -> _Linear | None:
    return _linear(module, where, made.operands[index], None) if made.opcode == "tuple" else None


def _linear(
    module: Module, where: Computation, name: str, arguments: Sequence[_Linear | None] | None
) -> _Linear | None:
    """A value as carried element plus offset; `arguments` are those of the fusion that `where` is the body of."""
    made = where.instructions[name]
    if made.opcode == "constant":
        return _Linear(None, int(made.literal)) if re.fullmatch(r"-?\d+", made.literal) else None
    if made.opcode == "parameter":
        return arguments[int(made.literal)] if arguments else None
    if made.opcode == "get-tuple-element":
        carried = where.instructions[made.operands[0]].opcode == "parameter" and arguments is None
        return _Linear(int(made.attributes["index"]), 0) if carried else None
    if made.opcode in ("copy", "bitcast", "convert"):
        return _linear(module, where, made.operands[0], arguments)
    if made.opcode == "fusion":
        inner = module.called(made)[0]
        return _linear(module, inner, inner.root, [_linear(module, where, name, arguments) for name in made.operands])
    if made.opcode in ("add", "subtract"):
        left, right = (_linear(module, where, name, arguments) for name in made.operands)
        return _sum(left, right, 1 if made.opcode == "add" else -1)
    return None


def _sum(left: _Linear | None, right: _Linear | None, sign: int) -> _Linear | None:
    if left is None or right is None or (right.element is not None and (sign < 0 or left.element is not None)):
        return None
    return _Linear(right.element if left.element is None else left.element, left.offset + sign * right.offset)
