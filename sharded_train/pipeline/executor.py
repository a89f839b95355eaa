"""Runs a schedule's table: one program for all stages, inside the manual `jax.shard_map`.

The step is a scan over ticks (`schedules.table`). In each a device receives what its neighbours sent, does the forward
and the backward that the table gives its stage, and sends on. A stage passes over what it has nothing of
(`in_place_if`): all devices of a tensor or data group are of one stage and pass over the same, so that their
collectives may stand inside of it; collectives over `pipeline` stand outside.

What waits lies in buffers as large as the most that the schedule ever holds, not as the number of microbatches.
Gradients are summed where they arise: under ZeRO 0 and 1 whole, in fp32, and settled once after the last tick; under
2 and 3 the layers' in every backward. Weights outside the layers are gathered before the first tick and their
gradients settled after the last, under every stage of ZeRO: they belong to all stages.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_train import compat
from sharded_train.collectives import axis_index
from sharded_train.gradients import (
    FP32,
    Found,
    add,
    divisor,
    float32,
    layers_of,
    local_zeros,
    outcome,
    settled_zeros,
)
from sharded_train.in_place import in_place_if
from sharded_train.local import Batch, Local, Loss, Microbatch, outside_layers
from sharded_train.models import deferring, runs, stack
from sharded_train.models.block import Block
from sharded_train.models.runs import Runs
from sharded_train.models.stack import Source
from sharded_train.params import Tree
from sharded_train.pipeline.stages import Pipeline
from sharded_train.pipeline.tables import AXIS, Now, buffer, get, put, tables
from sharded_train.sharding import is_placement


class Carry(NamedTuple):
    """What a stage has between ticks. Buffers are `[slots + 1, ...]`; what is written nowhere goes to the last one."""

    inputs: jax.Array
    saved: Tree  # of each forward, for its backward: what the layers save, and their output
    cotangents: jax.Array
    kept: Tree  # of each backward of inputs, for that of the weights; None where both are done in one go
    sent_on: jax.Array  # by the stage before: its output
    d_x: jax.Array  # to be sent to the stage before, beside the next forward
    sums: Tree
    nll: jax.Array


def loss_and_grads(local: Local, pipe: Pipeline, shards: Tree, scaling: Tree, batch: Batch, key: jax.Array) -> Found:
    """As `gradients.loss_and_grads`, over the stages of a pipeline."""
    num_tokens = local.num_targets(batch)
    layers = _train_layers(local, pipe, shards, layers_of(scaling), batch)
    stage = _Stage.of(local, pipe, shards, layers, batch, key, divisor(scaling, num_tokens))
    carry, _ = lax.scan(stage.tick, stage.start(), tables(pipe, stage.number))
    plan, sums = local.plan, carry.sums
    grads = plan.settle(sums if plan.zero.stage <= 1 else outside_layers(sums), shards, plan.placements)
    summed = Loss(local.over_tokens(lax.psum(carry.nll, AXIS)), num_tokens)
    return outcome(local, shards, scaling, summed, {**sums, **grads})


def loss(local: Local, pipe: Pipeline, shards: Tree, batch: Batch) -> Loss:
    """As `Local.loss`: the forward half of the same table."""
    num_tokens = local.num_targets(batch)
    layers = tuple(span.over(local.kept_layers(shards), taken=True) for span in pipe.spans((0, 0)))
    stage = _Stage.of(local, pipe, shards, layers, batch, None, jnp.maximum(num_tokens, 1))
    x = stage.nothing()

    def tick(carry: Any, now: Now) -> tuple[Any, None]:
        inputs, sent_on, nll = carry
        inputs = put(inputs, sent_on, now.arriving_input)

        def forward() -> tuple[jax.Array, jax.Array]:
            work = stage.work(now.forward)
            x = stage.input_of(work, inputs, now.forward_input)
            y = stack.run(stage.block, work.layers[0], x, work.context)
            one = lambda: local.head(stage.outer, y, work.microbatch.rows)[1]
            return y, lax.cond(work.last, one, lambda: compat.zeros_like(one))

        y, more = lax.cond(now.forward >= 0, forward, lambda: compat.zeros_like(forward))
        return (inputs, stage.send(y, 1), nll + more), None

    ticks = 1 + int(np.flatnonzero((pipe.schedule.forward >= 0).any(1))[-1])
    first = jax.tree.map(lambda table: table[:ticks], tables(pipe, stage.number))
    (_, _, nll), _ = lax.scan(tick, (buffer(x, pipe.slots.num_inputs), x, stage.zero_nll()), first)
    return Loss(local.over_tokens(lax.psum(nll, AXIS)), num_tokens)


def _train_layers(local: Local, pipe: Pipeline, shards: Tree, scaling: Tree, batch: Batch) -> Runs:
    """The layers' weights, those whose gradients wait made ready for that."""
    rows, whole = batch.tokens.shape[0] // local.train.num_microbatches, local.plan.zero.stage < 3
    spans = pipe.spans(local.bf16_ends)
    layers = local.train_layers(shards, scaling, rows, spans, whole=whole, halves=not pipe.defers)

    def deferring_(run: Source) -> Source:
        tokens = rows * batch.tokens.shape[1]
        defer = lambda w: deferring.defer(local.model, run.ready(w), tokens, local.plan.axes)
        return dataclasses.replace(run, ready=defer)

    return tuple(map(deferring_, layers)) if pipe.defers else layers


