"""The loss and its gradients on one device of the mesh, microbatch by microbatch.

A microbatch is one pass: embedding, layers and head forward, then back, by explicit vjps. ZeRO's stage is where weights
are gathered and gradients settled (reduced to where the shards lie) over `data`. To hide both behind products they
are done layer by layer inside the passes:

| stage | the layers' weights are gathered                 | and their gradients settled                       |
|-------|--------------------------------------------------|---------------------------------------------------|
| 0, 1  | in the first forward pass, and kept (0: nothing) | in the last backward pass, with all passes' sums  |
| 2     | in the first forward pass, and kept              | in every backward pass                            |
| 3     | in every pass, forward and back                  | in every backward pass                            |

Without overlap 0 to 2 gather before the first pass, and 0 and 1 settle after the last, which is less to compile. What
lies outside the layers is gathered at the beginning and settled at the end: of the step, under 3 of every pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_train import compat
from sharded_train.local import Batch, Local, Loss, Microbatch
from sharded_train.models import runs, stack
from sharded_train.models.runs import Runs
from sharded_train.params import Tree
from sharded_train.sharding import Placement, is_placement

FP32 = jnp.dtype(jnp.float32)


class Held(NamedTuple):
    """Weights at hand when a pass begins."""

    outer: Tree | None  # those outside the layers; None: to be gathered
    layers: Runs
    first: Tree | None = None  # the first layer's of each run, where the pass before has left them


class Found(NamedTuple):
    """What the passes of a step find."""

    loss: Loss
    grads: Tree  # of the mean loss, fp32, where the shards lie
    norm: jax.Array  # of the whole gradient
    seen: Tree  # by FP8 products, see `Fp8Layers`; None without


def loss_and_grads(local: Local, shards: Tree, scaling: Tree, batch: Batch, key: jax.Array) -> Found:
    """One forward and backward pass of the batch.

    Gradients of several microbatches are summed in fp32: locally under ZeRO 0 and 1, in their shards under 2 and 3.
    `scaling` is the precision recipe's part of the state.
    """
    num_tokens = local.num_targets(batch)
    microbatches = local.microbatches(batch)
    passes = _Passes(local, shards, scaling, key, num_tokens, microbatches.numbers.shape[1])
    if local.plan.zero.stage == 3:
        nll, grads = passes.gathering_always(microbatches)
    elif local.streams:
        nll, grads = passes.gathering_in_the_first(microbatches)
    else:
        nll, grads = passes.gathering_before(microbatches)
    return outcome(local, shards, scaling, Loss(local.over_tokens(nll), num_tokens), grads)


def outcome(local: Local, shards: Tree, scaling: Tree, loss: Loss, grads: Tree) -> Found:
    """What was found, from gradients with all that was seen among those of the layers."""
    layers, seen = dict(grads["layers"]), None
    if local.fp8 is not None:
        of_weights = local.fp8.weights_seen(shards["layers"], layers_of(scaling))
        seen = joined(local.fp8.over_mesh(layers.pop(stack.SEEN).of), of_weights)
    grads = {**grads, "layers": layers}
    if (scale := loss_scale_of(scaling)) is not None:
        grads = jax.tree.map(lambda grad: grad / scale, grads)
    return Found(loss, grads, local.global_norm(grads), seen)


def divisor(scaling: Tree, num_tokens: jax.Array) -> jax.Array:
    """What the sum over tokens is divided by to be differentiated: it becomes a mean, times fp16's loss scale."""
    tokens, scale = jnp.maximum(num_tokens, 1), loss_scale_of(scaling)
    return tokens if scale is None else tokens / scale


def loss_scale_of(scaling: Tree) -> jax.Array | None:
    """fp16's part of the precision recipe's state: None under other recipes."""
    return None if scaling is None else scaling.get("loss_scale")


def layers_of(scaling: Tree) -> Tree:
    """FP8's part of the precision recipe's state: None where it needs none."""
    return None if scaling is None else scaling.get("layers")


