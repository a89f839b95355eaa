"""A layer of residual branches, on all rows at once or on two halves of them in turn, and what it keeps of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train.ops.fp8 import Entered, one_use, together
from sharded_train.ops.saved import SAVED
from sharded_train.params import Tree

Remat = Literal["none", "selective", "full"]
Products = tuple[tuple[str, tuple[str, ...]], ...]  # (branch, its weights of one input)
Attend = Callable[..., jax.Array]  # (q, k, v, segments, layer) -> what attention makes of them, like q
Block = Callable[[jax.Array, Any, Any, jax.Array, Any], jax.Array]  # (x, weights, context, layer, beside) -> x


def rematerialized(block: Block, remat: Remat) -> Block:
    """`block` keeping for its backward pass: everything, the named values (matrix products), or its input alone."""
    if remat == "none":
        return block
    keep = jax.checkpoint_policies.save_only_these_names(SAVED) if remat == "selective" else None
    return jax.checkpoint(block, policy=keep, prevent_cse=False)  # type: ignore[no-any-return]


class Branch(NamedTuple):
    """Half a layer, a residual branch: it communicates where it is entered and left, and only works between."""

    normed: Callable[[jax.Array, Tree], jax.Array]  # (x, weights) -> n
    enter: Callable[[jax.Array, Tree], Any]  # (n, weights) -> h
    begin: Callable[[jax.Array, Tree, Any], Any]  # (h, weights, context) -> middle
    end: Callable[[Any, Tree, Any, jax.Array], jax.Array]  # (middle, weights, context, layer) -> y
    leave: Callable[..., jax.Array]  # (x, y, weights, context, layer) -> x


def block_of(branches: Sequence[Branch]) -> Block:
    """A layer of these branches, one after another."""

    def block(x: jax.Array, weights: Tree, context: Any, layer: jax.Array, beside: Tree) -> jax.Array:
        for number, branch in enumerate(branches):
            if number == 1:
                x = _back_after(x, beside)
            middle = branch.begin(branch.enter(branch.normed(x, weights), weights), weights, context)
            x = branch.leave(x, branch.end(middle, weights, context, layer), weights, context, layer)
        return x

    return block


@jax.custom_vjp
def _back_after(x: jax.Array, beside: Tree) -> jax.Array:
    """x; going back, not before what is beside is there.

    That is what is communicated while this layer is worked on. Otherwise jax 0.12 begins with it only when all products
    of the layer have ended.
    """
    return x


_back_after.defvjp(
    lambda x, beside: (x, beside), lambda beside, d_x: (lax.optimization_barrier((d_x, beside))[0], None)
)


def in_halves(branches: Sequence[Branch]) -> Block:
    """The same on two halves of the rows in turn: one leaves its branch while the other begins the work of its own, and
    enters the next while the other ends it.

    Of branches A and B and halves 0 and 1, what is in one column at the same time:

        work               begin A0  end A0    begin A1  end A1    begin B0  end B0    begin B1  end B1
        network  enter A0            enter A1  leave A0  enter B0  leave A1  enter B1  leave B0            leave B1

    The order is forced, and the pullback goes the same way back: otherwise XLA works on both halves alike, and both
    wait for the network at the same time.
    """

    def block(x: jax.Array, weights: Tree, context: Any, layer: jax.Array, beside: Tree) -> jax.Array:
        rows = x.shape[0]
        assert rows % 2 == 0, x.shape
        of = lambda half: lambda a: a[half] if a.ndim and a.shape[0] == rows else a  # all but a key is of the rows
        uses = [one_use(weights, half) for half in (0, 1)]
        halves = (slice(0, rows // 2), slice(rows // 2, rows))
        xs, contexts = [x[half] for half in halves], [jax.tree.map(of(half), context) for half in halves]
        turns = [(branch, i) for branch in branches for i in (0, 1)]
        h, y = branches[0].enter(branches[0].normed(xs[0], uses[0]), uses[0]), None
        for turn, (branch, i) in enumerate(turns):
            middle, other = branch.begin(h, uses[i], contexts[i]), 1 - i
            if y is not None:
                xs[other] = turns[turn - 1][0].leave(xs[other], y, uses[other], contexts[other], layer)
            if turn == 1:
                xs[0] = _back_after(xs[0], beside)
            if turn + 1 < len(turns):
                following = turns[turn + 1][0]
                n, middle = lax.optimization_barrier((following.normed(xs[other], uses[other]), middle))
                h = following.enter(n, uses[other])
            y = branch.end(middle, uses[i], contexts[i], layer)
            if turn + 1 < len(turns):
                h, y = together(h, y) if isinstance(h, Entered) else lax.optimization_barrier((h, y))
        xs[1] = branches[-1].leave(xs[1], y, uses[1], contexts[1], layer)
        return jnp.concatenate(xs)

    return block
