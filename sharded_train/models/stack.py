"""The stack of equal layers, forward and backward as explicit passes, each layer's weights fetched when it needs them.

Plain autodiff of a scan keeps whatever the backward pass wants, the gathered weights of every layer among it, which is
all of the memory that ZeRO-3 saves. Here the backward pass gets a layer's weights a second time and keeps from
the forward pass only values that depend on activations. Which of those are kept is the rematerialisation policy's
choice, so that policies and ZeRO know nothing of each other:

    forward     y, pullback = vjp(block)(x, w)                 saved = the leaves of pullback that depend on x
    backward    _, pullback = vjp(block)(anything, w again)    the same tree: `saved` put in its place, it takes d_y

Communication hides behind products in two ways: `Source.ahead` fetches a layer's weights while the layer before is
worked on, and `block.in_halves` works on two halves of the rows, each with collectives of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.in_place import in_place_if
from sharded_train.models.block import Block
from sharded_train.params import Tree

# (gradients of a layer, its place) -> what is summed, and kept
Collect = Callable[[Tree, jax.Array], tuple[Tree, Tree]]
SEEN = "seen"  # beside the gradients of a layer's weights: what was seen, as `Maxima`
Saved = tuple[list[jax.Array], list[jax.Array] | None]  # of layers [layers, ...]; of the last one, if it is by itself


class Maxima(flax.struct.PyTreeNode):
    """Numbers among gradients that are not summed: of several the largest counts."""

    of: Tree

    def max(self, other: Maxima) -> Maxima:
        return Maxima(jax.tree.map(jnp.maximum, self.of, other.of))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a pass takes its weights from: `fetch` makes those of one layer from its slice of `stacked [layers, ...]`.

    What a block is differentiated by is `ready(fetched)`, and `grads` makes the layer's gradients of its cotangents.

    With `ahead` it is called one layer early, so that what it communicates hides behind the layer before. With
    `last_alone` the last layer stands outside of the loop, so that what the head communicates can hide behind it.

    A pass over some of the layers only says which: `depth` of them from `start` on, the first of which is number
    `first` of the model and lies at `place` of what gradients are summed in, and of which only `count` are there, the
    rest being padding that is passed over.
    """

    stacked: Tree
    fetch: Callable[[Tree], Tree] = lambda weights: weights
    ready: Callable[[Tree], Tree] = lambda weights: weights
    grads: Callable[[Tree], Tree] = lambda cotangents: cotangents
    ahead: bool = False
    last_alone: bool = False
    start: jax.Array | int = 0
    place: jax.Array | int = 0
    first: jax.Array | int = 0
    depth: int | None = None  # None: all of `stacked`
    count: jax.Array | None = None  # None: depth

    @property
    def num_layers(self) -> int:
        return int(jax.tree.leaves(self.stacked)[0].shape[0]) if self.depth is None else self.depth

    def at(self, layer: jax.Array | int) -> Tree:
        return self.fetch(layer_of(self.stacked, self.start + layer))

    def all_at_once(self, taken: Callable[[Tree], Tree] = lambda stacked: stacked) -> Source:
        """The weights of all layers, or of those that are `taken`, fetched now."""
        return Source(self.fetch(taken(self.stacked)), ready=self.ready, grads=self.grads)

    def room(self) -> Tree:
        """Zeros `[layers, ...]` for what is fetched."""
        stack = lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape))
        return jax.tree.map(stack, compat.zeros_like(lambda: self.at(0)))


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
    visit = lambda x, weights, layer: (block(x, source.ready(weights), context, source.first + layer, None), None)
    return _upwards(visit, x, source)[0]  # type: ignore[no-any-return]


def forward(
    block: Block, source: Source, x: jax.Array, context: Any, *, first: Tree | None = None, keep: Tree | None = None
) -> Forward:
    """As `run`, for a backward pass to follow.

    `first` are the first layer's weights, where they are at hand; into `keep [layers, ...]` every layer's are written.
    """

    def visit(carry: Any, weights: Tree, layer: jax.Array) -> tuple[Any, list[jax.Array]]:
        x, keep = carry
        args = (x, source.ready(weights), context, source.first + layer, None)
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

    def pull(d_x: jax.Array, weights: Tree, layer: jax.Array, saved: list[jax.Array], beside: Tree) -> tuple[Any, Tree]:
        args = (anything, source.ready(weights), context, source.first + layer, beside)
        again, treedef = jax.tree.flatten(_vjp(block, *args)[1])
        kept, rest = _depends_on_x(block, *args), iter(saved)
        leaves = [next(rest) if keep_it else leaf for leaf, keep_it in zip(again, kept, strict=True)]
        d_x, d_weights = jax.tree.unflatten(treedef, leaves)(d_x)
        return d_x, source.grads(d_weights)

    if saved[1] is None:
        return _downwards(pull, source, saved[0], d_y, sums, collect)
    return _downwards_ahead(pull, source, saved, d_y, sums, collect, last, beside)


