"""Which stage of the pipeline has which layers, and how the model's state is laid out for it.

The model's layers are numbered in the order in which they run. Inside a run they are kept in the order of the stages:
dim 0 of every stacked array is `[stage, chunk, place]` in one, split over `pipeline`; chunks with fewer layers than
the largest are padded with zeros, which nothing ever works on. Checkpoints have the model's order and no padding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train.models.runs import Spans, spans_of
from sharded_train.ops.attention import Windows, pairs_seen
from sharded_train.params import ParamSpec, Tree, named_leaves, tree_map
from sharded_train.schedules.build import default_chunks, make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.slots import Slots, slots
from sharded_train.schedules.split import Split, split
from sharded_train.schedules.table import Schedule


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How the layers are worked on over `mesh.pipeline` stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # see docs/pipeline.md
    num_chunks: int | None = None  # parts of the model that each stage has; None: as many as the schedule likes
    layers: tuple[int, ...] | None = None  # of each chunk in the order in which they run; None: so that it is fastest


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A schedule, and the layers of its chunks."""

    schedule: Schedule
    split: Split
    costs: Costs  # of one microbatch, in units of a layer's forward

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_chunks(self) -> int:
        return self.schedule.num_chunks

    @property
    def chunk_layers(self) -> int:
        """Layers of the largest chunk, to which the others are padded."""
        return self.split.most

    @property
    def defers(self) -> bool:
        """Whether the weights' gradients are left for later."""
        return self.schedule.weights is not None

    @functools.cached_property
    def slots(self) -> Slots:
        return slots(self.schedule)

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Which layer of the model is at each place of dim 0, -1 for padding."""
        return self.split.indices().reshape(-1)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The place in dim 0 of each layer of the model."""
        return np.argsort(np.where(self.order < 0, len(self.order), self.order), kind="stable")[: self.num_layers]

    @property
    def num_layers(self) -> int:
        return int(self.split.layers.sum())

    @property
    def padded(self) -> bool:
        return len(self.order) > self.num_layers

    @property
    def in_model_order(self) -> bool:
        """Whether the state lies as the model has it, so that nothing needs to be moved."""
        return not self.padded and bool((self.order == np.arange(len(self.order))).all())

    def spans(self, ends: tuple[int, int]) -> Spans:
        """The runs of its layers, see `models.runs`."""
        number = np.maximum(self.order.reshape(self.num_stages, self.num_chunks, -1)[:, :, 0], 0)
        return spans_of(number, self.split.layers, self.chunk_layers, ends)

    def staged_specs(self, specs: Tree) -> Tree:
        """The parameters with their layers in the order of the stages, padding included."""
        widen = lambda s: dataclasses.replace(s, shape=(len(self.order), *s.shape[1:])) if s.stacked else s
        return tree_map(widen, specs)

    def staged(self, x: jax.Array) -> jax.Array:
        """`[layers, ...]` of the model -> as the stages have them."""
        there = jnp.asarray(self.order >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(there, x[np.maximum(self.order, 0)], 0)

    def of_model(self, x: jax.Array) -> jax.Array:
        """As the stages have them -> `[layers, ...]` of the model."""
        return x[self.places]


def pipeline_of(
    config: PipelineConfig,
    specs: Tree,
    num_stages: int,
    num_microbatches: int,
    *,
    sequence_length: int,
    remat: bool,
    windows: Windows = (None,),
) -> Pipeline:
    """The pipeline of a model with the given parameters; layers of different windows count as what the mean one costs.

    Raises ConfigError where the schedule takes no such numbers, or the layers cannot be split so.
    """
    chunks = default_chunks(config.schedule) if config.num_chunks is None else config.num_chunks
    num_layers = next(spec.shape[0] for _, spec in named_leaves(specs) if spec.stacked)
    keys = 2 * sum(pairs_seen(sequence_length, window) for window in windows) / (len(windows) * sequence_length)
    layer, head = work(specs, num_layers, keys)
    # A layer goes forward once, back twice, and forward once more where it is rematerialised; the head is never.
    head_load = 3 * head / ((4 if remat else 3) * layer)
    parts = split(num_layers, num_stages, chunks, head=head_load, layers=config.layers)
    costs = Costs.shared(parts.loads, 1.0, 2.0 if remat else 1.0, 1.0)
    return Pipeline(make(config.schedule, num_stages, num_microbatches, chunks, costs), parts, costs)


def work(specs: Tree, num_layers: int, keys: float) -> tuple[float, float]:
    """Multiplications for one token, forward: of a layer whose queries see half of so many keys, and of the head."""
    layer, head = 0.0, 0.0
    for _, spec in named_leaves(specs):
        if spec.stacked and spec.is_matrix:
            layer += spec.size / num_layers
            layer += _width(spec) * keys  # scores and values, each over half of them
        elif "vocab" in spec.axes:
            head = float(spec.size)
    return layer, head


def _width(spec: ParamSpec) -> int:
    """Heads times their size, of the product that ends attention; 0 of others."""
    ends_attention = spec.axes[-3:] == ("heads", "head_dim", "embed")
    return spec.shape[-3] * spec.shape[-2] if ends_attention else 0
