"""The model on one device of the mesh: from its shards and its rows to the loss, every part by itself.

Weights and losses that several devices hold parts of meet here in named collectives; `gradients` and `pipeline` put the
parts together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.collectives import TensorParallel, axis_index, index_of
from sharded_train.models import Model, stack
from sharded_train.models.block import Attend, Block, Remat, block_of, in_halves, rematerialized
from sharded_train.models.fp8_layers import STAGES, Fp8Layers
from sharded_train.models.runs import Runs, Spans
from sharded_train.models.stack import Source
from sharded_train.ops import zigzag
from sharded_train.ops.loss import cross_entropy
from sharded_train.params import Tree
from sharded_train.sharding import REPLICA, Plan, is_placement

BATCH_AXES = (REPLICA, "data")  # mesh axes that different rows lie on

Array = Any  # of JAX or NumPy, or the shape of one


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The step and how many of them. Batch sizes are global: they do not change with the mesh."""

    num_steps: int = 1000  # updates in all; schedules end there
    stop_at: int | None = None  # stop and save at this step, the schedule unchanged
    global_batch_size: int = 32  # rows a step
    sequence_length: int = 256  # tokens a row
    num_microbatches: int = 1  # parts each device's rows are worked through in
    seed: int = 0  # of weights, order of samples and dropout
    clip_norm: float | None = 1.0  # of the whole gradient; None: never
    ema_decay: float | None = None  # of averaged weights, which are then the ones evaluated; None: none are kept
    remat: Remat = "none"  # none keeps all for the backward pass, selective the products, full a layer's input alone
    overlap: bool | None = None  # hide communication behind products, for which more is compiled; None: on GPUs
    z_loss: float = 0.0  # weight of log(Z)^2, which keeps logits small
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How attention works over `mesh.sequence` devices, each of which has a part of every row; and on GPUs over
    documents.
    """

    # How, where mesh.sequence > 1; auto: ring or ulysses, whichever sends less.
    context: Literal["auto", "all_gather", "ring", "ulysses"] = "auto"
    # Documents that a row may hold (padding counts as one): the size of cuDNN's table, see `ops.attention`.
    max_documents: int = 64


class Batch(flax.struct.PyTreeNode):
    """Rows of tokens, each array `[rows, seq]` int32."""

    tokens: Array
    targets: Array  # the token to predict at each place; -1: nothing to predict
    segments: Array  # 1, 2, ... per document in the row; 0: padding
    positions: Array  # 0, 1, ... within the document's part of the row


class Loss(flax.struct.PyTreeNode):
    """The loss of a batch, as sums over the tokens of the whole mesh."""

    nll: jax.Array  # nats
    num_tokens: jax.Array  # that had a target


class Microbatch(NamedTuple):
    """What one pass works on."""

    rows: Batch
    numbers: jax.Array  # [rows, seq]: of each token in the global batch


@dataclasses.dataclass(frozen=True)
class Local:
    """The model on one device of the mesh; every method is called inside the manual `jax.shard_map`."""

    model: Model
    plan: Plan
    compute_dtype: jnp.dtype
    attend: Attend
    train: TrainConfig
    overlap: bool
    fp8: Fp8Layers | None = None  # None: no product of training runs in FP8

    # ---- sums over the mesh -------------------------------------------------------------------------------------

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows of a batch are split over, of those with several devices."""
        return tuple(axis for axis in BATCH_AXES if axis in self.plan.axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that the tokens of a batch are split over: its rows, and within them the sequence."""
        return (*self.row_axes, *(axis for axis in ("sequence",) if axis in self.plan.axes))

    def over_tokens(self, x: jax.Array) -> jax.Array:
        """The sum, over all devices, of what differs from token to token."""
        return lax.psum(x, self.token_axes) if self.token_axes else x

    def num_targets(self, batch: Batch) -> jax.Array:
        return self.over_tokens((batch.targets >= 0).sum())

    def global_norm(self, grads: Tree) -> jax.Array:
        """The norm of the whole gradient, each parameter once: leaves summed over the axes that split them."""
        squares: dict[tuple[str, ...], jax.Array] = {}
        for grad in jax.tree.leaves(grads):
            axes = compat.varying_axes(grad)
            squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.sum(grad**2)
        return jnp.sqrt(sum(lax.psum(s, axes) if axes else s for axes, s in squares.items()))

    # ---- weights --------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether weights and gradients move over data layer by layer, hidden behind the products of another layer."""
        return self.overlap and bool(self.token_axes)

    def in_halves(self, rows: int) -> bool:
        """Whether layers work on two halves of so many rows: tensor's collectives hide behind the other half."""
        return self.overlap and "tensor" in self.plan.axes and rows % 2 == 0

    def outer(self, shards: Tree) -> Tree:
        """Gathered weights before and after the layers."""
        shards, names = outside_layers(shards), outside_layers(self.plan.placements)
        return self.plan.gather(shards, names, self.compute_dtype)

    def layers(self, shards: Tree) -> Source:
        """The layers' weights, each gathered when its turn comes, or while the layer before has its."""
        names = self.plan.placements["layers"]
        return self._ahead(Source(shards["layers"], lambda layer: self.plan.gather(layer, names, self.compute_dtype)))

    def kept_layers(self, shards: Tree) -> Source:
        """The same for several passes: gathered once, before them, but under ZeRO 3."""
        layers = self.layers(shards)
        return layers if self.plan.zero.stage == 3 else layers.all_at_once()

    def train_layers(
        self, shards: Tree, scaling: Tree, rows: int, spans: Spans, *, whole: bool = False, halves: bool = True
    ) -> Runs:
        """The same for training on so many rows at once, in runs, see `runs.of_chunk`: in FP8 where the recipe says so,
        by the state's scales.
        """
        found = []
        for span in spans:
            source = self.layers(shards)
            if self.fp8 is not None and span.in_fp8:
                uses = 2 if halves and self.in_halves(rows) else 1
                source = self._ahead(self.fp8.source(shards["layers"], scaling, uses))
            if whole:
                source = source.all_at_once(functools.partial(span.taken, stage=axis_index(STAGES)))
            found.append(span.over(source, taken=whole))
        return tuple(found)

    @property
    def bf16_ends(self) -> tuple[int, int]:
        """How many of the first and of the last layers are not in FP8, under a recipe that is."""
        return (0, 0) if self.fp8 is None else self.fp8.bf16_ends

    def _ahead(self, source: Source) -> Source:
        several = self.streams and self.model.num_layers > 1  # a single one has no neighbour to hide behind
        return dataclasses.replace(source, ahead=several, last_alone=several)

    @property
    def layer_bytes(self) -> int:
        """Of one layer's gathered weights."""
        placements = jax.tree.leaves(self.plan.placements["layers"], is_leaf=is_placement)
        sizes = (math.prod(shape[1:]) for p in placements if (shape := self.plan.local_shape(p.spec.shape, p.gathered)))
        return sum(sizes) * self.compute_dtype.itemsize

    # ---- parts of the model ---------------------------------------------------------------------------------------

    def block(self, rows: int, *, halves: bool = True) -> Block:
        """A layer, for so many rows; without `halves` always on all of them at once."""
        branches = self.model.branches(self.attend, TensorParallel())
        block = (in_halves if halves and self.in_halves(rows) else block_of)(branches)
        return rematerialized(block, self.train.remat)

    def context(self, microbatch: Microbatch, key: jax.Array | None) -> Any:
        rows, numbers = microbatch
        return self.model.context(rows.positions, rows.segments, numbers, key, TensorParallel())

    @functools.cached_property
    def settled_early(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient is complete when the head is done."""
        return tuple(name for name in ("final_norm", "head") if name in self.plan.placements)

    def embed(self, outer: Tree, rows: Batch, ctx: Any) -> jax.Array:
        """`[rows, seq]` tokens -> activations `[rows, seq between blocks, embed]`."""
        with jax.named_scope("embed"):
            return self.model.embed(outer, rows.tokens, rows.positions, ctx, TensorParallel())

    def head(self, outer: Tree, y: jax.Array, rows: Batch) -> tuple[jax.Array, jax.Array]:
        """The last layer's activations -> sums over the rows of the objective and of the negative log-likelihood."""
        train = self.train
        with jax.named_scope("head"):
            y = self.model.final(y, outer, TensorParallel()).reshape(-1, self.model.d_model)
            head, targets = self.model.head(outer), rows.targets.reshape(-1)
            return cross_entropy(y, head, targets, self.model.vocab_size, train.label_smoothing, train.z_loss)

    def token_numbers(self, batch: Batch) -> jax.Array:
        """A number for each token of the global batch, the same however its rows lie on the mesh."""
        (rows, here), ways = batch.tokens.shape, self.plan.sizes["sequence"]
        first = index_of(self.row_axes) * rows
        places = jnp.arange(here)
        if ways > 1:
            places = lax.dynamic_slice_in_dim(
                zigzag.arrange(jnp.arange(here * ways), ways, 0), axis_index("sequence") * here, here
            )
        return (first + jnp.arange(rows)[:, None]) * here * ways + places

    def microbatches(self, batch: Batch) -> Microbatch:
        """The batch in parts, `[microbatch, rows, seq]`."""
        parts, whole = self.train.num_microbatches, Microbatch(batch, self.token_numbers(batch))
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), whole)  # type: ignore[no-any-return]

    # ---- the loss alone -------------------------------------------------------------------------------------------

    def loss(self, shards: Tree, batch: Batch) -> Loss:
        """Of a batch without dropout, in the microbatches of training: what fits there fits here."""
        microbatches, outer = self.microbatches(batch), self.outer(shards)
        num, rows, _ = microbatches.numbers.shape
        layers = self.layers(shards) if num == 1 else self.kept_layers(shards)

        def add(nll: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, None]:
            ctx = self.context(microbatch, None)
            x = self.embed(outer, microbatch.rows, ctx)
            with jax.named_scope("layers"):
                y = stack.run(self.block(rows), layers, x, ctx)
            return nll + self.head(outer, y, microbatch.rows)[1], None

        nll, _ = lax.scan(add, compat.vary(jnp.float32(0), compat.varying_axes(batch.tokens)), microbatches)
        return Loss(self.over_tokens(nll), self.num_targets(batch))


def outside_layers(tree: Tree) -> Tree:
    """What a tree of parameters holds beside the layers."""
    return {name: leaf for name, leaf in tree.items() if name != "layers"}
