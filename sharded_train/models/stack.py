"""The stack of equal layers: one scan forward, one back, each layer's weights fetched when they are needed.

Plain autodiff of a scan keeps whatever the backward pass wants, the gathered weights of every layer among it, which is
all of the memory that ZeRO-3 saves. Here the backward pass fetches a layer's weights a second time and keeps from
the forward pass only values that depend on activations. Which of those are kept is the rematerialisation policy's
choice, so that policies and ZeRO know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Remat = Literal["none", "selective", "full"]
Block = Callable[[jax.Array, Any, Any, jax.Array], jax.Array]  # (x, weights, context, layer) -> x
Fetch = Callable[[Any], Any]  # one layer's shards -> its weights

SAVED = "saved"  # the name that blocks give to values which the selective policy keeps


def rematerialized(block: Block, remat: Remat) -> Block:
    """`block` keeping for its backward pass: everything, the named values (matrix products), or its input alone."""
    if remat == "none":
        return block
    keep = jax.checkpoint_policies.save_only_these_names(SAVED) if remat == "selective" else None
    return jax.checkpoint(block, policy=keep, prevent_cse=False)  # type: ignore[no-any-return]


def layer_stack(block: Block, fetch: Fetch, x: jax.Array, shards: Any, context: Any) -> jax.Array:
    """Apply `block` with each layer's weights in turn.

    Args:
      block: one layer; `context` is what all layers see and nothing is differentiated by, `layer` an int32 number.
      fetch: a layer's slice of `shards` -> its weights; differentiable, linear.
      x: activations `[batch, seq, embed]`.
      shards: tree of `[layers, ...]`.
    """
    depth = jax.tree.leaves(shards)[0].shape[0]
    apply = lambda x, weights, context, layer: jax.vjp(lambda x, w: block(x, w, context, layer), x, weights)

    @jax.custom_vjp
    def stack(x: jax.Array, shards: Any, context: Any) -> jax.Array:
        step = lambda x, layer: (block(x, fetch(_slice(shards, layer)), context, layer), None)
        return lax.scan(step, x, jnp.arange(depth))[0]

    def forward(x: jax.Array, shards: Any, context: Any) -> tuple[jax.Array, Any]:
        def step(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            weights = fetch(_slice(shards, layer))
            kept = _depends_on_first(lambda *args: jax.tree.leaves(apply(*args)[1]), x, weights, context, layer)
            y, pullback = apply(x, weights, context, layer)
            return y, [leaf for leaf, keep in zip(jax.tree.leaves(pullback), kept, strict=True) if keep]

        y, saved = lax.scan(step, x, jnp.arange(depth))
        return y, (shards, context, saved)

    def backward(residuals: Any, d_out: jax.Array) -> tuple[jax.Array, Any, None]:
        shards, context, saved = residuals
        anything = jnp.zeros_like(d_out)  # stands for x: every value that depends on it is replaced by the saved one

        def step(d_x: jax.Array, now: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, Any]:
            layer, saved = now
            weights, settle = jax.vjp(fetch, _slice(shards, layer))
            kept = _depends_on_first(lambda *args: jax.tree.leaves(apply(*args)[1]), anything, weights, context, layer)
            again, treedef = jax.tree.flatten(apply(anything, weights, context, layer)[1])
            rest = iter(saved)
            leaves = [next(rest) if keep else leaf for leaf, keep in zip(again, kept, strict=True)]
            d_x, d_weights = jax.tree.unflatten(treedef, leaves)(d_x)
            return d_x, settle(d_weights)[0]

        d_x, d_shards = lax.scan(step, d_out, (jnp.arange(depth), saved), reverse=True)
        return d_x, d_shards, None

    stack.defvjp(forward, backward)
    return stack(x, shards, context)


def _slice(shards: Any, layer: jax.Array) -> Any:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, 0, keepdims=False), shards)


def _depends_on_first(fn: Callable[..., list[jax.Array]], first: jax.Array, *rest: Any) -> list[bool]:
    """For each output of `fn`, whether it depends on the first argument (an equation's outputs on all its inputs)."""
    jaxpr = jax.make_jaxpr(fn)(first, *rest).jaxpr
    tainted = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        if any(v in tainted for v in eqn.invars if not hasattr(v, "val")):
            tainted.update(eqn.outvars)
    return [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]