def joined(a: Tree, b: Tree) -> Tree:
    """Two nested dicts in one."""
    if not isinstance(a, dict):
        return a
    return {key: joined(a[key], b[key]) if key in a and key in b else {**b, **a}[key] for key in {**a, **b}}


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The passes of one step, in the order that the stage asks for. All return the loss's sum and the gradients."""

    local: Local
    shards: Tree
    scaling: Tree
    key: jax.Array
    num_tokens: jax.Array
    rows: int  # of each device in a microbatch

    def gathering_always(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 3. Where weights are fetched ahead a pass ends with those that the next one begins with."""
        layers = self._layers()
        held = Held(None, layers, tuple(run.at(0) for run in layers) if layers[0].ahead else None)
        return self._many(held, settled_zeros(self.local), microbatches, settle=True)

    def gathering_before(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 0 to 2 with nothing hidden."""
        plan = self.local.plan
        held = Held(self.local.outer(self.shards), self._layers(whole=True))
        if plan.zero.stage == 2:
            return self._many(held, settled_zeros(self.local), microbatches, settle=True)
        nll, sums = self._many(held, local_zeros(self.local), microbatches, settle=False)
        return nll, plan.settle(sums, self.shards, plan.placements)

    def gathering_in_the_first(self, microbatches: Microbatch) -> tuple[jax.Array, Tree]:
        """ZeRO 0 to 2, layer by layer."""
        plan, m = self.local.plan, self.local.train.num_microbatches
        held = Held(self.local.outer(self.shards), self._layers())
        grads = settled_zeros(self.local)
        if plan.zero.stage == 2 or m == 1:
            first, held, grads = self._one(held, grads, _at(microbatches, 0), keep=True, settle=True)
            rest, grads = self._many(held, grads, _at(microbatches, slice(1, m)), settle=True)
            return first + rest, grads
        first, held, sums = self._one(held, local_zeros(self.local), _at(microbatches, 0), keep=True, settle=False)
        plain = held._replace(layers=tuple(dataclasses.replace(run, last_alone=False) for run in held.layers))
        middle, sums = self._many(plain, sums, _at(microbatches, slice(1, m - 1)), settle=False)
        # Else the last pass could go forward before the others are done, two passes' activations being there at once.
        microbatch, _ = lax.optimization_barrier((_at(microbatches, m - 1), middle))
        last, _, grads = self._one(held, grads, microbatch, settle=True, before=sums)
        return first + middle + last, grads

    def _layers(self, *, whole: bool = False) -> Runs:
        local, num_layers = self.local, self.local.model.num_layers
        spans = runs.spans_of(np.zeros((1, 1), int), np.full((1, 1), num_layers), num_layers, local.bf16_ends)
        found = local.train_layers(self.shards, layers_of(self.scaling), self.rows, spans, whole=whole)
        return tuple(runs.of_chunk(run, 0, 0) for run in found)

    def _many(self, held: Held, sums: Tree, microbatches: Microbatch, *, settle: bool) -> tuple[jax.Array, Tree]:
        """Equal passes one after another, as many as there are microbatches, their gradients added to `sums`."""
        if microbatches.numbers.shape[0] == 0:
            return jnp.float32(0), sums

        def one(carry: Any, microbatch: Microbatch) -> tuple[Any, None]:
            nll, first, sums = carry
            more, after, sums = self._one(held._replace(first=first), sums, microbatch, settle=settle)
            return (nll + more, after.first, sums), None

        zero = compat.vary(jnp.float32(0), compat.varying_axes(microbatches.rows.tokens))
        (nll, _, sums), _ = lax.scan(one, (zero, held.first, sums), microbatches)
        return nll, sums

    def _one(
        self,
        held: Held,
        sums: Tree,
        microbatch: Microbatch,
        *,
        settle: bool,
        before: Tree | None = None,
        keep: bool = False,
    ) -> tuple[jax.Array, Held, Tree]:
        """One microbatch forward and back: its loss's sum, the weights then at hand, and `sums` with its gradients.

        Args:
          settle: the gradients, together with the local sums `before`, are settled before they are added.
          keep: the layers' weights, fetched as this pass goes, serve it and those after it.
        """
        local, rows = self.local, microbatch.rows
        block, ctx = local.block(rows.tokens.shape[0]), local.context(microbatch, self.key)
        outer = local.outer(self.shards) if held.outer is None else held.outer
        x, embed_back = jax.vjp(lambda w: local.embed(w, rows, ctx), outer)
        with jax.named_scope("layers"):
            room = tuple(run.room() for run in held.layers) if keep else None
            up = runs.forward(block, held.layers, x, ctx, first=held.first, keep=room)

        def mean(y: jax.Array, outer: Tree) -> tuple[jax.Array, jax.Array]:
            objective, nll = local.head(outer, y, rows)
            return objective / divisor(self.scaling, self.num_tokens), nll

        (_, nll), (d_y, d_outer) = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)(up.y, outer)
        early = {name: d_outer[name] for name in local.settled_early}
        if up.whole is not None:
            at_hand: Any = {"fetch": lambda weights: weights, "ahead": False, "start": 0}
            kept = zip(held.layers, up.whole, strict=True)
            held = held._replace(layers=tuple(dataclasses.replace(run, stacked=w, **at_hand) for run, w in kept))
        with jax.named_scope("layers"):
            collect = self._collect_layer(settle, before)
            beside = self._collect_outer(settle, before, float32(early))
            down = runs.backward(
                block, held.layers, up.saved, d_y, ctx, collect, sums["layers"], last=up.last, beside=beside
            )
        (d_embed,) = embed_back(down.d_x)
        late = {name: add(float32(d_outer[name]), d_embed[name]) for name in d_outer if name not in early}
        outside = {**beside, **self._collect_outer(settle, before, late)}
        grads = {**add({name: sums[name] for name in outside}, outside), "layers": down.sums}
        return nll, held._replace(first=down.first), grads

    def _collect_layer(self, settle: bool, before: Tree | None) -> stack.Collect:
        """What is summed of one layer's gradients."""
        plan, shards = self.local.plan, self.shards["layers"]
        if not settle:
            return lambda grads, _: (float32(grads), None)

        def collect(grads: Tree, layer: jax.Array) -> tuple[Tree, None]:
            if before is not None:
                grads = add(stack.layer_of({name: before["layers"][name] for name in grads}, layer), grads)
            return plan.settle(grads, stack.layer_of(shards, layer), plan.placements["layers"]), None

        return collect

    def _collect_outer(self, settle: bool, before: Tree | None, grads: Tree) -> Tree:
        """What is summed of gradients outside the layers, some of them or all."""
        if not settle:
            return grads
        plan = self.local.plan
        if before is not None:
            grads = add({name: before[name] for name in grads}, grads)
        return plan.settle(grads, self.shards, plan.placements)


