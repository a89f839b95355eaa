"""Gradients of a layer's weights that are left for later, and which weights multiply which input."""

from __future__ import annotations

import jax

from sharded_train.collectives import axis_size
from sharded_train.models.decoder import DecoderConfig
from sharded_train.ops.fp8 import Observed
from sharded_train.ops.linear import Deferred, deferred_gradient
from sharded_train.params import Tree


def defer(config: DecoderConfig, weights: Tree, rows: int, axes: tuple[str, ...]) -> Tree:
    """One layer's weights, those of large products so that their gradient is left for later, for `rows` tokens.

    `axes` of the mesh are those that activations differ over. See `later`.
    """
    out = {name: dict(leaves) for name, leaves in weights.items()}
    for branch, names in products(config):
        first = {isinstance(weights[branch][name], Observed): name for name in reversed(names)}  # in FP8, and not
        for name in names:
            w = weights[branch][name]
            num_in = w.size // config.d_model if name in ("out", "down") else config.d_model
            out[branch][name] = Deferred.of(w, rows, num_in, x=name == first[isinstance(w, Observed)], axes=axes)
    return out


def later(config: DecoderConfig, grads: Tree) -> tuple[Tree, Tree]:
    """The gradients of a layer whose weights were deferred: those that are there, and what the others need."""
    deferred = {branch: {} for branch in grads}  # type: ignore[var-annotated]
    for branch, names in products(config):
        deferred[branch] |= {name: grads[branch][name].replace(w=None) for name in names}
    there = {branch: {n: g for n, g in grads[branch].items() if n not in deferred[branch]} for branch in grads}
    return there, deferred


def deferred_gradients(config: DecoderConfig, deferred: Tree, like: Tree) -> Tree:
    """The gradients that were left for later, fp32, shaped like a layer's weights."""
    out: dict[str, dict[str, jax.Array]] = {branch: {} for branch in deferred}
    for branch, names in products(config):
        kept = {name: deferred[branch][name] for name in names}
        inputs = {each.scale is None: each.x for each in kept.values() if each.x is not None}
        with jax.named_scope(branch):
            for name, each in kept.items():
                x = inputs[each.scale is None]
                out[branch][name] = deferred_gradient(x, each, like[branch][name].shape)
    return out


def products(config: DecoderConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The layer's weights that multiply activations as they are stored: groups of one input, by where they stand."""
    ways = axis_size("tensor")
    shared = ways > 1 and config.kv_heads % ways != 0  # see `_own_kv_heads`
    (branch, qkv), *others = groups(config)
    return ((branch, ("q",) if shared else qkv), *others)


def groups(config: DecoderConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The layer's weights that multiply activations: groups of one input, by where they stand."""
    return (("attention", ("q", "k", "v")), ("attention", ("out",)), ("mlp", config.ups), ("mlp", ("down",)))
