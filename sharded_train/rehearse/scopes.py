"""Where in the model an instruction comes from, in words, read from the scope that jax gave it."""

from __future__ import annotations

import re
from typing import Literal

Phase = Literal["forward", "backward", "recomputed", "weights later"]
PARTS = ("scores", "attention", "mlp", "moe", "router", "head", "embed", "layers")  # the innermost that is named counts
_WITHIN = re.compile(r"(?:[\w.]+\()*([^()]*)\)*")


def names_of(scope: str) -> tuple[str, ...]:
    """The components of a scope without what transforms them: "transpose(jvp(layers))" is "layers"."""
    return tuple(match[1] if (match := _WITHIN.fullmatch(name)) else name for name in scope.split("/"))


def phase_of(scope: str) -> Phase:
    """Forward, backward, computed again for it by jax.checkpoint, or gradients that a backward left for later."""
    if "weights_later" in names_of(scope):
        return "weights later"
    if "rematted_computation" in scope:
        return "recomputed"
    return "backward" if "transpose(" in scope else "forward"


def part_of(scope: str) -> str:
    """The named part of the model, such as "attention"; "step" for what stands outside of the model."""
    names = names_of(scope)
    return next((part for part in PARTS if part in names), "step")


def words_of(scope: str) -> str:
    """Such as "mlp, backward"; the head takes its gradient in its forward pass."""
    part = part_of(scope)
    return part if part in ("head", "step") else f"{part}, {phase_of(scope)}"
