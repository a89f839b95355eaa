"""The stack of equal layers, forward and backward as explicit passes, each layer's weights fetched when it needs them.

Plain autodiff of a scan keeps whatever the backward pass wants, the gathered weights of every layer among it, which is
all of the memory that ZeRO-3 saves. Here the backward pass gets a layer's weights a second time and keeps from
the forward pass only values that depend on activations. Which of those are kept is the rematerialisation policy's
choice, so that policies and ZeRO know nothing of each other.

Where fetching means communication it is done one layer ahead: while a layer is worked on, the weights of the next one
travel. A pass leaves over the weights that the next pass begins with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train.params import Tree

Remat = Literal["none", "selective", "full"]
Block = Callable[[jax.Array, Any, Any, jax.Array], jax.Array]  # (x, weights, context, layer) -> x
Collect = Callable[[Tree, jax.Array], Tree]  # (gradients of a layer's weights, layer) -> what is kept of them

SAVED = "saved"  # the name that blocks give to values which the selective policy keeps


def rematerialized(block: Block, remat: Remat) -> Block:
    """`block` keeping for its backward pass: everything, the named values (matrix products), or its input alone."""
    if remat == "none":
        return block
    keep = jax.checkpoint_policies.save_only_these_names(SAVED) if remat == "selective" else None
    return jax.checkpoint(block, policy=keep, prevent_cse=False)  # type: ignore[no-any-return]


def in_halves(block: Block) -> Block:
    """`block` on two halves of the rows, one's collectives hiding behind the other's products."""

    def both(x: jax.Array, weights: Tree, context: Any, layer: jax.Array) -> jax.Array:
        rows = x.shape[0]
        assert rows % 2 == 0, x.shape
        of = lambda a, half: a[half] if a.ndim and a.shape[0] == rows else a  # all but a key is of the rows
        halves = (slice(0, rows // 2), slice(rows // 2, rows))
        parts = [block(x[h], weights, jax.tree.map(lambda a, h=h: of(a, h), context), layer) for h in halves]
        return jnp.concatenate(parts)

    return both


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a pass takes its weights from: `fetch` makes those of one layer from its slice of `stacked [layers, ...]`.

    With `ahead` it is called one layer early, so that what it communicates hides behind the layer before.
    """

    stacked: Tree
    fetch: Callable[[Tree], Tree] = lambda weights: weights
    ahead: bool = False

    @property
    def depth(self) -> int:
        return int(jax.tree.leaves(self.stacked)[0].shape[0])

    def at(self, layer: jax.Array | int) -> Tree:
        return self.fetch(layer_of(self.stacked, layer))


class Forward(NamedTuple):
    """What a forward pass leaves behind."""

    y: jax.Array
    saved: list[jax.Array]  # [layers, ...] each, for the backward pass
    whole: Tree | None  # every layer's fetched weights, if they were to be kept
    ahead: Tree | None  # the last layer's weights, which the backward pass begins with


class Backward(NamedTuple):
    """What a backward pass leaves behind."""

    d_x: jax.Array
    collected: Tree  # [layers, ...]
    ahead: Tree | None  # the first layer's weights, which the next forward pass begins with


def run(block: Block, source: Source, x: jax.Array, context: Any) -> jax.Array:
    """`block` with each layer's weights in turn on activations `[batch, seq, embed]`, nothing kept.

    `context` is what all layers see and nothing is differentiated by.
    """
    visit = lambda x, weights, layer, _: (block(x, weights, context, layer), None)
    return _walk(visit, x, source, None)[0]  # type: ignore[no-any-return]


def forward(
    block: Block, source: Source, x: jax.Array, context: Any, *, first: Tree | None = None, keep: bool = False
) -> Forward:
    """As `run`, for a backward pass to follow. `first` are the first layer's weights, where they are at hand."""

    def visit(x: jax.Array, weights: Tree, layer: jax.Array, _: None) -> tuple[jax.Array, Any]:
        y, pullback = _vjp(block, x, weights, context, layer)
        kept = _depends_on_x(block, x, weights, context, layer)
        saved = [leaf for leaf, keep_it in zip(jax.tree.leaves(pullback), kept, strict=True) if keep_it]
        return y, (saved, weights if keep else None)

    y, (saved, whole), ahead = _walk(visit, x, source, None, first=first)
    return Forward(y, saved, whole, ahead)


