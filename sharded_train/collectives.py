"""The collectives that model code names, each nothing on an axis of size 1.

They are called inside the manual `jax.shard_map`. Autodiff writes their transposes: a gather's is a
reduce-scatter, a reduce-scatter's a gather, a sum's the identity.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax


def axis_size(axis: str) -> int:
    return lax.axis_size(axis)


def axis_index(axis: str) -> jax.Array | int:
    """This device's place along the axis; the plain number 0 on an axis of size 1."""
    return lax.axis_index(axis) if axis_size(axis) > 1 else 0


def index_of(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's place along several axes taken as one, the first outermost."""
    place: jax.Array | int = 0
    for axis in axes:
        place = place * axis_size(axis) + axis_index(axis)
    return place


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Local shards -> the whole dim, on every device of the axis."""
    return lax.all_gather(x, axis, axis=dim, tiled=True) if axis_size(axis) > 1 else x


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Partial sums -> this device's shard of their sum."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True) if axis_size(axis) > 1 else x


def all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Partial sums -> their sum, on every device of the axis."""
    return lax.psum(x, axis) if axis_size(axis) > 1 else x


def all_max(x: jax.Array, axis: str) -> jax.Array:
    """The elementwise maximum over the axis; no gradient passes."""
    x = lax.stop_gradient(x)
    return lax.pmax(x, axis) if axis_size(axis) > 1 else x


def own_part(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's equal part of a dim that every device of the axis holds whole."""
    size = axis_size(axis)
    if size == 1:
        return x
    assert x.shape[dim] % size == 0, (x.shape, dim, axis, size)
    part = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, axis_index(axis) * part, part, dim)


def pass_on(x: jax.Array, axis: str, by: int = 1) -> jax.Array:
    """Round the ring: every device gets what the one `by` places before it on the axis has.

    Over a pipeline this stands in a branch that the devices of one stage take. XLA's CPU back end waits at a
    permutation for every device of the mesh, and for a gather only for those of the group: there it is one.
    """
    size = axis_size(axis)
    permuted = lambda x: lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])
    if not _in_a_stage():
        return permuted(x)
    before = lambda x: lax.all_gather(x, axis)[(axis_index(axis) - by) % size]
    return lax.platform_dependent(x, cpu=before, default=permuted)  # type: ignore[no-any-return]


def _in_a_stage() -> bool:
    try:
        return axis_size("pipeline") > 1
    except NameError:  # not on a mesh that has such an axis
        return False


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """What stands at the borders of Megatron's column- and row-parallel products (arXiv:1909.08053, 2205.05198).

    Between the blocks activations `[batch, seq, ...]` are split over `tensor` along seq (sequence parallelism), or
    whole on every device when one token at a time is decoded.
    """

    sequence_parallel: bool = True

    def enter(self, x: jax.Array) -> jax.Array:
        """Before a column-parallel product: the whole sequence."""
        return all_gather(x, "tensor", 1) if self.sequence_parallel else x

    def leave(self, x: jax.Array) -> jax.Array:
        """After a row-parallel product: the sum of the partial products."""
        return reduce_scatter(x, "tensor", 1) if self.sequence_parallel else all_reduce(x, "tensor")

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """The part, of something every device has for the whole sequence, that it holds between blocks."""
        return own_part(x, "tensor", 1) if self.sequence_parallel else x
