"""Where in the model an instruction comes from, in words, read from the scope that jax gave it."""

from __future__ import annotations

import re
from typing import Literal

Phase = Literal["forward", "backward", "recomputed", "weights later"]
PARTS = ("scores", "attention", "mlp", "moe", "router", "head", "embed", "layers")  # the innermost that is named counts
STEP = "jit(_train_step)"  # what scopes of our own step begin with, unless XLA has cut them
# What jax and our step put into scopes, which names no part of a user's program.
_CALLS = frozenset(
    (
        *(
            "call_exported",
            "closed_call",
            "checkpoint",
            "remat",
            "rematted_computation",
            "shard_map",
            "while",
            "body",
            "cond",
        ),
        *("custom_jvp_call", "custom_vjp_call", "core_call", "transpose", "jvp", "vmap", "scan", ""),
        *("gather_weights", "reduce_gradients", "gradient_sums", "optimizer", "weights_later"),
    )
)
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


def is_ours(scope: str) -> bool:
    """Whether it may be a scope of our train step, or of a function with parts named like ours."""
    return not scope.startswith("jit(") or scope.startswith(STEP) or part_of(scope) != "step"


def named_by_user(scope: str) -> str:
    """The `jax.named_scope`s of a function that is not ours, "block/up"; else that function's name. "" for our step."""
    if is_ours(scope):
        return ""
    raw = scope.split("/")
    inner = [name for name, full in zip(names_of(scope), raw, strict=True) if not full.startswith(("jit(", "pjit("))]
    named = [name for name in inner[:-1] if name.partition("[")[0] not in _CALLS and not name.startswith("branch_")]
    return "/".join(dict.fromkeys(named)) or names_of(raw[0])[0]


def words_of(scope: str) -> str:
    """Such as "mlp, backward"; the head takes its gradient in its forward pass. Other functions go by their scopes."""
    if named := named_by_user(scope):
        phase = phase_of(scope)
        return named if phase == "forward" else f"{named}, {phase}"
    part = part_of(scope)
    return part if part in ("head", "step") else f"{part}, {phase_of(scope)}"
