"""Which numbers weights and activations are multiplied in."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

Recipe = Literal["fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "mxfp8"]
ProductName = Literal["q", "k", "v", "out", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class Bf16Layers:
    """Layers that stay in bf16: the gradients of the last, and what the first make of the embedding, range widest."""

    first: int = 0  # so many
    last: int = 0  # so many


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """How the layers' weight products run in FP8; all else is bf16: embedding, head, norms, scores of attention."""

    amax_history_length: int = 16  # steps that fp8_delayed remembers
    algorithm: Literal["max", "most_recent"] = "max"  # of the history, what fp8_delayed scales by
    margin: int = 0  # scales are 2^margin below what would just fit, but for mxfp8's
    format: Literal["hybrid", "e4m3"] = (
        "hybrid"  # hybrid: e4m3 forward, e5m2 for gradients; e4m3: for both, as mxfp8 always
    )
    bf16_products: tuple[ProductName, ...] = ()  # of every layer, that stay in bf16
    bf16_layers: Bf16Layers = dataclasses.field(default_factory=Bf16Layers)  # that stay in bf16 whole
    recalibrate: bool = False  # measure anew what fp8_delayed scales by, but for a checkpoint saved under the same


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """fp16's dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740)."""

    initial: float = 2.0**16  # scale of the first step
    growth_interval: int = 2000  # steps in a row without overflow, after which the scale grows
    growth_factor: float = 2.0  # what the scale grows by
    backoff_factor: float = 0.5  # what it is multiplied by after overflows
    hysteresis: int = 2  # overflows since the scale last grew that it takes to back off


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The recipe by name. Master weights, moments, reductions of losses and norms are fp32 under all of them."""

    recipe: Recipe = "bf16"  # what matrices are multiplied in
    fp8: Fp8Config = dataclasses.field(default_factory=Fp8Config)  # of the FP8 recipes
    fp16: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)  # of fp16

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of everything that is not multiplied in FP8."""
        return jnp.dtype({"fp32": jnp.float32, "fp16": jnp.float16}.get(self.recipe, jnp.bfloat16))

    @property
    def is_fp8(self) -> bool:
        return self.recipe.startswith("fp8") or self.recipe == "mxfp8"
