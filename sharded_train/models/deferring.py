"""Gradients of a layer's weights that are left for later."""

from __future__ import annotations

import jax

from sharded_train.models import Model
from sharded_train.ops.fp8 import Observed
from sharded_train.ops.linear import Deferred, deferred_gradient
from sharded_train.params import Tree


def defer(model: Model, weights: Tree, rows: int, axes: tuple[str, ...]) -> Tree:
    """One layer's weights, those of large products so that their gradient is left for later, for `rows` tokens.

    `axes` of the mesh are those that activations differ over. See `later`.
    """
    out = {name: dict(leaves) for name, leaves in weights.items()}
    specs = model.param_specs()["layers"]
    for branch, names in model.products_as_stored():
        first = {isinstance(weights[branch][name], Observed): name for name in reversed(names)}  # in FP8, and not
        for name in names:
            w = weights[branch][name]
            num_in = model.d_model if specs[branch][name].axes[1] == "embed" else w.size // model.d_model
            out[branch][name] = Deferred.of(w, rows, num_in, x=name == first[isinstance(w, Observed)], axes=axes)
    return out


def later(model: Model, grads: Tree) -> tuple[Tree, Tree]:
    """The gradients of a layer whose weights were deferred: those that are there, and what the others need."""
    deferred = {branch: {} for branch in grads}  # type: ignore[var-annotated]
    for branch, names in model.products_as_stored():
        deferred[branch] |= {name: grads[branch][name].replace(w=None) for name in names}
    there = {branch: {n: g for n, g in grads[branch].items() if n not in deferred[branch]} for branch in grads}
    return there, deferred


def deferred_gradients(model: Model, deferred: Tree, like: Tree) -> Tree:
    """The gradients that were left for later, fp32, shaped like a layer's weights."""
    out: dict[str, dict[str, jax.Array]] = {branch: {} for branch in deferred}
    for branch, names in model.products_as_stored():
        kept = {name: deferred[branch][name] for name in names}
        inputs = {each.scale is None: each.x for each in kept.values() if each.x is not None}
        with jax.named_scope(branch):
            for name, each in kept.items():
                x = inputs[each.scale is None]
                out[branch][name] = deferred_gradient(x, each, like[branch][name].shape)
    return out
