"""The zigzag, in which rows are split over `sequence`, and what queries of one device see of another's keys.

Of the 2 S chunks of a row, device i of the S along `sequence` holds chunks i and 2 S - 1 - i. Keys of device j
then meet queries of device i in exactly two pairs of chunks, in neither of which causality hides anything:

    (last of i, first of j) always;  (first of i, first of j) if j < i, (last of i, last of j) if j > i.

So all devices do equal work of one static shape without a conditional, and only what is local needs a causal mask.
Two chunks of a row have at most one document in common, at the end of the earlier and the beginning of the later: what
the queries of a pair see is a rectangle, told by two numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_train.collectives import axis_index, axis_size
from sharded_train.ops import cudnn, tiles
from sharded_train.ops.attention import Kernel
from sharded_train.ops.cudnn import Attended, Gradients

AXIS = "sequence"
FP32 = jnp.dtype(jnp.float32)


def arrange(x: Any, size: int, dim: int = 1) -> Any:
    """A whole dim in its own order -> the order whose equal parts are what the `size` devices hold; numpy or JAX."""
    return _rearranged(x, dim, [chunk for i in range(size) for chunk in (i, 2 * size - 1 - i)])


def undo(x: Any, size: int, dim: int = 1) -> Any:
    """The inverse of `arrange`."""
    return _rearranged(x, dim, [2 * c if c < size else 2 * (2 * size - 1 - c) + 1 for c in range(2 * size)])


def _rearranged(x: Any, dim: int, chunks: list[int]) -> Any:
    numpy = jnp if isinstance(x, jax.Array) else np
    assert x.shape[dim] % len(chunks) == 0, (x.shape, dim, chunks)
    parts = numpy.split(x, len(chunks), dim)
    return numpy.concatenate([parts[chunk] for chunk in chunks], dim)


def source(r: Any) -> jax.Array:
    """Whose keys are here in turn r."""
    return (axis_index(AXIS) - r) % axis_size(AXIS)


# ---- the two pairs of a turn, one after the other along the batch -------------------------------------------------


class Edges(NamedTuple):
    """Of each chunk the document it begins with and the one it ends with, and how many tokens it has of them."""

    begin: jax.Array  # [2, batch]: of this device's chunks
    head: jax.Array
    end: jax.Array  # [S, 2, batch]: of every device's
    tail: jax.Array


class Sight(NamedTuple):
    """What the queries of a turn see: the first `rows` the last `keys`."""

    earlier: jax.Array  # bool: the keys are of an earlier device
    rows: jax.Array  # [2 batch]
    keys: jax.Array


def edges_of(segments: jax.Array) -> Edges:
    chunks = jnp.stack(jnp.split(segments, 2, 1))
    begin, end = chunks[..., 0], chunks[..., -1]
    head, tail = ((chunks == edge[..., None]).sum(-1, dtype=jnp.int32) for edge in (begin, end))
    ends = lax.all_gather(jnp.stack([end, tail], 1), AXIS)
    return Edges(begin, head, ends[:, :, 0], ends[:, :, 1])


def sight_of(edges: Edges, r: Any) -> Sight:
    """What this device's queries see of the keys that are here in turn r."""
    here, there = axis_index(AXIS), source(r)
    earlier = there < here
    q = lambda x: jnp.stack([x[1], jnp.where(earlier, x[0], x[1])])
    k = lambda x: jnp.stack([x[0], jnp.where(earlier, x[0], x[1])])
    end, tail = (k(lax.dynamic_index_in_dim(x, there, 0, keepdims=False)) for x in (edges.end, edges.tail))
    same = q(edges.begin) == end
    rows, keys = jnp.where(same, q(edges.head), 0), jnp.where(same, tail, 0)
    return Sight(earlier, rows.reshape(-1), keys.reshape(-1))


def where(condition: jax.Array, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def queries(x: jax.Array, sight: Sight, axis: int = 1) -> jax.Array:
    """Of the two pairs of a turn: `[batch, seq / S, ...]` -> `[2 batch, chunk, ...]`, the last chunk and either."""
    first, last = jnp.split(x, 2, axis)
    return jnp.concatenate([last, jnp.where(sight.earlier, first, last)])


def keys(kv: jax.Array, sight: Sight) -> jax.Array:
    """Of the same pairs: `[2, batch, seq / S, ...]` -> `[2, 2 batch, chunk, ...]`, the first chunk and either."""
    first, last = jnp.split(kv, 2, 2)
    return jnp.concatenate([first, jnp.where(sight.earlier, first, last)], 1)


def of_queries(x: jax.Array, sight: Sight) -> jax.Array:
    """Gradients of `queries` -> of the local rows."""
    always, either = jnp.split(x, 2)
    return jnp.concatenate([jnp.where(sight.earlier, either, 0), always + jnp.where(sight.earlier, 0, either)], 1)


def of_keys(x: jax.Array, sight: Sight) -> jax.Array:
    """Gradients of `keys` -> of the local rows, `[2, batch, seq / S, kv_heads, head_dim]`."""
    always, either = jnp.split(x, 2, 1)
    return jnp.concatenate([always + jnp.where(sight.earlier, either, 0), jnp.where(sight.earlier, 0, either)], 2)


def merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from that to each, with its logsumexp."""
    lse = jnp.logaddexp(a[1], b[1])
    share = lambda part: jnp.exp(part - lse).swapaxes(1, 2)[..., None]
    return a[0] * share(a[1]) + b[0].astype(FP32) * share(b[1]), lse


def pair_forward(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, kernel: Kernel) -> tuple[jax.Array, jax.Array]:
    if kernel.name == "cudnn":
        return cudnn.pair_forward(q, k, v, sight.rows, sight.keys)
    return tiles.tiled_forward(q, k, v, tiles.whole_tiles(q.shape[1], k.shape[1]), _visible(sight, k))


def pair_backward(x: Attended, d_out: jax.Array, sight: Sight, kernel: Kernel) -> Gradients:
    if kernel.name == "cudnn":
        return cudnn.pair_backward(x, d_out, sight.rows, sight.keys)
    return tiles.tiled_backward(x, d_out, tiles.whole_tiles(x.q.shape[1], x.k.shape[1]), _visible(sight, x.k))


def _visible(sight: Sight, k: jax.Array) -> tiles.Visible:
    def visible(rows: slice, keys: slice) -> jax.Array:
        row, key = jnp.arange(rows.start, rows.stop)[:, None], jnp.arange(keys.start, keys.stop)
        of = lambda x: x[:, None, None]
        return (row < of(sight.rows)) & (key >= k.shape[1] - of(sight.keys))

    return visible
