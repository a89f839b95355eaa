"""One training step: from a batch and the state to the next state, as one program on the whole mesh.

The loss and its gradients run inside one `jax.shard_map` that is manual over every mesh axis, its replication check
on: what is written here is what the network carries, and autodiff writes the backward collectives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import compat, params
from sharded_train.collectives import TensorParallel, index_of
from sharded_train.models import decoder
from sharded_train.models.stack import Remat, layer_stack, rematerialized
from sharded_train.ops import attention
from sharded_train.ops.loss import cross_entropy
from sharded_train.optimizer import Optimizer, Schedule, learning_rate
from sharded_train.optimizer.state import TrainState, is_slot, slots_of, update
from sharded_train.params import Tree
from sharded_train.precision import PrecisionConfig
from sharded_train.sharding import REPLICA, Plan, ZeroConfig, plan_of, split_data

BATCH_AXES = (REPLICA, "data")  # mesh axes that different rows lie on

Array = Any  # of JAX or NumPy, or the shape of one


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The step and how many of them. Batch sizes are global: they do not change with the mesh."""

    num_steps: int = 1000
    stop_at: int | None = None  # stop and save at this step, the schedule unchanged
    global_batch_size: int = 32  # rows a step
    sequence_length: int = 256  # tokens a row
    num_microbatches: int = 1  # parts each device's rows are worked through in
    seed: int = 0
    clip_norm: float | None = 1.0  # of the whole gradient; None: never
    ema_decay: float | None = None  # of averaged weights, which are then the ones evaluated; None: none are kept
    remat: Remat = "none"
    z_loss: float = 0.0
    label_smoothing: float = 0.0


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


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its placement on a mesh and the compiled functions of a training run."""

    model: decoder.DecoderConfig
    mesh: Mesh
    plan: Plan
    precision: PrecisionConfig
    optimizer: Optimizer
    schedule: Schedule
    train: TrainConfig

    @functools.cached_property
    def specs(self) -> Tree:
        return decoder.param_specs(self.model)

    @functools.cached_property
    def implementation(self) -> Literal["xla", "cudnn"]:
        """Of attention, on this mesh's devices."""
        platform = self.mesh.devices.flat[0].platform
        return attention.choose(self.model.attention, platform, self.model.dim_per_head, self.precision.compute_dtype)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self._rows)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without any array."""

        def place(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

        stored = params.tree_map(lambda w, at: place(w.shape, jnp.float32, at), self.specs, self.plan.stored)
        slots = slots_of(self.optimizer, self.plan)
        opt_state = jax.tree.map(lambda s: place(s.shape, s.dtype, s.stored), slots, is_leaf=is_slot)
        ema = None if self.train.ema_decay is None else stored
        return TrainState(place((), jnp.int32, P()), stored, opt_state, ema)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows of a batch are split over, of those with several devices."""
        return tuple(axis for axis in BATCH_AXES if axis in self.plan.axes)

    @property
    def _rows(self) -> P:
        """The spec of a batch; an axis of one device is not named, so that nothing is taken to differ over it."""
        return P(self.row_axes or None)

    @property
    def abstract_batch(self) -> Batch:
        shape = (self.train.global_batch_size, self.train.sequence_length)
        rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return Batch(rows, rows, rows, rows)

    def init(self, seed: int) -> TrainState:
        """The state before the first step, each device making its own shards; the same numbers on any mesh."""

        def make(key: jax.Array) -> TrainState:
            weights = params.initialize(self.specs, key)
            opt_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract_state.opt_state)
            ema = None if self.train.ema_decay is None else weights
            return TrainState(jnp.int32(0), weights, opt_state, ema)

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        # Run once: LLVM's optimiser would take five times as long over the random numbers as it could save.
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(jax.random.key(seed))

    @functools.cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """(state, batch) -> (next state, metrics); the state's buffers are given up for the next one's."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        replicated = NamedSharding(self.mesh, P())
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=(shardings, replicated))

    @functools.cached_property
    def eval_step(self) -> Callable[[Tree, Batch, jax.Array], tuple[Loss, jax.Array]]:
        """(params, batch, bytes per token id) -> the loss, and the bytes that the predicted tokens stand for."""

        def local(shards: Tree, batch: Batch, token_bytes: jax.Array) -> tuple[Loss, jax.Array]:
            weights = self.weights(shards)
            _, nll = self._sums(weights, batch, self._token_numbers(batch), None)
            bytes_ = jnp.where(batch.targets >= 0, token_bytes[batch.targets], 0).sum()
            return Loss(self._over_rows(nll), self._num_targets(batch)), self._over_rows(bytes_)

        return jax.jit(self._on_mesh(local, (self.plan.stored, self._rows, P()), P()))

    @functools.cached_property
    def is_finite(self) -> Callable[[Tree], jax.Array]:
        """Whether every number of a tree is finite."""
        return jax.jit(lambda tree: jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all())

    @functools.cached_property
    def loss_and_grads(self) -> Callable[[Tree, Batch, jax.Array], tuple[Loss, Tree, jax.Array]]:
        """(params, batch, key) -> loss, gradients of the mean loss where the params lie, their global norm."""
        in_specs = (self.plan.stored, self._rows, P())
        return self._on_mesh(self._loss_and_grads, in_specs, (P(), self.plan.stored, P()))

    @functools.cached_property
    def update(self) -> Callable[[TrainState, Tree, jax.Array], TrainState]:
        """(state, gradients where the params lie, learning rate) -> the next state."""
        placed = jax.tree.map(lambda x: x.sharding.spec, self.abstract_state)
        local = functools.partial(update, self.optimizer, self.plan, self.train.ema_decay)
        return self._on_mesh(local, (placed, self.plan.stored, P()), placed)

    @functools.cached_property
    def learning_rate(self) -> Callable[[jax.typing.ArrayLike], jax.Array]:
        return learning_rate(self.schedule, self.train.num_steps)

    # ---- the step -----------------------------------------------------------------------------------------------

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(self.train.seed), state.step)
        loss, grads, norm = self.loss_and_grads(state.params, batch, key)
        if self.train.clip_norm is not None:
            scale = jnp.minimum(1, self.train.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        rate = self.learning_rate(state.step)
        metrics = {
            "loss": loss.nll / jnp.maximum(loss.num_tokens, 1),
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": loss.num_tokens,
        }
        return self.update(state, grads, rate), metrics

    # ---- inside shard_map: this device's shards and rows ----------------------------------------------------------

    def _loss_and_grads(self, shards: Tree, batch: Batch, key: jax.Array) -> tuple[Loss, Tree, jax.Array]:
        """Gradients are summed over microbatches in fp32: locally under ZeRO 0 and 1, in their shards under 2 and 3."""
        stage, names = self.plan.zero.stage, self.plan.placements
        num_tokens = self._num_targets(batch)
        weights = self.weights(shards)
        settle = lambda grads: self.plan.settle(grads, shards, names)

        def of(microbatch: Batch, numbers: jax.Array) -> tuple[jax.Array, Tree]:
            def mean(weights: Tree) -> tuple[jax.Array, jax.Array]:
                objective, nll = self._sums(weights, microbatch, numbers, key)
                return objective / jnp.maximum(num_tokens, 1), nll

            (_, nll), grads = jax.value_and_grad(mean, has_aux=True)(weights)
            return nll, settle(grads) if stage == 2 else grads

        rows = (batch, self._token_numbers(batch))
        if self.train.num_microbatches == 1:
            nll, grads = of(*rows)
        else:
            nll, grads = self._accumulated(of, rows, weights if stage <= 1 else shards)
        if stage <= 1:
            grads = settle(grads)
        return Loss(self._over_rows(nll), num_tokens), grads, self._global_norm(grads)

    def _accumulated(self, of: Callable[..., tuple[jax.Array, Tree]], rows: Any, like: Tree) -> tuple[jax.Array, Tree]:
        """The sums of `of` over microbatches, each an equal part of this device's rows; gradients shaped `like`."""
        m = self.train.num_microbatches
        microbatches = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), rows)

        def add(sums: tuple[jax.Array, Tree], microbatch: Any) -> tuple[tuple[jax.Array, Tree], None]:
            nll, grads = of(*microbatch)
            return (sums[0] + nll, jax.tree.map(lambda a, g: a + g.astype(jnp.float32), sums[1], grads)), None

        zeros = jax.tree.map(lambda w: compat.vary(jnp.zeros(w.shape, jnp.float32), compat.varying_axes(w)), like)
        zero = compat.vary(jnp.float32(0), compat.varying_axes(rows[0].tokens))
        return lax.scan(add, (zero, zeros), microbatches)[0]

    def weights(self, shards: Tree) -> Tree:
        """What the loss is differentiated by: weights gathered once, or under ZeRO-3 the shards themselves."""
        if self.plan.zero.stage == 3:
            return shards
        return self.plan.gather(shards, self.plan.placements, self.precision.compute_dtype)

    def fetch(self, shards: Tree, names: Tree) -> Tree:
        """Weights where they are used: gathered here under ZeRO-3, before that long ago."""
        if self.plan.zero.stage < 3:
            return shards
        return self.plan.gather_in_autodiff(shards, names, self.precision.compute_dtype)

    def outside_layers(self, weights: Tree) -> Tree:
        """Weights before and after the layers, where they are used."""
        names = self.plan.placements
        return {name: self.fetch(weights[name], names[name]) for name in weights if name != "layers"}

    def _sums(
        self, weights: Tree, batch: Batch, numbers: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sums over this device's rows of the objective and of the negative log-likelihood."""
        model, names, tp = self.model, self.plan.placements, TensorParallel()
        outer = self.outside_layers(weights)
        ctx = decoder.context(model, batch.positions, batch.segments, numbers, key)
        block = rematerialized(functools.partial(decoder.block, model, self.implementation), self.train.remat)
        with jax.named_scope("embed"):
            x = decoder.embed(model, outer, batch.tokens, batch.positions, ctx, tp)
        with jax.named_scope("layers"):
            x = layer_stack(block, lambda w: self.fetch(w, names["layers"]), x, weights["layers"], ctx)
        with jax.named_scope("head"):
            x = decoder.final(model, x, outer, tp).reshape(-1, model.d_model)
            head, targets = decoder.head(model, outer), batch.targets.reshape(-1)
            return cross_entropy(x, head, targets, model.vocab_size, self.train.label_smoothing, self.train.z_loss)

    def _token_numbers(self, batch: Batch) -> jax.Array:
        """A number for each token of the global batch, the same however its rows lie on the mesh."""
        rows, seq = batch.tokens.shape
        first = index_of(self.row_axes) * rows
        return (first + jnp.arange(rows)[:, None]) * seq + jnp.arange(seq)

    def _over_rows(self, x: jax.Array) -> jax.Array:
        """The sum, over all devices, of what differs from row to row."""
        return lax.psum(x, self.row_axes) if self.row_axes else x

    def _num_targets(self, batch: Batch) -> jax.Array:
        return self._over_rows((batch.targets >= 0).sum())

    def _global_norm(self, grads: Tree) -> jax.Array:
        """The norm of the whole gradient, each parameter once: leaves summed over the axes that split them."""
        squares: dict[tuple[str, ...], jax.Array] = {}
        for grad in jax.tree.leaves(grads):
            axes = compat.varying_axes(grad)
            squares[axes] = squares.get(axes, jnp.float32(0)) + jnp.sum(grad**2)
        return jnp.sqrt(sum(lax.psum(s, axes) if axes else s for axes, s in squares.items()))

    # ---- plumbing -------------------------------------------------------------------------------------------------

    def _on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


def build_program(
    model: decoder.DecoderConfig,
    mesh: Mesh,
    *,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    optimizer: Optimizer,
    schedule: Schedule,
    train: TrainConfig,
) -> Program:
    """The program of a checked recipe on a mesh; nothing is compiled before it is called."""
    mesh = split_data(mesh, zero.group_size)
    plan = plan_of(decoder.param_specs(model), dict(mesh.shape), zero)
    return Program(model, mesh, plan, precision, optimizer, schedule, train)
