"""The stack of equal layers, forward and backward as explicit passes, each layer's weights fetched when it needs them.

Plain autodiff of a scan keeps whatever the backward pass wants, the gathered weights of every layer among it, which is
all of the memory that ZeRO-3 saves. Here the backward pass gets a layer's weights a second time and keeps from
the forward pass only values that depend on activations. Which of those are kept is the rematerialisation policy's
choice, so that policies and ZeRO know nothing of each other.

Communication hides behind products in two ways: `Source.ahead` fetches a layer's weights while the layer before is
worked on, and `block.in_halves` works on two halves of the rows, each with collectives of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.in_place import in_place_if
from sharded_train.models.block import Block
from sharded_train.params import Tree

Collect = Callable[
    [Tree, jax.Array], tuple[Tree, Tree]
]  # (gradients of a layer, its place) -> what is summed, and kept
Saved = tuple[list[jax.Array], list[jax.Array] | None]  # of layers [layers, ...]; of the last one, if it is by itself


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a pass takes its weights from: `fetch` makes those of one layer from its slice of `stacked [layers, ...]`.

    With `ahead` it is called one layer early, so that what it communicates hides behind the layer before. With
    `last_alone` the last layer stands outside of the loop, so that what the head communicates can hide behind it.

    A pass over some of the layers only says which: `depth` of them from `start` on, the first of which is number
    `first` of the model, and of which only `count` are there, the rest being padding that is passed over.
    """

    stacked: Tree
    fetch: Callable[[Tree], Tree] = lambda weights: weights
    ahead: bool = False
    last_alone: bool = False
    start: jax.Array | int = 0
    first: jax.Array | int = 0
    depth: int | None = None  # None: all of `stacked`
    count: jax.Array | None = None  # None: depth

    @property
    def num_layers(self) -> int:
        return int(jax.tree.leaves(self.stacked)[0].shape[0]) if self.depth is None else self.depth

    def at(self, layer: jax.Array | int) -> Tree:
        return self.fetch(layer_of(self.stacked, self.start + layer))


class Forward(NamedTuple):
    """What a forward pass leaves behind."""

    y: jax.Array
    saved: Saved  # for the backward pass
    whole: Tree | None  # `keep` with every layer's fetched weights in it
    last: Tree | None  # the last layer's weights, fetched ahead


class Backward(NamedTuple):
    """What a backward pass leaves behind."""

    d_x: jax.Array
    sums: Tree  # [layers, ...]
    kept: Tree  # [layers, ...]
    first: Tree | None  # the first layer's weights, fetched ahead: the next forward pass begins with them


def run(block: Block, source: Source, x: jax.Array, context: Any) -> jax.Array:
    """`block` with each layer's weights in turn on activations `[batch, seq, embed]`, nothing kept.

    `context` is what all layers see and nothing is differentiated by.
    """
    visit = lambda x, weights, layer: (block(x, weights, context, source.first + layer), None)
    return _upwards(visit, x, source)[0]  # type: ignore[no-any-return]


def forward(
    block: Block, source: Source, x: jax.Array, context: Any, *, first: Tree | None = None, keep: Tree | None = None
) -> Forward:
    """As `run`, for a backward pass to follow.

    `first` are the first layer's weights, where they are at hand; into `keep [layers, ...]` every layer's are written.
    """

    def visit(carry: Any, weights: Tree, layer: jax.Array) -> tuple[Any, list[jax.Array]]:
        x, keep = carry
        args = (x, weights, context, source.first + layer)
        (y, pullback), kept = _vjp(block, *args), _depends_on_x(block, *args)
        saved = [leaf for leaf, keep_it in zip(jax.tree.leaves(pullback), kept, strict=True) if keep_it]
        if keep is not None:
            keep = jax.tree.map(lambda a, w: lax.dynamic_update_index_in_dim(a, w, layer, 0), keep, weights)
        return (y, keep), saved

    (y, whole), saved, last = _upwards(visit, (x, keep), source, first)
    return Forward(y, saved, whole, last)


def backward(
    block: Block,
    source: Source,
    saved: Saved,
    d_y: jax.Array,
    context: Any,
    collect: Collect,
    sums: Tree,
    *,
    last: Tree | None = None,
    beside: Tree = None,
) -> Backward:
    """From the last layer to the first, adding in place to `sums [layers, ...]` what `collect` says.

    `last` are the last layer's weights, where they are at hand. What is communicated to make `beside` is hidden behind
    a last layer that stands alone.
    """
    anything = jnp.zeros_like(d_y)  # stands for x: every value that depends on it is replaced by the saved one

    def visit(carry: Any, weights: Tree, layer: jax.Array, saved: list[jax.Array]) -> Any:
        d_x, sums = carry
        args = (anything, weights, context, source.first + layer)
        again, treedef = jax.tree.flatten(_vjp(block, *args)[1])
        kept, rest = _depends_on_x(block, *args), iter(saved)
        leaves = [next(rest) if keep_it else leaf for leaf, keep_it in zip(again, kept, strict=True)]
        d_x, d_weights = jax.tree.unflatten(treedef, leaves)(d_x)
        at = source.start + layer
        summed, kept_of_it = collect(d_weights, at)
        return (d_x, add_at(sums, summed, at)), kept_of_it

    (d_x, sums), kept, first = _downwards(visit, (d_y, sums), source, saved, last, beside)
    return Backward(d_x, sums, kept, first)


