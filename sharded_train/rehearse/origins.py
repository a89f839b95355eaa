"""Which instruction of a compiled program an array's numbers come from: through loops, fusions, copies and slices.

A loop's carry has the loop's own scope, the copy of a weight none at all; what made the numbers tells what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sharded_train.rehearse.hlo import Computation, Instruction, Module

# Their first operand's numbers, moved, cast or cut.
PASSING = frozenset(
    (
        *("bitcast", "bitcast-convert", "convert", "copy", "copy-done", "copy-start", "dynamic-slice"),
        *("get-tuple-element", "opt-barrier", "optimization-barrier", "reduce-precision", "reshape", "slice"),
        "transpose",
    )
)
STEPS = 200  # at most; what takes more goes round in a circle


def argument_in_words(instruction: Instruction) -> str:
    """An argument of the program by its name: "layers/mlp/up" of "state.params['layers']['mlp']['up']"."""
    keys = re.findall(r"\['([^']+)'\]", instruction.scope)
    return "/".join(keys) if keys and instruction.scope.startswith("state.params") else instruction.scope


class Origins:
    """Looks up origins in one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._homes: Mapping[str, Computation] = {i.name: c for c in module.computations.values() for i in c}
        self._callers = {called: i for c in module.computations.values() for i in c for called in i.called}

    def of(self, name: str, index: tuple[int, ...] = ()) -> Instruction | None:
        """The instruction that made element `index` of the result of the one named; None if there is none named so.

        A parameter of the entry is an argument of the program.
        """
        found = self.element(name, index)
        return found and found[0]

    def element(self, name: str, index: tuple[int, ...] = ()) -> tuple[Instruction, int] | None:
        """The same, and which element of that instruction's result (0 where it is no tuple)."""
        if name not in self._homes:
            return None
        here, element = self._homes[name].instructions[name], index[-1] if index else 0
        for _ in range(STEPS):
            found = self._before(here, element)
            if found is None:
                break
            here, element = found
        return here, element

    def _before(self, here: Instruction, element: int) -> tuple[Instruction, int] | None:
        """One step back, or None where the numbers are made."""
        home = self._homes[here.name]
        if here.opcode == "parameter":
            return self._argument(home, here, element)
        if here.opcode in ("fusion", "async-done", "fusion-done", "call", "async-start", "fusion-start"):
            return self._inside(here, element)
        if here.opcode == "while":
            body = self._module.computations[here.attributes["body"].lstrip("%")]
            return self._carried(body, element)
        if here.opcode == "conditional":
            return self._branch(here, element)
        if here.opcode == "tuple":
            return (home.instructions[here.operands[element]], 0) if element < len(here.operands) else None
        if here.opcode == "get-tuple-element":
            return home.instructions[here.operands[0]], int(here.attributes["index"])
        if here.opcode == "dynamic-update-slice":
            return home.instructions[here.operands[1]], 0
        if here.opcode in PASSING and here.operands:
            return home.instructions[here.operands[0]], element
        return None

    def _argument(self, home: Computation, here: Instruction, element: int) -> tuple[Instruction, int] | None:
        """What the caller gives for a parameter; for a loop's, what its last turn gives."""
        caller = self._callers.get(home.name)
        if caller is None:
            return None
        if caller.opcode == "while":
            return self._carried(home, element) if home.name == caller.attributes["body"].lstrip("%") else None
        operands = self._homes[caller.name].operands(caller)
        # A conditional takes what chooses, then one operand for each branch.
        number = 1 + caller.called.index(home.name) if caller.opcode == "conditional" else int(here.literal)
        return (operands[number], element) if number < len(operands) else None

    def _carried(self, body: Computation, element: int) -> tuple[Instruction, int] | None:
        """Element of a loop's carry: as a turn makes it, or as it came in where turns leave it alone."""
        root = body.instructions[body.root]
        if root.opcode != "tuple" or element >= len(root.operands):
            return None
        made = body.instructions[root.operands[element]]
        if made.opcode == "get-tuple-element" and int(made.attributes["index"]) == element:
            source = body.instructions[made.operands[0]]
            if source.opcode == "parameter":
                loop = self._callers[body.name]
                return self._homes[loop.name].operands(loop)[0], element
        return made, 0

    def _branch(self, here: Instruction, element: int) -> tuple[Instruction, int] | None:
        """What a branch makes; of several, the first that does not just hand on what it got, or a constant."""
        found = [_result(branch, element) for branch in self._module.called(here)]
        making = [each for each in found if each[0].opcode not in ("parameter", "constant", "broadcast")]
        return next(iter(making or found), None)

    def _inside(self, here: Instruction, element: int) -> tuple[Instruction, int] | None:
        """The root of what a fusion or a call runs; what ends something asynchronous is what began it."""
        if here.opcode.endswith("-done"):
            return self._homes[here.name].operands(here)[0], element
        called = self._module.called(here)
        if not called:
            return None
        return called[0].instructions[called[0].root], element


def _result(computation: Computation, element: int) -> tuple[Instruction, int]:
    """What lies behind element `element` of a computation's result, through tuples and what passes numbers on."""
    made = computation.instructions[computation.root]
    while made.opcode == "tuple" or (made.opcode in PASSING and made.operands):
        name = made.operands[element if made.opcode == "tuple" else 0]
        element = 0 if made.opcode == "tuple" else int(made.attributes.get("index", element))
        made = computation.instructions[name]
    return made, element
