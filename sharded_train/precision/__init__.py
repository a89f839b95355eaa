"""Which dtype weights and activations are multiplied in."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The recipe by name. Master weights, moments, reductions of losses and norms are fp32 under all of them."""

    recipe: Literal["fp32", "bf16"] = "bf16"  # what matrices are multiplied in

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[self.recipe])
