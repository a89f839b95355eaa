"""The precision recipe's part of the state: fp16's loss scale, or the scales and histories of FP8's delayed scaling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sharded_train.models.fp8_layers import Fp8Layers
from sharded_train.params import Tree
from sharded_train.precision import PrecisionConfig, delayed, loss_scale
from sharded_train.precision.formats import E4M3, E5M2, Fp8, current_scale


def fp8_of(precision: PrecisionConfig) -> Fp8 | None:
    """How the recipe quantises; None if it does not."""
    if not precision.is_fp8:
        return None
    if precision.recipe == "mxfp8":
        return Fp8("blocks", E4M3, E4M3)
    backward = E5M2 if precision.fp8.format == "hybrid" else E4M3
    scaling: Any = precision.recipe.removeprefix("fp8_")
    return Fp8(scaling, E4M3, backward, precision.fp8.margin)


def fresh(precision: PrecisionConfig, fp8: Fp8Layers | None, num_layers: int) -> Tree:
    """Before the first step; None for recipes that keep nothing."""
    if precision.recipe == "fp16":
        return loss_scale.fresh(precision.fp16)
    if precision.recipe != "fp8_delayed":
        return None
    assert fp8 is not None
    layers: Tree = {branch: {} for branch, _ in fp8.groups}
    for branch, name, kind in fp8.tensors():
        layers[branch].setdefault(name, {})[kind] = delayed.fresh(num_layers, precision.fp8.amax_history_length)
    return {"layers": layers}


def moved_on(precision: PrecisionConfig, fp8: Fp8Layers | None, scaling: Tree, seen: Tree, finite: jax.Array) -> Tree:
    """After a step; one that is skipped teaches only the loss scale."""
    if scaling is None:
        return None
    if precision.recipe == "fp16":
        return loss_scale.moved_on(scaling, finite, precision.fp16)
    assert fp8 is not None
    layers: Tree = {branch: {} for branch, _ in fp8.groups}
    for branch, name, kind in fp8.tensors():
        now, amax = scaling["layers"][branch][name][kind], jnp.where(fp8.in_fp8, seen[branch][name][kind][:, 0], 0)
        later = delayed.moved_on(now, amax, dtype_of(fp8.how, kind), precision.fp8)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), later, now)
        layers[branch].setdefault(name, {})[kind] = kept
    return {"layers": layers}


def dtype_of(how: Fp8, kind: str) -> jnp.dtype:
    """The format of a product's input and weight ("x", "w") or of its output's cotangent ("g")."""
    return how.backward if kind == "g" else how.forward


def told(fp8: Fp8Layers, scaling: Tree, seen: Tree) -> dict[str, jax.Array]:
    """What a step tells of each tensor, by "branch/weight/kind": `[layers, 4]`, what was seen and the scale.

    NaN of layers that are not in FP8.
    """
    found = {}
    for branch, name, kind in fp8.tensors():
        numbers = seen[branch][name][kind]
        if fp8.how.scaling == "blocks":
            scale = jnp.full_like(numbers[:, 0], jnp.nan)  # there are many
        elif scaling is None:
            scale = current_scale(numbers[:, 0], dtype_of(fp8.how, kind), fp8.how.margin)
        else:
            scale = scaling["layers"][branch][name][kind]["scale"]
        told = jnp.concatenate([numbers, scale[:, None]], 1)
        found[f"{branch}/{name}/{kind}"] = jnp.where(fp8.in_fp8[:, None], told, jnp.nan)
    return found