class Work(NamedTuple):
    """One item of the table: a microbatch and a chunk."""

    microbatch: Microbatch
    context: Any
    layers: Runs
    first: jax.Array  # whether it is the model's first chunk
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class _Stage:
    """One device's stage, for one step."""

    local: Local
    pipe: Pipeline
    shards: Tree
    outer: Tree  # gathered
    layers: Runs  # placed; all chunks of this stage
    microbatches: Microbatch  # [microbatch, ...]
    key: jax.Array | None
    divisor: jax.Array  # of the sum over tokens, see `gradients.divisor`
    number: jax.Array | int  # which stage

    @classmethod
    def of(
        cls, local: Local, pipe: Pipeline, shards: Tree, layers: Runs, batch: Batch, key: Any, divisor: jax.Array
    ) -> _Stage:
        layers = tuple(dataclasses.replace(run, ahead=False, last_alone=False) for run in layers)
        outer, microbatches = local.outer(shards), local.microbatches(batch)
        return cls(local, pipe, shards, outer, layers, microbatches, key, divisor, axis_index(AXIS))

    @property
    def block(self) -> Block:
        return self.local.block(self.microbatches.numbers.shape[1], halves=not self.pipe.defers)

    # ---- tables and buffers -----------------------------------------------------------------------------------------

    def nothing(self) -> jax.Array:
        """Activations of a microbatch between stages, zero."""
        _, rows, seq = self.microbatches.numbers.shape
        shape = (rows, seq // self.local.plan.sizes["tensor"], self.local.model.d_model)
        return compat.vary(jnp.zeros(shape, self.local.compute_dtype), self.local.plan.axes)

    def zero_nll(self) -> jax.Array:
        return compat.vary(jnp.float32(0), [axis for axis in self.local.plan.axes if axis != "tensor"])

    def start(self) -> Carry:
        x, slots, plan = self.nothing(), self.pipe.slots, self.local.plan
        inputs = buffer(x, slots.num_inputs)
        zero = compat.vary(jnp.int32(0), (AXIS,))
        saved = compat.zeros_like(lambda: self.forward(zero, zero, inputs)[1])
        whole = local_zeros(self.local)
        layers = whole["layers"] if plan.zero.stage <= 1 else settled_zeros(self.local)["layers"]
        sums, nll = {**whole, "layers": layers}, self.zero_nll()
        saved = buffer(saved, slots.num_inputs)
        cotangents, kept = buffer(x, slots.num_cotangents), None
        if self.pipe.defers:
            now = Now(*[zero] * len(Now._fields))
            kept = compat.zeros_like(lambda: self.backward(now, saved, cotangents, sums, nll))[1]
            kept = buffer(kept, slots.num_kept)
        return Carry(inputs, saved, cotangents, kept, x, x, sums, nll)

    # ---- one tick ---------------------------------------------------------------------------------------------------

    def tick(self, carry: Carry, now: Now) -> tuple[Carry, None]:
        inputs = put(carry.inputs, carry.sent_on, now.arriving_input)
        cotangents = put(carry.cotangents, self.send(carry.d_x, -1), now.arriving_cotangent)

        def forward(state: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            y, saved = self.forward(now.forward, now.forward_input, inputs)
            return y, put(state[1], saved, now.forward_input)

        y, saved = in_place_if(now.forward >= 0, forward, (self.nothing(), carry.saved))

        def backward(state: Any) -> tuple[jax.Array, Tree, Tree, jax.Array]:
            _, kept, sums, nll = state
            d_x, deferred, sums, nll = self.backward(now, saved, cotangents, sums, nll)
            return d_x, put(kept, deferred, now.backward_kept), sums, nll

        state = (self.nothing(), carry.kept, carry.sums, carry.nll)
        d_x, kept, sums, nll = in_place_if(now.backward >= 0, backward, state)
        if self.pipe.defers:
            sums = in_place_if(now.weights >= 0, lambda sums: self.weights(now, kept, sums), sums)
        return Carry(inputs, saved, cotangents, kept, self.send(y, 1), d_x, sums, nll), None

    def work(self, item: jax.Array) -> Work:
        pipe, v = self.pipe, self.pipe.num_chunks
        chunk = item % v
        microbatch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, item // v, 0, False), self.microbatches)
        layers = tuple(runs.of_chunk(run, self.number, chunk) for run in self.layers)
        first, last = (self.number == 0) & (chunk == 0), (self.number == pipe.num_stages - 1) & (chunk == v - 1)
        return Work(microbatch, self.local.context(microbatch, self.key), layers, first, last)

    def input_of(self, work: Work, inputs: jax.Array, slot: jax.Array) -> jax.Array:
        """The embedding, or what the stage before has sent."""
        embed = lambda: self.local.embed(self.outer, work.microbatch.rows, work.context)
        return lax.cond(work.first, embed, lambda: get(inputs, slot))  # type: ignore[no-any-return]

    def forward(self, item: jax.Array, slot: jax.Array, inputs: jax.Array) -> tuple[jax.Array, Tree]:
        """The output of the item's chunk, and what its backward needs."""
        work = self.work(item)
        x = self.input_of(work, inputs, slot)
        with jax.named_scope("layers"):
            up = runs.forward(self.block, work.layers, x, work.context)
        return up.y, (up.saved, up.y)

    def backward(
        self, now: Now, saved: Tree, cotangents: jax.Array, sums: Tree, nll: jax.Array
    ) -> tuple[jax.Array, Tree, Tree, jax.Array]:
        """The cotangent of the input of the item's chunk, what is left for later; the sums with gradients and loss."""
        local, work = self.local, self.work(now.backward)
        kept, y = get(saved, now.backward_input)
        outside = outside_layers(sums)

        def head(state: tuple[jax.Array, Tree, jax.Array]) -> tuple[jax.Array, Tree, jax.Array]:
            _, outside, nll = state

            def mean(y: jax.Array, outer: Tree) -> tuple[jax.Array, jax.Array]:
                objective, nll = local.head(outer, y, work.microbatch.rows)
                return objective / self.divisor, nll

            (_, more), (d_y, d_outer) = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)(y, self.outer)
            return d_y, add(outside, d_outer), nll + more

        received = get(cotangents, now.backward_cotangent)
        d_y, outside, nll = in_place_if(work.last, head, (received, outside, nll))
        with jax.named_scope("layers"):
            down = runs.backward(self.block, work.layers, kept, d_y, work.context, self.collect, sums["layers"])

        def embed_back(outside: Tree) -> Tree:
            embed = lambda outer: local.embed(outer, work.microbatch.rows, work.context)
            (d_outer,) = jax.vjp(embed, self.outer)[1](down.d_x)
            return add(outside, d_outer)

        outside = in_place_if(work.first, embed_back, outside)
        return down.d_x, down.kept, {**outside, "layers": down.sums}, nll

    def weights(self, now: Now, kept: Tree, sums: Tree) -> Tree:
        """The sums with the gradients that the item's backward left for later."""
        plan = self.local.plan
        shape = lambda p: jax.ShapeDtypeStruct(plan.local_shape(p.spec.shape, p.gathered)[1:], FP32)
        like = jax.tree.map(shape, plan.placements["layers"], is_leaf=is_placement)
        kept = get(kept, now.weights_kept)
        model, layers = self.local.model, self.work(now.weights).layers

        def collect(kept: Tree, place: jax.Array) -> tuple[Tree, None]:
            return self.summed(deferring.deferred_gradients(model, kept, like), place), None

        with jax.named_scope("weights_later"):
            return {**sums, "layers": runs.backward_weights(layers, kept, collect, sums["layers"])}

    def collect(self, grads: Tree, place: jax.Array) -> tuple[Tree, Tree]:
        """What is summed of one layer's gradients, and what is left for later."""
        if not self.pipe.defers:
            return self.summed(grads, place), None
        seen = {stack.SEEN: grads[stack.SEEN]} if stack.SEEN in grads else {}
        there, deferred = deferring.later(self.local.model, {b: grads[b] for b in grads if b not in seen})
        return self.summed({**there, **seen}, place), deferred

    def summed(self, grads: Tree, place: jax.Array) -> Tree:
        """What is summed of gradients of a layer, some or all."""
        plan = self.local.plan
        if plan.zero.stage <= 1:
            return float32(grads)
        return plan.settle(grads, stack.layer_of(self.shards["layers"], place), plan.placements["layers"])

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """To the next stage, or the one before; round the end of the ring only where a stage has several chunks."""
        p = self.pipe.num_stages
        pairs = [(i, (i + by) % p) for i in range(p) if self.pipe.num_chunks > 1 or 0 <= i + by < p]
        return lax.ppermute(x, AXIS, pairs)
