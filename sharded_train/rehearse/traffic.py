"""Bytes that one instruction of a compiled program reads from the device's memory and writes to it.

A fusion often takes a whole stack of layers and uses one: what it reads of an operand is followed from its result
backwards, so that a slice counts with what it takes, and an update in place with what it changes. What is counted
is the least that a kernel must move, each operand once, as though nothing of it was still in the cache.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.opcodes import COLLECTIVES, CONTROL, FUSIONS, NO_KERNEL, SLICES, UPDATES

FREE = NO_KERNEL | COLLECTIVES | CONTROL | frozenset(["call", "async-start", "call-start"])  # they cost what they hold
SAME_PLACE = frozenset(["bitcast", "reshape", "copy"])  # between an update in place and the result
WHOLE = frozenset(["dot", "scaled-dot", "fusion", "fusion-start", "call", "custom-call", "sort", "convolution"])
_SIZES = {"slice": 1, "dynamic-slice": 1, "gather": 2}  # operands that are more than a position


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one execution."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic_of(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Bytes of one execution of an instruction that is launched by itself."""
    opcode = instruction.opcode
    if opcode in FREE:
        return Traffic(0, 0)
    if opcode in FUSIONS:
        body = module.called(instruction)[0]
        read = sum(_used_of_parameters(body).values())
        return Traffic(read, sum(_written(body, name) for name in _results(body)))
    operands = [operand.shapes[0] for operand in computation.operands(instruction) if operand.shapes]
    if opcode in SLICES:
        size = instruction.shapes[0].bytes
        positions = sum(shape.bytes for shape in operands[1 : _SIZES[opcode]])
        return Traffic(size + positions, size)
    if opcode == "dynamic-update-slice":
        return Traffic(operands[1].bytes, operands[1].bytes)
    if opcode == "scatter":
        updates = sum(shape.bytes for shape in operands[len(instruction.shapes) + 1 :])
        return Traffic(2 * updates + operands[len(instruction.shapes)].bytes, updates)
    results = sum(shape.bytes for shape in instruction.shapes)
    return Traffic(sum(shape.bytes for shape in operands), results - _workspace(instruction))


def _workspace(instruction: Instruction) -> int:
    """Bytes of the room to work in that a call of a library has as the last of its results."""
    last = instruction.shapes[-1:]
    is_room = instruction.opcode == "custom-call" and len(instruction.shapes) > 1 and last[0].dtype in ("s8", "u8")
    return last[0].bytes if is_room else 0


def _results(body: Computation) -> tuple[str, ...]:
    """Names of what a fusion gives: those that its tuple holds, or its root."""
    root = body.instructions[body.root]
    return root.operands if root.opcode == "tuple" else (body.root,)


def _updated(body: Computation, name: str) -> Instruction | None:
    """The update in place that a result of a fusion is, if it is one."""
    made = body.instructions[name]
    while made.opcode in SAME_PLACE:
        made = body.instructions[made.operands[0]]
    return made if made.opcode in UPDATES else None


def _written(body: Computation, name: str) -> int:
    update, made = _updated(body, name), body.instructions[name]
    if made.opcode == "get-tuple-element" and _is_workspace(body, made):
        return 0
    if update is None:
        return sum(shape.bytes for shape in made.shapes) - _workspace(made)
    return sum(operand.shapes[0].bytes for operand in _updates(body, update))


def _is_workspace(body: Computation, element: Instruction) -> bool:
    """Whether an element of a tuple is the room to work in of a library's call."""
    call = body.operands(element)[0]
    return _workspace(call) > 0 and int(element.attributes["index"]) == len(call.shapes) - 1


def _updates(body: Computation, update: Instruction) -> list[Instruction]:
    """The new values of an update in place."""
    operands = body.operands(update)
    return operands[1:2] if update.opcode == "dynamic-update-slice" else operands[len(update.shapes) + 1 :]


def _used_of_parameters(body: Computation) -> dict[str, int]:
    """Bytes that a fusion reads of each of its parameters, by name."""
    used = _used(body)
    return {
        each.name: round(sum(shape.bytes for shape in each.shapes) * used[each.name])
        for each in body
        if each.opcode == "parameter"
    }


def _used(body: Computation) -> Mapping[str, float]:
    """The part of each instruction's entries that the fusion's results need, 0 to 1.

    Parts taken by several slices add up, being of different places; other uses may be of the same entries, so that the
    largest counts.
    """
    largest: defaultdict[str, float] = defaultdict(float)
    sliced: defaultdict[str, float] = defaultdict(float)
    in_place = {update.name for name in _results(body) if (update := _updated(body, name))}
    for name in _results(body):
        largest[name] = 1.0
    used: dict[str, float] = {}
    for instruction in reversed(list(body)):
        name = instruction.name
        used[name] = min(1.0, max(largest[name], sliced[name]))
        if used[name] == 0:
            continue
        for operand, part, is_slice in _needs(body, instruction, used[name], name in in_place):
            if is_slice:
                sliced[operand] += part
            else:
                largest[operand] = max(largest[operand], part)
    return used


def _needs(
    body: Computation, instruction: Instruction, part: float, in_place: bool
) -> Iterator[tuple[str, float, bool]]:
    """For each operand the part of its entries that `part` of the result needs, and whether it is a slice of it."""
    opcode = instruction.opcode
    size = max(1, instruction.shapes[0].size if instruction.shapes else 1)
    for i, operand in enumerate(body.operands(instruction)):
        its_size = max(1, operand.shapes[0].size if operand.shapes else 1)
        if opcode in SLICES and i == 0:
            yield operand.name, min(1.0, part * size / its_size), True
        elif opcode in UPDATES and i == 0:
            new = sum(each.shapes[0].size for each in _updates(body, instruction))
            again = new / its_size if opcode == "scatter" else 0.0  # a scatter adds to what is there
            yield operand.name, again if in_place else max(0.0, part - new / size), False
        elif opcode in WHOLE or opcode in UPDATES | SLICES or opcode == "tuple":
            yield operand.name, 1.0, False
        elif opcode in ("reduce", "reduce-window", "concatenate"):
            yield operand.name, part, False
        else:  # element by element, or a broadcast
            yield operand.name, min(1.0, part * size / its_size), False