def backward_weights(source: Source, kept: Tree, collect: Collect, sums: Tree) -> Tree:
    """`sums` with what `collect(kept of a layer, place)` returns added in place: gradients that were left for later."""

    def step(sums: Tree, now: Any) -> tuple[Tree, None]:
        layer, kept = now
        here = lambda sums: add_at(sums, collect(kept, source.start + layer)[0], source.start + layer)
        return here(sums) if source.count is None else in_place_if(layer < source.count, here, sums), None

    return lax.scan(step, sums, (jnp.arange(source.num_layers), kept))[0]


def layer_of(stacked: Tree, layer: jax.Array | int) -> Tree:
    """One layer's slice of a tree of `[layers, ...]`."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, 0, keepdims=False), stacked)


def _upwards(
    visit: Callable[..., Any], carry: Any, source: Source, first: Tree | None = None
) -> tuple[Any, Saved, Tree | None]:
    """`visit(carry, weights, layer) -> (carry, saved)` from the first layer to the last; also its weights."""
    top = source.num_layers - 1
    assert source.count is None or not (source.ahead or source.last_alone)

    def step(carry: Any, layer: jax.Array) -> tuple[Any, Any]:
        carry, weights = carry
        following = source.at(layer + 1) if source.ahead else None
        here = lambda: visit(carry, weights if source.ahead else source.at(layer), layer)
        pass_over = lambda: (carry, compat.zeros_like(here)[1])
        out, saved = here() if source.count is None else lax.cond(layer < source.count, here, pass_over)
        return (out, following), saved

    if not source.last_alone:
        assert not source.ahead
        (carry, _), saved = lax.scan(step, (carry, None), jnp.arange(top + 1))
        return carry, (saved, None), None
    if source.ahead and first is None:
        first = source.at(0)
    of_one = compat.zeros_like(lambda: visit(carry, source.at(0), jnp.int32(0))[1])
    below = jax.tree.map(lambda x: _zeros_after(carry, (top, *x.shape), x), of_one)

    def step_into(state: Any, layer: jax.Array) -> tuple[Any, None]:
        state, below = state
        state, saved = step(state, layer)
        return (state, jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, layer, 0), below, saved)), None

    ((carry, weights), below), _ = lax.scan(step_into, ((carry, first), below), jnp.arange(top))
    if not source.ahead:
        weights = source.at(top)
    carry, saved = visit(carry, weights, jnp.int32(top))
    return carry, (below, saved), weights


def _zeros_after(others: Tree, shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Zeros that are made when the others are there.

    The buffers of a scan are zeros that depend on nothing: XLA makes them once for the first and the last pass of a
    step, and so keeps them through all the passes between.
    """
    zero = compat.vary(jnp.zeros((), like.dtype), compat.varying_axes(like))
    return jnp.broadcast_to(lax.optimization_barrier((zero, others))[0], shape)


def _downwards(
    visit: Callable[..., Any], carry: Any, source: Source, saved: Saved, last: Tree | None, beside: Tree
) -> tuple[Any, Tree, Tree | None]:
    """`visit(carry, weights, layer, saved) -> (carry, kept)` from the last layer to the first; also its weights."""
    (below, at_top), top = saved, source.num_layers - 1

    def step(carry: Any, now: Any) -> tuple[Any, Tree]:
        (carry, weights), (layer, saved) = carry, now
        following = source.at(jnp.maximum(layer - 1, 0)) if source.ahead else None
        here = lambda carry: visit(carry, weights if source.ahead else source.at(layer), layer, saved)
        if source.count is None:
            out, kept = here(carry)
        else:
            nothing = (carry, compat.zeros_like(here, carry)[1])
            out, kept = in_place_if(layer < source.count, lambda state: here(state[0]), nothing)
        return (out, following), kept

    if at_top is None:
        (carry, _), kept = lax.scan(step, (carry, None), (jnp.arange(top + 1), below), reverse=True)
        return carry, kept, None
    following = source.at(max(top - 1, 0)) if source.ahead else None
    carry, kept = visit(carry, source.at(top) if last is None else last, jnp.int32(top), at_top)
    assert not jax.tree.leaves(kept), "what is kept of a layer that stands alone has no place among the others"
    # What is beside would wait until the end of the step, were it not to be there before the other layers begin.
    d_x, sums = carry
    carry = lax.optimization_barrier((d_x, beside))[0], sums
    (carry, first), _ = lax.scan(step, (carry, following), (jnp.arange(top), below), reverse=True)
    return carry, None, first


def _vjp(block: Block, x: jax.Array, weights: Tree, context: Any, layer: jax.Array) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, w: block(x, w, context, layer), x, weights)  # type: ignore[no-any-return]


@jax.named_scope("gradient_sums")
def add_at(sums: Tree, tree: Tree, layer: jax.Array) -> Tree:
    """`sums [layers, ...]` with a layer's `tree` added, which may lack some of the leaves."""
    if isinstance(tree, dict):
        return {name: add_at(total, tree[name], layer) if name in tree else total for name, total in sums.items()}
    now = lax.dynamic_index_in_dim(sums, layer, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, now + tree, layer, 0)


def _depends_on_x(block: Block, x: jax.Array, weights: Tree, context: Any, layer: jax.Array) -> list[bool]:
    """For each value that a block's vjp keeps, whether it depends on x (an equation's outputs on all its inputs)."""
    fn = lambda *args: jax.tree.leaves(_vjp(block, *args)[1])
    jaxpr = jax.make_jaxpr(fn)(x, weights, context, layer).jaxpr
    tainted = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        if any(v in tainted for v in eqn.invars if not hasattr(v, "val")):
            tainted.update(eqn.outvars)
    return [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]