def backward(
    block: Block,
    source: Source,
    saved: list[jax.Array],
    d_y: jax.Array,
    context: Any,
    collect: Collect,
    *,
    sums: Tree | None = None,
    first: Tree | None = None,
) -> Backward:
    """From the last layer to the first. What `collect` returns is added to `sums` in place, or stacked where None.

    `first` are the last layer's weights, where they are at hand.
    """
    anything = jnp.zeros_like(d_y)  # stands for x: every value that depends on it is replaced by the saved one

    def visit(carry: Any, weights: Tree, layer: jax.Array, saved: list[jax.Array]) -> tuple[Any, Tree | None]:
        d_x, sums = carry
        again, treedef = jax.tree.flatten(_vjp(block, anything, weights, context, layer)[1])
        kept, rest = _depends_on_x(block, anything, weights, context, layer), iter(saved)
        leaves = [next(rest) if keep_it else leaf for leaf, keep_it in zip(again, kept, strict=True)]
        d_x, d_weights = jax.tree.unflatten(treedef, leaves)(d_x)
        collected = collect(d_weights, layer)
        if sums is None:
            return (d_x, None), collected
        return (d_x, jax.tree.map(lambda s, g: _add_at(s, g, layer), sums, collected)), None

    (d_x, sums), stacked, ahead = _walk(visit, (d_y, sums), source, saved, first=first, reverse=True)
    return Backward(d_x, stacked if sums is None else sums, ahead)


def layer_of(stacked: Tree, layer: jax.Array | int) -> Tree:
    """One layer's slice of a tree of `[layers, ...]`."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, 0, keepdims=False), stacked)


def _walk(
    visit: Callable[..., Any], carry: Any, source: Source, xs: Any, *, first: Tree | None = None, reverse: bool = False
) -> tuple[Any, Any, Tree | None]:
    """Scan `visit(carry, weights, layer, slice of xs) -> (carry, out)` over the layers; also the weights left over."""
    layers = jnp.arange(source.depth)
    if not source.ahead:
        step = lambda carry, now: visit(carry, source.at(now[0]), *now)
        return *lax.scan(step, carry, (layers, xs), reverse=reverse), None

    def step_ahead(carry: Any, now: Any) -> tuple[Any, Any]:
        (carry, weights), (layer, x) = carry, now
        after = jnp.maximum(layer - 1, 0) if reverse else jnp.minimum(layer + 1, source.depth - 1)
        ahead = source.at(after)
        carry, out = visit(carry, weights, layer, x)
        return (carry, ahead), out

    start = source.at(source.depth - 1 if reverse else 0) if first is None else first
    (carry, ahead), out = lax.scan(step_ahead, (carry, start), (layers, xs), reverse=reverse)
    return carry, out, ahead


def _vjp(block: Block, x: jax.Array, weights: Tree, context: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, w: block(x, w, context, layer), x, weights)  # type: ignore[no-any-return]


def _add_at(sums: jax.Array, x: jax.Array, layer: jax.Array) -> jax.Array:
    now = lax.dynamic_index_in_dim(sums, layer, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, now + x, layer, 0)


def _depends_on_x(block: Block, x: jax.Array, weights: Tree, context: Any, layer: jax.Array) -> list[bool]:
    """For each value that a block's vjp keeps, whether it depends on x (an equation's outputs on all its inputs)."""
    fn = lambda *args: jax.tree.leaves(_vjp(block, *args)[1])
    jaxpr = jax.make_jaxpr(fn)(x, weights, context, layer).jaxpr
    tainted = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        if any(v in tainted for v in eqn.invars if not hasattr(v, "val")):
            tainted.update(eqn.outvars)
    return [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]
