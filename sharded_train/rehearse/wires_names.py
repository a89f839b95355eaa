"""Which arguments of the program an array comes from: the weight that a gather collects, by its name in the state.

Followed are copies, conversions, slices (of the layers), tuples and what loops carry on unchanged. Where a value is
computed from several arrays, it has no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.hlo_walk import Run

SAME = (
    *("bitcast", "bitcast-convert", "reshape", "copy", "convert", "transpose", "slice", "dynamic-slice"),
    *("reduce-precision", "optimization-barrier", "opt-barrier", "copy-start", "copy-done"),
)
STEPS = 64  # of a chain, which is far shorter


class Origins:
    """Follows values of one module back to the arguments of its entry."""

    def __init__(self, module: Module, runs: Iterable[Run]) -> None:
        self._module = module
        self._entry = module.computations[module.entry]
        # The computation and the instruction that each loop's body is called from.
        self._outside: dict[str, tuple[Computation, Instruction]] = {}
        for run in runs:
            if run.instruction.opcode == "while":
                for called in run.instruction.called:
                    self._outside.setdefault(called, (run.computation, run.instruction))

    def name(self, computation: Computation, name: str) -> str:
        """The name of the argument that a value of `computation` is, or is a part of; "" where it is none."""
        leaf: int | None = None  # of a value that is a tuple
        for _ in range(STEPS):
            made = computation.instructions[name]
            if made.opcode == "parameter":
                if computation is self._entry:
                    return argument_in_words(made.scope)
                if computation.name not in self._outside or leaf is None:
                    return ""
                computation, loop = self._outside[computation.name]
                name = loop.operands[0]
            elif made.opcode == "get-tuple-element":
                name, leaf = made.operands[0], int(made.attributes["index"])
            elif made.opcode == "tuple" and leaf is not None:
                name, leaf = made.operands[leaf], None
            elif made.opcode == "while":
                name = made.operands[0]  # as it came in: what the loop changes is no argument any more
                if leaf is None or not self._carried_on(made, leaf):
                    return ""
            elif made.opcode in SAME:
                name = made.operands[0]
            elif made.opcode == "fusion" and (operand := self._through(made, leaf)) is not None:
                name, leaf = made.operands[operand], None
            else:
                return ""
        return ""

    def _carried_on(self, loop: Instruction, leaf: int) -> bool:
        """Whether a loop gives back this leaf of its tuple as it got it."""
        body = self._module.computations[loop.attributes["body"].lstrip("%")]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return False
        back = body.instructions[root.operands[leaf]]
        return back.opcode == "get-tuple-element" and int(back.attributes["index"]) == leaf

    def _through(self, fusion: Instruction, leaf: int | None) -> int | None:
        """The operand of a fusion that its result, or a leaf of it, is but for form; None where there is no such."""
        inside = self._module.called(fusion)[0]
        made = inside.instructions[inside.root]
        if made.opcode == "tuple":
            if leaf is None:
                return None
            made = inside.instructions[made.operands[leaf]]
        for _ in range(STEPS):
            if made.opcode == "parameter":
                return int(made.literal)
            if made.opcode not in SAME:
                return None
            made = inside.instructions[made.operands[0]]
        return None


def argument_in_words(scope: str) -> str:
    """ "state.params['layers']['mlp']['up']" -> "layers/mlp/up"; other arguments as jax names them."""
    keys = re.findall(r"\['([^']+)'\]", scope)
    return "/".join(keys) if keys and scope.startswith("state.params") else scope
