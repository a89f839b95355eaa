"""One training step: from a batch and the state to the next state, as one program on the whole mesh.

The loss and its gradients run inside one `jax.shard_map` that is manual over every mesh axis, its replication check
on: what is written here is what the network carries, and autodiff writes the backward collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import gpu_flags, params
from sharded_train.attending import Attending
from sharded_train.gradients import Found, loss_and_grads
from sharded_train.in_order import in_order
from sharded_train.links import Link, links
from sharded_train.local import AttentionConfig, Batch, Local, Loss, TrainConfig
from sharded_train.model_order import ModelOrder
from sharded_train.models import Model
from sharded_train.models.fp8_layers import Fp8Layers, fp8_layers
from sharded_train.ops import zigzag
from sharded_train.optimizer import Optimizer, Schedule, learning_rate
from sharded_train.optimizer.state import TrainState, is_slot, slots_of, update
from sharded_train.params import Tree
from sharded_train.pipeline import Pipeline, PipelineConfig, executor, pipeline_of
from sharded_train.precision import PrecisionConfig
from sharded_train.scaling import fp8_of, fresh, moved_on, told
from sharded_train.sharding import Plan, ZeroConfig, is_placement, plan_of, rows_only, split_data


@dataclasses.dataclass(frozen=True)
class Program(ModelOrder):
    """A model, its placement on a mesh and the compiled functions of a training run."""

    model: Model
    mesh: Mesh
    plan: Plan
    precision: PrecisionConfig
    optimizer: Optimizer
    schedule: Schedule
    train: TrainConfig
    pipe: Pipeline | None  # None: one stage
    attention: AttentionConfig

    @functools.cached_property
    def specs(self) -> Tree:
        """The model's parameters; over a pipeline the state has its layers in another order: `pipeline.stages`."""
        return self.model.param_specs()

    @functools.cached_property
    def attending(self) -> Attending:
        """Which attention it has on this mesh's devices."""
        return self.attending_on(self.platform, links(self.mesh.devices, self.mesh.axis_names)["sequence"])

    def attending_on(self, platform: str, link: Link) -> Attending:
        """The same where the mesh's devices are not there: their platform, and what the sequence axis runs over."""
        length, dtype = self.train.sequence_length, self.precision.compute_dtype
        return Attending(self.model, self.attention, length, dtype, self.plan.sizes, platform, link)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self._rows)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without any array."""
        return self._abstract(self.plan)

    def _abstract(self, plan: Plan) -> TrainState:
        def place(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

        stored = jax.tree.map(
            lambda p: place(p.spec.shape, jnp.float32, p.stored), plan.placements, is_leaf=is_placement
        )
        slots = slots_of(self.optimizer, plan)
        opt_state = jax.tree.map(lambda s: place(s.shape, s.dtype, s.stored), slots, is_leaf=is_slot)
        ema = None if self.train.ema_decay is None else stored
        scaling = jax.eval_shape(lambda: fresh(self.precision, self.fp8, plan.num_layers))
        lies = lambda x: place(x.shape, x.dtype, P(*[plan.stack_axis][: x.ndim]))
        count = place((), jnp.int32, P())
        return TrainState(count, stored, opt_state, ema, jax.tree.map(lies, scaling), count)

    @functools.cached_property
    def local(self) -> Local:
        """What one device computes; its methods are for inside `jax.shard_map`."""
        dtype = self.precision.compute_dtype
        overlap = self.platform == "gpu" if self.train.overlap is None else self.train.overlap
        return Local(self.model, self.plan, dtype, self.attending.attend, self.train, overlap, self.fp8)

    @functools.cached_property
    def fp8(self) -> Fp8Layers | None:
        """The products that train in FP8; None under other recipes."""
        how = fp8_of(self.precision)
        order = range(self.model.num_layers) if self.pipe is None else self.pipe.order.tolist()
        return None if how is None else fp8_layers(self.model, self.plan, how, self.precision, order)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform  # type: ignore[no-any-return]

    @property
    def _rows(self) -> P:
        """The spec of a batch; an axis of one device is not named, so that nothing is taken to differ over it."""
        return P(self.local.row_axes or None, "sequence" if "sequence" in self.plan.axes else None)

    @property
    def token_order(self) -> np.ndarray:
        """Which token of a row lies at each place of a batch: over the sequence axis they are arranged in a zigzag."""
        length, ways = self.train.sequence_length, self.plan.sizes["sequence"]
        return zigzag.arrange(np.arange(length), ways, 0) if ways > 1 else np.arange(length)

    @property
    def abstract_batch(self) -> Batch:
        shape = (self.train.global_batch_size, self.train.sequence_length)
        rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return Batch(rows, rows, rows, rows)

    def init(self, seed: int) -> TrainState:
        """The state before the first step, each device making its own shards; the same numbers on any mesh."""

        def make(key: jax.Array) -> TrainState:
            weights = params.initialize(self.specs, key, None if self.pipe is None else self.pipe.order)
            opt_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract_state.opt_state)
            ema = None if self.train.ema_decay is None else weights
            return TrainState(jnp.int32(0), weights, opt_state, ema, self.fresh_scaling(), jnp.int32(0))

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        # Run once: LLVM's optimiser would take five times as long over the random numbers as it could save.
        options = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else None
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(jax.random.key(seed))

    def fresh_scaling(self) -> Tree:
        """The precision recipe's part of the state before the first step."""
        return fresh(self.precision, self.fp8, self.plan.num_layers)

    @functools.cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """(state, batch) -> (next state, metrics); the state's buffers are given up for the next one's."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        replicated = NamedSharding(self.mesh, P())
        out, options = (shardings, replicated), self.compiler_options
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=out, compiler_options=options)

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """Of the steps of training and evaluation, see `gpu_flags`.

        A layer is gathered in about three collectives: in many, some are too small for the scheduler to hide,
        and one would wait for all of its shards. The halves of a batch must not be gathered together.
        """
        rows = self.train.global_batch_size // math.prod(self.plan.sizes[axis] for axis in self.local.row_axes)
        rows //= self.train.num_microbatches
        gathers = self.local.layer_bytes // 3
        if self.local.in_halves(rows):
            half = rows // 2 * self.train.sequence_length * self.model.d_model * self.precision.compute_dtype.itemsize
            gathers = min(gathers, half)
        return gpu_flags.options(self.platform, gathers=gathers)

    @functools.cached_property
    def eval_step(self) -> jax.stages.Wrapped:
        """(params, batch, bytes per token id) -> the loss, and the bytes that the predicted tokens stand for."""

        def local(shards: Tree, batch: Batch, token_bytes: jax.Array) -> tuple[Loss, jax.Array]:
            bytes_ = jnp.where(batch.targets >= 0, token_bytes[batch.targets], 0).sum()
            loss = (
                self.local.loss(shards, batch)
                if self.pipe is None
                else executor.loss(self.local, self.pipe, shards, batch)
            )
            return loss, self.local.over_tokens(bytes_)

        step = self.on_mesh(local, (self.plan.stored, self._rows, P()), P())
        return jax.jit(step, compiler_options=self.compiler_options)

    @functools.cached_property
    def is_finite(self) -> Callable[[Tree], jax.Array]:
        """Whether every number of a tree is finite."""
        return jax.jit(lambda tree: jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all())

    @functools.cached_property
    def passes(self) -> Callable[[Tree, Tree, Batch, jax.Array], Found]:
        """(params, the state's scaling, batch, key) -> loss, gradients where the params lie, what FP8 has seen."""
        local = functools.partial(loss_and_grads, self.local)
        if self.pipe is not None:
            local = functools.partial(executor.loss_and_grads, self.local, self.pipe)
        of_layers = P(self.plan.stack_axis)
        scaling = of_layers if self.fp8 is not None else P()
        out = Found(P(), self.plan.stored, P(), of_layers)  # type: ignore[arg-type]
        return self.on_mesh(local, (self.plan.stored, scaling, self._rows, P()), out)

    def loss_and_grads(self, weights: Tree, batch: Batch, key: jax.Array) -> tuple[Loss, Tree, jax.Array]:
        """Loss, the mean loss's gradients where the params lie, their global norm; by the scaling of a first step."""
        found = self.passes(weights, self.fresh_scaling(), batch, key)
        return found.loss, found.grads, found.norm

    @functools.cached_property
    def update(self) -> Callable[[TrainState, Tree, jax.Array], TrainState]:
        """(state, gradients where the params lie, learning rate) -> the next state."""
        placed = jax.tree.map(lambda x: x.sharding.spec, self.abstract_state)
        local = functools.partial(update, self.optimizer, self.plan, self.train.ema_decay)
        return self.on_mesh(local, (placed, self.plan.stored, P()), placed)

    @functools.cached_property
    def learning_rate(self) -> Callable[[jax.typing.ArrayLike], jax.Array]:
        return learning_rate(self.schedule, self.train.num_steps)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def for_decoding(self, weights: Tree) -> tuple[Program, Tree]:
        """A program on the same devices that splits rows over what was pipeline and sequence, and its weights."""
        if self.pipe is None and self.plan.sizes["sequence"] == 1:
            return self, weights
        mesh = rows_only(self.mesh)
        program = dataclasses.replace(self, mesh=mesh, plan=plan_of(self.specs, mesh.shape, self.plan.zero), pipe=None)
        like = jax.tree.map(lambda x: x.sharding, program.abstract_state.params)
        return program, jax.device_put(jax.jit(self.of_model)(weights), like)

    # ---- the step -----------------------------------------------------------------------------------------------

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        loss, grads, norm, seen = self.passes(state.params, state.scaling, batch, self.dropout_key(state.step))
        finite = jnp.isfinite(loss.nll) & jnp.isfinite(norm)  # the same on all devices
        if self.train.clip_norm is not None:
            scale = jnp.minimum(1, self.train.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
        rate = self.learning_rate(state.step)
        metrics = {
            "loss": loss.nll / jnp.maximum(loss.num_tokens, 1),
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": loss.num_tokens,
            "skipped": state.skipped + ~finite,
        }
        if self.precision.recipe == "fp16":
            metrics["loss_scale"] = state.scaling["loss_scale"]
        if self.fp8 is not None:
            metrics["fp8"] = self.of_model({"layers": told(self.fp8, state.scaling, seen)})["layers"]
        with jax.named_scope("optimizer"):
            after = self.update(state, grads, rate)
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
            scaling = moved_on(self.precision, self.fp8, state.scaling, seen, finite)
        return after.replace(scaling=scaling, skipped=metrics["skipped"]), metrics

    def dropout_key(self, step: jax.Array) -> jax.Array:
        """What the masks of a step are drawn with."""
        return jax.random.fold_in(jax.random.key(self.train.seed), step)

    # ---- plumbing -------------------------------------------------------------------------------------------------

    def on_mesh(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`local` on every device of the mesh, on the shards of what is given."""
        if self.platform == "cpu" and self.mesh.size > 1:
            local = in_order(local)
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


def build_program(
    model: Model,
    mesh: Mesh,
    *,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    optimizer: Optimizer,
    schedule: Schedule,
    train: TrainConfig,
    pipeline: PipelineConfig,
    attention: AttentionConfig,
) -> Program:
    """The program of a checked recipe on a mesh; nothing is compiled before it is called."""
    mesh = split_data(mesh, zero.group_size)
    specs, sizes = model.param_specs(), dict(mesh.shape)
    pipe = None
    if sizes["pipeline"] > 1:
        pipe = pipeline_of(
            pipeline,
            specs,
            sizes["pipeline"],
            train.num_microbatches,
            sequence_length=train.sequence_length,
            remat=train.remat == "full",
            windows=model.windows,
        )
        specs = pipe.staged_specs(specs)
    return Program(model, mesh, plan_of(specs, sizes, zero), precision, optimizer, schedule, train, pipe, attention)
