"""The layers' weights in FP8: quantised before they are gathered, and made ready for `ops.linear`.

Which weights share an input is the model's knowledge (`Model.products`): the scale of an input is kept, and what was
seen of it found, under the first weight of its group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.models import Model
from sharded_train.models.block import Products
from sharded_train.models.stack import SEEN, Maxima, Source
from sharded_train.ops import fp8
from sharded_train.ops.fp8 import Observed, Quantised
from sharded_train.ops.linear import Deferred
from sharded_train.params import Tree
from sharded_train.precision import PrecisionConfig
from sharded_train.precision.formats import Fp8, current_scale, observe, quantise
from sharded_train.sharding import Plan, gather_shard

STAGES = "pipeline"  # the mesh axis that devices of different layers lie along


@dataclasses.dataclass(frozen=True)
class Fp8Layers:
    """Which of a layer's products run in FP8, and how; methods are called inside the manual `jax.shard_map`.

    Trees named `scaling` and `seen` are `{branch: {weight: {"x" | "w" | "g": ...}}}`, of input, weight, and cotangent
    of the output; leaves `[layers, ...]` of this device's layers.
    """

    how: Fp8
    groups: Products
    plan: Plan
    compute_dtype: jnp.dtype
    bf16_ends: tuple[int, int]  # so many of the first and of the last layers are not in FP8
    order: tuple[int, ...]  # which layer of the model is at each place of the state's, -1 for padding

    @property
    def in_fp8(self) -> jax.Array:
        """Which of the state's layers are in FP8."""
        first, last = self.bf16_ends
        return jnp.array([first <= number <= max(self.order) - last for number in self.order])

    def entries(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(branch, weight, tensors that are kept under it)."""
        for branch, names in self.groups:
            for name in names:
                kinds = ("x", "w", "g") if name == names[0] else ("w", "g")
                # Blocks of a weight lie across its shards, and both ways: no share of it is told.
                yield branch, name, tuple(k for k in kinds if k != "w" or self.how.scaling != "blocks")

    def tensors(self) -> Iterator[tuple[str, str, str]]:
        """(branch, weight, tensor) of all that is scaled."""
        for branch, name, kinds in self.entries():
            yield from ((branch, name, kind) for kind in kinds)

    # ---- weights --------------------------------------------------------------------------------------------------

    def source(self, layers: Tree, scaling: Tree | None, uses: int) -> Source:
        """The layers' weights from their stored shards `[layers, ...]`; a block multiplies by each so many times."""
        stacked, fetch = (layers, self._scales(layers, scaling)), lambda layer: self._gathered(*layer)
        return Source(stacked, fetch, ready=lambda weights: self._ready(weights, uses), grads=found)

    def weights_seen(self, layers: Tree, scaling: Tree | None) -> Tree:
        """What quantising the weights comes to, once a step."""
        scales = self._scales(layers, scaling)
        seen: Tree = {branch: {} for branch, _ in self.groups}
        for branch, name, kinds in self.entries():
            if "w" not in kinds:
                continue
            seen[branch][name] = {"w": observe(layers[branch][name], scales[branch][name].w_scale, self.how.forward)}
        return self.over_mesh(seen)

    @jax.named_scope("scales")
    def _scales(self, layers: Tree, scaling: Tree | None) -> Tree:
        """Each product's scales `[layers]`, as `Quantised` without a weight."""
        of = lambda branch, name, kind: None if scaling is None else scaling[branch][name][kind]["scale"]
        scales: Tree = {branch: {} for branch, _ in self.groups}
        for branch, names in self.groups:
            for name in names:
                current = self.how.scaling == "current"
                w_scale = self._current(layers[branch][name]) if current else of(branch, name, "w")
                x_scale, g_scale = of(branch, names[0], "x"), of(branch, name, "g")
                scales[branch][name] = Quantised(None, w_scale, x_scale, g_scale, self.how)  # type: ignore[arg-type]
        return scales

    def _current(self, stored: jax.Array) -> jax.Array:
        amax = jnp.abs(stored).max(tuple(range(1, stored.ndim)))
        return current_scale(self.over_mesh(amax), self.how.forward, self.how.margin)  # type: ignore[arg-type]

    def over_mesh(self, tree: Tree) -> Tree:
        """The largest on any device that has the same layers."""

        def one(x: jax.Array) -> jax.Array:
            axes = tuple(axis for axis in compat.varying_axes(x) if axis != STAGES)
            return lax.pmax(x, axes) if axes else x

        return jax.tree.map(one, tree)

    def _gathered(self, shards: Tree, scales: Tree) -> Tree:
        """Stored shards -> weights whole over `data`: those of FP8 products move as one byte a number.

        Those to be in blocks move as two: a product forward wants other blocks than one back, together 2.06 bytes.
        """
        names = self.plan.placements["layers"]
        others = lambda tree: {b: {n: w for n, w in of.items() if n not in scales.get(b, {})} for b, of in tree.items()}
        weights = self.plan.gather(others(shards), others(names), self.compute_dtype)
        with jax.named_scope("gather_weights"):
            for branch, name, _ in self.entries():
                scaled = scales[branch][name]
                w, blocks = shards[branch][name], self.how.scaling == "blocks"
                q = w.astype(self.compute_dtype) if blocks else quantise(w, scaled.w_scale, self.how.forward)
                weights[branch][name] = scaled.replace(q=gather_shard(q, names[branch][name], self.plan.axes))
        return weights

    def _ready(self, weights: Tree, uses: int) -> Tree:
        """Fetched weights with the zeros that a pass differentiates by."""
        out = {branch: dict(leaves) for branch, leaves in weights.items()}
        for branch, name, kinds in self.entries():
            w = weights[branch][name]
            out[branch][name] = Observed.of(w, uses, self.compute_dtype, x="x" in kinds, axes=self.plan.axes)
        return out

    # ---- what was seen --------------------------------------------------------------------------------------------

    def nothing_seen(self) -> Maxima:
        """To begin with, of activations and their cotangents."""
        axis = self.plan.stack_axis
        num_layers = self.plan.num_layers // (1 if axis is None else self.plan.sizes[axis])
        zeros = lambda: compat.vary(jnp.zeros((num_layers, fp8.SEEN), jnp.float32), self.plan.axes)
        seen: Tree = {branch: {} for branch, _ in self.groups}
        for branch, name, kinds in self.entries():
            seen[branch][name] = {kind: zeros() for kind in kinds if kind != "w"}
        return Maxima(seen)


def fp8_layers(model: Model, plan: Plan, how: Fp8, precision: PrecisionConfig, order: Sequence[int]) -> Fp8Layers:
    """All products of a layer but those that stay in bf16."""
    without, ends = precision.fp8.bf16_products, precision.fp8.bf16_layers
    ours = ((branch, tuple(n for n in names if n not in without)) for branch, names in model.products)
    inputs = tuple((branch, names) for branch, names in ours if names)
    return Fp8Layers(how, inputs, plan, precision.compute_dtype, (ends.first, ends.last), tuple(order))


def found(cotangents: Tree) -> Tree:
    """The cotangents of ready weights -> their gradients, and what was seen: the largest of all uses."""
    grads: Tree = {branch: dict(leaves) for branch, leaves in cotangents.items()}
    seen: Tree = {}
    for branch, leaves in cotangents.items():
        for name, leaf in leaves.items():
            of = leaf.w if isinstance(leaf, Deferred) else leaf
            if isinstance(of, Observed):
                kinds = {"x": of.x, "g": of.g}
                seen.setdefault(branch, {})[name] = {kind: x.max(0) for kind, x in kinds.items() if x is not None}
                grads[branch][name] = leaf.replace(w=None) if isinstance(leaf, Deferred) else leaf.grad
    return {**grads, SEEN: Maxima(seen)}
