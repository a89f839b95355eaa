"""From logical axes to mesh axes, and ZeRO as the plan of where each weight is gathered.

ZeRO is not four code paths. Stored state is split over `data` (x `sequence`) from stage 1 on; the stage only says
how often weights are gathered and gradients reduce-scattered (docs/architecture.md has the table).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sharded_train import compat
from sharded_train.params import ParamSpec, Tree, tree_map

# The mesh axis that splits a logical one; what is not named here is split by ZeRO alone.
MESH_AXIS = {"layers": "pipeline", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
ZERO_AXES = ("data", "sequence")
REPLICA = "replica"  # inside the step only: where ZeRO's groups are smaller than data, the axis between them

AnyMesh = TypeVar("AnyMesh", Mesh, AbstractMesh)


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 1 shards optimizer state, 2 gradients, 3 parameters.

    With a `group_size` that many neighbouring data ranks share one copy of the state, of which each group has one:
    weights are gathered within a group only, gradients reduce-scattered there and then summed between groups
    (hybrid sharding; MiCS, Zhang et al. 2022, arXiv:2205.00119).
    """

    stage: Literal[0, 1, 2, 3] = 1  # 0: nothing is sharded
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # of gradients on their way; a device sums in fp32
    group_size: int | None = None  # None: all data ranks are one group


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lives: `stored` between steps, `gathered` while it is multiplied with.

    `zero_dim` is the dim that ZeRO splits over `zero_axes`; None when the leaf is whole there, `reasons` saying why.
    """

    spec: ParamSpec
    stored: PartitionSpec
    gathered: PartitionSpec
    zero_dim: int | None
    zero_axes: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The placement of every parameter on a mesh of the given axis sizes, under one ZeRO stage."""

    placements: Tree
    sizes: Mapping[str, int]
    zero: ZeroConfig

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes with more than one device: the only ones that a value can differ over."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def stored(self) -> Tree:
        return jax.tree.map(lambda p: p.stored, self.placements, is_leaf=is_placement)

    @jax.named_scope("gather_weights")
    def gather(self, shards: Tree, names: Tree, dtype: jnp.dtype) -> Tree:
        """Stored fp32 shards -> weights whole over `data`, in the compute dtype. `names` is the matching subtree."""
        one = lambda p, w: gather_shard(w.astype(dtype), p, self.axes)
        return jax.tree.map(one, names, shards, is_leaf=is_placement)

    @jax.named_scope("reduce_gradients")
    def settle(self, grads: Tree, shards: Tree, names: Tree) -> Tree:
        """Local gradients of gathered weights -> fp32 gradients in the stored placement, summed over the mesh.

        The sum is the vjp of the gather, in `reduce_dtype`: no reduction is written by hand. Gradients may be of some
        of the parameters; what is among them and belongs to none stays as it is.
        """
        wire = jnp.dtype(self.zero.reduce_dtype)

        def settled(grads: Tree, shards: Tree, names: Tree) -> Tree:
            if not is_placement(names):
                of = lambda key, grad: settled(grad, shards[key], names[key]) if key in names else grad
                return {key: of(key, grad) for key, grad in grads.items()}
            _, transpose = jax.vjp(lambda w: gather_shard(w, names, self.axes), shards.astype(wire))
            return transpose(grads.astype(wire))[0].astype(jnp.float32)

        return settled(grads, shards, names)

    @property
    def num_layers(self) -> int:
        """Of all stages, padding included."""
        return int(_first(self.placements["layers"]).spec.shape[0])

    @property
    def stack_axis(self) -> str | None:
        """The mesh axis that the layers lie along."""
        return _first(self.placements["layers"]).gathered[0]  # type: ignore[no-any-return]

    def local_shape(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """Of each device's part of an array that lies as `spec` says."""
        dims = dims_of(spec, len(shape))
        return tuple(n // math.prod(self.sizes[axis] for axis in axes) for n, axes in zip(shape, dims, strict=True))

    def zeros(self, shape: tuple[int, ...], spec: PartitionSpec, dtype: jnp.dtype) -> jax.Array:
        """This device's part of zeros that lie as `spec` says, inside the manual `jax.shard_map`."""
        axes = [axis for dim in dims_of(spec, len(shape)) for axis in dim if axis in self.axes]
        return compat.vary(jnp.zeros(self.local_shape(shape, spec), dtype), axes)


def _first(placements: Tree) -> Placement:
    return jax.tree.leaves(placements, is_leaf=is_placement)[0]  # type: ignore[no-any-return]


def dims_of(spec: PartitionSpec, rank: int) -> list[list[str]]:
    """Per dim the mesh axes that split it."""
    dims = [[dim] if isinstance(dim, str) else list(dim or ()) for dim in spec]
    return dims + [[]] * (rank - len(dims))


def is_placement(x: Any) -> bool:
    return isinstance(x, Placement)


def gather_shard(shard: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """One stored shard -> the weight whole over ZeRO's axes, marked as varying over every axis of the mesh.

    Linear; its transpose reduce-scatters over ZeRO's axes, then sums the shards over those that the leaf is whole over.
    """
    shard = compat.vary(shard, axes)
    if placement.zero_dim is not None:
        dim = placement.zero_dim - (len(placement.spec.shape) - shard.ndim)  # layers may have been scanned away
        shard = lax.all_gather(shard, placement.zero_axes, axis=dim, tiled=True)
    return shard


def split_data(mesh: AnyMesh, group_size: int | None) -> AnyMesh:
    """The mesh with data split into `replica` (between groups) and `data` (within one), where there are several."""
    if group_size is None or group_size == mesh.shape["data"]:
        return mesh
    names: tuple[str, ...] = tuple(mesh.axis_names)
    sizes: tuple[int, ...] = tuple(mesh.axis_sizes)
    at: int = names.index("data")
    assert sizes[at] % group_size == 0, (sizes[at], group_size)
    names = (*names[:at], REPLICA, *names[at:])
    sizes = (*sizes[:at], sizes[at] // group_size, group_size, *sizes[at + 1 :])
    return Mesh(mesh.devices.reshape(sizes), names) if isinstance(mesh, Mesh) else AbstractMesh(sizes, names)


def rows_only(mesh: Mesh) -> Mesh:
    """The mesh whose pipeline and sequence have one device each, the others standing beside the replicas."""
    merged = [axis for axis in ("pipeline", "sequence", REPLICA) if axis in mesh.shape]
    others = [axis for axis in mesh.axis_names if axis not in merged]
    order = [mesh.axis_names.index(axis) for axis in (*merged, *others)]
    shape = (1, 1, -1, *(mesh.shape[axis] for axis in others))
    return Mesh(mesh.devices.transpose(order).reshape(shape), ("pipeline", "sequence", REPLICA, *others))


def plan_of(specs: Tree, sizes: Mapping[str, int], zero: ZeroConfig) -> Plan:
    """The placement of every parameter."""
    return Plan(tree_map(functools.partial(place, sizes=sizes, zero=zero), specs), dict(sizes), zero)


def place(spec: ParamSpec, sizes: Mapping[str, int], zero: ZeroConfig) -> Placement:
    """Where one parameter lives.

    ZeRO splits over data and sequence, and over pipeline what belongs to no stage, where a dim allows it.
    """
    gathered, reasons = _gathered(spec, sizes)
    several = lambda *axes: tuple(axis for axis in axes if sizes[axis] > 1 and axis not in gathered)
    wanted = several(*ZERO_AXES)
    choices = (several(*ZERO_AXES, "pipeline"), wanted, *((axis,) for axis in wanted)) if zero.stage else ()
    fits = ((axes, _zero_dim(spec, gathered, axes, sizes)) for axes in dict.fromkeys(choices))
    axes, dim = next(((axes, dim) for axes, dim in fits if dim is not None), ((), None))
    if zero.stage and not set(wanted) <= set(axes):
        whole = " x ".join(axis for axis in wanted if axis not in axes)
        ways = math.prod(sizes[a] for a in wanted)
        reasons = (*reasons, f"whole over {whole}: no dim of {spec.shape} is a multiple of {ways}")
    split: list[tuple[str, ...]] = [(axis,) if axis else () for axis in gathered]
    if dim is not None:
        split[dim] = (*split[dim], *axes)
    stored = PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split))
    return Placement(spec, stored, PartitionSpec(*gathered), dim, axes, reasons)


def _gathered(spec: ParamSpec, sizes: Mapping[str, int]) -> tuple[list[str | None], tuple[str, ...]]:
    """Per dim the mesh axis that splits it even while multiplied with, and what had to stay whole."""
    dims: list[str | None] = []
    reasons = []
    for size, name in zip(spec.shape, spec.axes, strict=True):
        axis = MESH_AXIS.get(name)
        if axis is None or sizes[axis] == 1:
            dims.append(None)
        elif size % sizes[axis]:
            dims.append(None)
            reasons.append(f"whole over {axis}: {name} {size} is no multiple of {axis} {sizes[axis]}")
        else:
            dims.append(axis)
    return dims, tuple(reasons)


def _zero_dim(
    spec: ParamSpec, gathered: list[str | None], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> int | None:
    """The dim that ZeRO splits over the axes: of those that divide, first one that is whole, then the largest.

    Never the layers: the scan walks them, and each layer is gathered by itself under stage 3.
    """
    if not axes:
        return None
    ways = math.prod(sizes[axis] for axis in axes)
    local = [n // sizes[axis] if axis else n for n, axis in zip(spec.shape, gathered, strict=True)]
    fits = [i for i, n in enumerate(local) if spec.axes[i] != "layers" and n % ways == 0]
    return max(fits, key=lambda i: (gathered[i] is None, local[i], -i), default=None)