def backward_weights(source: Source, kept: Tree, collect: Collect, sums: Tree) -> Tree:
    """`sums` with what `collect(kept of a layer, place)` returns added in place: gradients that were left for later."""

    def step(sums: Tree, now: Any) -> tuple[Tree, None]:
        layer, kept = now
        here = lambda sums: add_at(sums, collect(kept, source.place + layer)[0], source.place + layer)
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

    state: Any = ((carry, first), below)
    if top:  # a run of layers may be of one
        state, _ = lax.scan(step_into, state, jnp.arange(top))
    (carry, weights), below = state
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


Pull = Callable[..., tuple[jax.Array, Tree]]  # (d_y, weights, layer, saved, beside) -> cotangents of x and weights


def _downwards(
    pull: Pull, source: Source, saved: list[jax.Array], d_y: jax.Array, sums: Tree, collect: Collect
) -> Backward:
    """From the last layer to the first, the gradients of each collected as it comes."""

    def visit(carry: tuple[jax.Array, Tree], layer: jax.Array, saved: list[jax.Array]) -> tuple[Any, Tree]:
        d_x, d_weights = pull(carry[0], source.at(layer), layer, saved, None)
        summed, kept = collect(d_weights, source.place + layer)
        return (d_x, add_at(carry[1], summed, source.place + layer)), kept

    def step(carry: tuple[jax.Array, Tree], now: tuple[jax.Array, list[jax.Array]]) -> tuple[Any, Tree]:
        if source.count is None:
            return visit(carry, *now)
        nothing = (carry, compat.zeros_like(lambda: visit(carry, *now))[1])
        return in_place_if(now[0] < source.count, lambda state: visit(state[0], *now), nothing)

    (d_x, sums), kept = lax.scan(step, (d_y, sums), (jnp.arange(source.num_layers), saved), reverse=True)
    return Backward(d_x, sums, kept, None)


def _downwards_ahead(
    pull: Pull,
    source: Source,
    saved: Saved,
    d_y: jax.Array,
    sums: Tree,
    collect: Collect,
    last: Tree | None,
    beside: Tree,
) -> Backward:
    """The same with the last layer alone. While a layer is worked on, the weights of the one below are fetched and the
    gradients of the one above collected: both are there by the middle of the layer, and so begin before.
    """
    (below, at_top), top = saved, source.num_layers - 1
    first = source.at(max(top - 1, 0)) if source.ahead else None
    d_x, above = pull(d_y, source.at(top) if last is None else last, jnp.int32(top), at_top, None)
    # What is beside would wait until the end of the step, were it not to be there before the other layers begin.
    d_x, _ = lax.optimization_barrier((d_x, beside))

    def step(carry: Any, now: tuple[jax.Array, list[jax.Array]]) -> tuple[Any, None]:
        (d_x, above, sums, weights), (layer, saved) = carry, now
        following = source.at(jnp.maximum(layer - 1, 0)) if source.ahead else None
        summed, _ = collect(above, source.place + layer + 1)
        here = weights if source.ahead else source.at(layer)
        d_x, d_weights = pull(d_x, here, layer, saved, (following, summed))
        return (d_x, d_weights, add_at(sums, summed, source.place + layer + 1), following), None

    state = (d_x, above, sums, first)
    if top:
        state, _ = lax.scan(step, state, (jnp.arange(top), below), reverse=True)
    d_x, above, sums, first = state
    summed, kept = collect(above, jnp.int32(source.place))
    assert kept is None, "what is left for later has no place beside layers that are fetched ahead"
    return Backward(d_x, add_at(sums, summed, jnp.int32(source.place)), None, first)


def _vjp(block: Block, x: jax.Array, weights: Tree, *others: Any) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, w: block(x, w, *others), x, weights)  # type: ignore[no-any-return]


@jax.named_scope("gradient_sums")
def add_at(sums: Tree, tree: Tree, layer: jax.Array) -> Tree:
    """`sums [layers, ...]` with a layer's `tree` added, which may lack some of the leaves."""
    if isinstance(tree, dict):
        return {name: add_at(total, tree[name], layer) if name in tree else total for name, total in sums.items()}
    if isinstance(tree, Maxima):
        top = layer_of(sums.of, layer)
        put = lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, layer, 0)
        return Maxima(jax.tree.map(put, sums.of, tree.max(Maxima(top)).of))
    now = lax.dynamic_index_in_dim(sums, layer, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, now + tree, layer, 0)


def _depends_on_x(block: Block, *args: Any) -> list[bool]:
    """For each value that a block's vjp keeps, whether it depends on x, its first argument.

    An equation's outputs are taken to depend on all its inputs.
    """
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(_vjp(block, *args)[1]))(*args).jaxpr
    tainted = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        if any(v in tainted for v in eqn.invars if not hasattr(v, "val")):
            tainted.update(eqn.outvars)
    return [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]
