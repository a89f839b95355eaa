"""One parameter as an optimizer sees it: its logical axes, and where its dims lie on the mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharded_train.collectives import axis_size
from sharded_train.params import ParamSpec
from sharded_train.sharding import Placement

FloatDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter; methods that take an array want this device's shard of it, inside the manual shard_map."""

    placement: Placement
    axes: tuple[str, ...]  # of the mesh, those with more than one device

    @property
    def spec(self) -> ParamSpec:
        return self.placement.spec

    @property
    def matrix_dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dims of the rows (what a product sums over) and of the columns, the layers being a stack of matrices.

        A weight of [embed, heads, head_dim] is a matrix embed x (heads head_dim), [heads, head_dim, embed] one of
        (heads head_dim) x embed.
        """
        assert self.spec.is_matrix, self.spec
        dims = [dim for dim, name in enumerate(self.spec.axes) if name != "layers"]
        embed = self.spec.axes.index("embed")
        cut = dims.index(embed) + (embed == dims[0])
        return tuple(dims[:cut]), tuple(dims[cut:])

    @property
    def own_dims(self) -> tuple[int, ...]:
        """All dims but the layers."""
        return tuple(dim for dim, name in enumerate(self.spec.axes) if name != "layers")

    def split(self, dim: int) -> tuple[str, ...]:
        """Mesh axes that a stored dim is split over, the outermost first."""
        axes = self.placement.stored[dim]
        return (axes,) if isinstance(axes, str) else tuple(axes or ())

    def mean(self, x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """The mean over whole dims, kept as dims of 1: a sum over the mesh where a dim is split, else none.

        `x` is split like the parameter, or has size 1 in some of its other dims.
        """
        axes = tuple(axis for dim in dims for axis in self.split(dim))
        size = math.prod(x.shape[dim] for dim in dims) * math.prod(axis_size(axis) for axis in axes)
        total = x.sum(dims, keepdims=True)
        return (lax.psum(total, axes) if axes else total) / size

    def slot(self, dtype: FloatDtype = "float32", *, without: tuple[int, ...] = ()) -> Slot:
        """An array of the state with this parameter's dims, but for those that are reduced away."""
        kept = [dim for dim in range(len(self.spec.shape)) if dim not in without]
        stored = PartitionSpec(*(self.placement.stored[dim] for dim in kept))
        return Slot(tuple(self.spec.shape[dim] for dim in kept), jnp.dtype(dtype), stored)


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array that an optimizer keeps for a parameter; zeros before the first step."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    stored: PartitionSpec


Slots = dict[str, jax.Array]  # by name, fp32 while they are worked on
