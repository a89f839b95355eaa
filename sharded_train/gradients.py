"""The loss and its gradients on one device of the mesh, microbatch by microbatch.

A microbatch is one pass: embedding, layers and head forward, then back, by explicit vjps. Where weights are gathered
and gradients reduce-scattered over `data` is ZeRO's stage, and both happen layer by layer inside the passes, so that
the network works while the layers are multiplied:

| stage | weights of the layers               | their gradients                                                 |
|-------|-------------------------------------|-----------------------------------------------------------------|
| 0, 1  | gathered in the first forward pass, | summed locally; the last backward pass reduce-scatters the sums |
| 2     | kept for the others                 | every backward pass reduce-scatters its own                     |
| 3     | gathered in every pass              | every backward pass reduce-scatters its own                     |

Weights outside the layers are gathered once a step under 0 to 2, once a microbatch under 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.local import Batch, Local, Loss, Microbatch, outside_layers
from sharded_train.models import stack
from sharded_train.models.stack import Source
from sharded_train.params import Tree


class Held(NamedTuple):
    """Weights at hand when a pass begins."""

    outer: Tree | None  # those outside the layers; None: to be gathered
    layers: Source
    first: Tree | None = None  # the first layer's, where the pass before has left them


def loss_and_grads(local: Local, shards: Tree, batch: Batch, key: jax.Array) -> tuple[Loss, Tree, jax.Array]:
    """The loss, the mean loss's gradients in fp32 where the shards lie, and the norm of the whole gradient.

    Gradients of several microbatches are summed in fp32: locally under ZeRO 0 and 1, in their shards under 2 and 3.
    """
    num_tokens = local.num_targets(batch)
    m = local.train.num_microbatches
    microbatches = Microbatch(batch, local.token_numbers(batch))
    microbatches = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), microbatches)
    passes = _Passes(local, shards, key, num_tokens)
    if local.plan.zero.stage == 3:
        nll, grads = passes.gathering_always(microbatches)
    elif local.streams and local.plan.zero.stage > 0:
        nll, grads = passes.gathering_once(microbatches)
    else:
        nll, grads = passes.gathering_nothing(microbatches)
    return Loss(local.over_rows(nll), num_tokens), grads, local.global_norm(grads)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The passes of one step, in the order that the stage asks for. All return the loss's sum and the gradients."""

    local: Local
    shards: Tree
    key: jax.Array
    num_tokens: jax.Array

    def gathering_always(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 3. A pass ends with the weights of the layer that the next one begins with."""
        layers = self.local.layers(self.shards)
        first = layers.at(0) if layers.ahead else None
        return self._many(Held(None, layers, first), _zeros_like(self.shards), microbatches, settle=True)

    def gathering_once(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 1 and 2: the first pass gathers; under 1 the last one settles, under 2 every one."""
        m, every = self.local.train.num_microbatches, self.local.plan.zero.stage == 2
        held = Held(self.local.outer(self.shards), self.local.layers(self.shards))
        nll, held, sums = self._one(held, None, _at(microbatches, 0), keep=True, settle=every or m == 1)
        if every and m > 1:
            more, grads = self._many(held, sums, _at(microbatches, slice(1, m)), settle=True)
            return nll + more, grads
        return self._settling_last(held, sums, _at(microbatches, slice(1, m)), nll)

    def gathering_nothing(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 0, or one device of data: weights are only cast, once."""
        held = Held(self.local.outer(self.shards), self.local.whole_layers(self.shards))
        if self.local.train.num_microbatches == 1:
            nll, _, grads = self._one(held, None, _at(microbatches, 0), settle=True)
            return nll, grads
        sums = _zeros_like({**held.outer, "layers": held.layers.stacked})  # type: ignore[dict-item]
        if self.local.streams:
            return self._settling_last(held, sums, microbatches, jnp.float32(0))
        nll, sums = self._many(held, sums, microbatches, settle=False)
        return nll, self.local.plan.settle(sums, self.shards, self.local.plan.placements)

    def _settling_last(
        self, held: Held, sums: Tree, microbatches: Microbatch, nll: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """The passes that remain after those that gave `nll` and `sums`; none at all if the sums have settled."""
        remain = microbatches.numbers.shape[0]
        if remain > 1:
            more, sums = self._many(held, sums, _at(microbatches, slice(0, remain - 1)), settle=False)
            nll = nll + more
        if remain > 0:
            more, _, sums = self._one(held, sums, _at(microbatches, -1), settle=True)
            nll = nll + more
        return nll, sums

    def _many(self, held: Held, sums: Tree, microbatches: Microbatch, *, settle: bool) -> tuple[jax.Array, Tree]:
        """Equal passes one after another, their gradients added to `sums`."""

        def add(carry: Any, microbatch: Microbatch) -> tuple[Any, None]:
            nll, first, sums = carry
            more, after, sums = self._one(held._replace(first=first), sums, microbatch, settle=settle)
            return (nll + more, after.first, sums), None

        zero = compat.vary(jnp.float32(0), compat.varying_axes(microbatches.rows.tokens))
        (nll, _, sums), _ = lax.scan(add, (zero, held.first, sums), microbatches)
        return nll, sums

    def _one(
        self, held: Held, sums: Tree | None, microbatch: Microbatch, *, keep: bool = False, settle: bool = False
    ) -> tuple[jax.Array, Held, Tree]:
        """One microbatch forward and back: its loss's sum, the weights then at hand, and `sums` with its gradients.

        Args:
          keep: the layers' weights, gathered as this pass goes, serve it and those after it.
          settle: gradients are reduce-scattered, under ZeRO 0 and 1 with the sums of all passes before.
        """
        local, rows = self.local, microbatch.rows
        ctx = local.context(microbatch, self.key)
        outer = local.outer(self.shards) if held.outer is None else held.outer
        x, embed_back = jax.vjp(lambda w: local.embed(w, rows, ctx), outer)
        with jax.named_scope("layers"):
            ahead = stack.forward(local.block, held.layers, x, ctx, first=held.first, keep=keep)

        def mean(y: jax.Array, outer: Tree) -> tuple[jax.Array, jax.Array]:
            objective, nll = local.head(outer, y, rows)
            return objective / jnp.maximum(self.num_tokens, 1), nll

        (_, nll), (d_y, d_outer) = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)(ahead.y, outer)
        if keep:
            held, ahead = held._replace(layers=Source(ahead.whole)), ahead._replace(ahead=None)
        with jax.named_scope("layers"):
            added, finish = self._layer_sums(sums, settle)
            back = stack.backward(
                local.block, held.layers, ahead.saved, d_y, ctx, finish, sums=added, first=ahead.ahead
            )
        (d_embed,) = embed_back(back.d_x)
        d_outer = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), d_outer, d_embed)
        grads = {**self._outer_sums(sums, d_outer, settle), "layers": back.collected}
        return nll, held._replace(first=back.ahead), grads

    def _layer_sums(self, sums: Tree | None, settle: bool) -> tuple[Tree | None, stack.Collect]:
        """What the layers' gradients are added to as they come, and what is done with each layer's before."""
        local, shards, names = self.local, self.shards["layers"], self.local.plan.placements["layers"]
        before = None if sums is None else sums["layers"]
        if not settle:
            return before, lambda grads, _: _float32(grads)
        if before is not None and local.plan.zero.stage <= 1:
            total = lambda grads, layer: _add(stack.layer_of(before, layer), grads)
            return None, lambda g, i: local.plan.settle(total(g, i), stack.layer_of(shards, i), names)
        return before, lambda g, i: local.plan.settle(g, stack.layer_of(shards, i), names)

    def _outer_sums(self, sums: Tree | None, grads: Tree, settle: bool) -> Tree:
        """The same for weights outside the layers, at once."""
        plan, shards, names = self.local.plan, outside_layers(self.shards), outside_layers(self.local.plan.placements)
        before = None if sums is None else outside_layers(sums)
        if before is not None and (not settle or plan.zero.stage <= 1):
            grads, before = _add(before, grads), None
        if settle:
            grads = plan.settle(grads, shards, names)
        return grads if before is None else _add(before, grads)


def _at(microbatches: Microbatch, where: int | slice) -> Microbatch:
    return jax.tree.map(lambda a: a[where], microbatches)  # type: ignore[no-any-return]


def _float32(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _add(sums: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda s, x: s + x.astype(jnp.float32), sums, tree)


def _zeros_like(tree: Tree) -> Tree:
    """Sums to begin with, fp32, varying over what the tree varies over."""
    return jax.tree.map(lambda w: compat.vary(jnp.zeros(w.shape, jnp.float32), compat.varying_axes(w)), tree)