@jax.named_scope("gradient_sums")
def settled_zeros(local: Local) -> Tree:
    """Sums of gradients where the shards lie."""
    return _zeros(local, lambda p: local.plan.zeros(p.spec.shape, p.stored, FP32))


def local_zeros(local: Local) -> Tree:
    """Sums that every device has of its own, shaped as gathered weights."""
    return _zeros(local, lambda p: compat.vary(local.plan.zeros(p.spec.shape, p.gathered, FP32), local.plan.axes))


def _zeros(local: Local, of: Callable[[Placement], jax.Array]) -> Tree:
    sums = jax.tree.map(of, local.plan.placements, is_leaf=is_placement)
    if local.fp8 is not None:
        sums["layers"][stack.SEEN] = local.fp8.nothing_seen()
    return sums


def _at(microbatches: Microbatch, where: int | slice) -> Microbatch:
    return jax.tree.map(lambda a: a[where], microbatches)  # type: ignore[no-any-return]


@jax.named_scope("gradient_sums")
def float32(tree: Tree) -> Tree:
    """Every leaf in fp32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@jax.named_scope("gradient_sums")
def add(sums: Tree, tree: Tree) -> Tree:
    """fp32 sums with a tree of any dtype added."""
    one = lambda s, x: s.max(x) if isinstance(s, stack.Maxima) else s + x.astype(jnp.float32)
    return jax.tree.map(one, sums, tree, is_leaf=lambda s: isinstance(s, stack.Maxima))
