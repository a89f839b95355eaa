"""Attention within a window, of rows that are split over `sequence` in the zigzag: each chunk and the keys before it.

A query sees `window` keys, itself included. So the queries of a chunk need the `window - 1` keys that stand before it
in the row and no others: these alone are sent, from chunk to chunk, and what lies farther back is not computed.
Device i holds chunks i and 2 S - 1 - i, so that the first chunks' keys go one device up, the last chunks' one down, and
at the end of the axis the chunk before is the device's own.

Both chunks are worked on as rows of their own, one after the other along the batch: q `[2 batch, chunk, ...]`, keys
`[2 batch, window - 1 + chunk, ...]`. At the beginning of a row there are no keys before, and what is in
their place is of no document.

For cuDNN, which counts keys and queries from the same place, that is up to three calls without a mask of ours: the
chunk's own keys, causal and within the window; those of the keys before that every query sees; and a corner of those
that go out of sight one by one, in which the order of both is turned round, so that causality hides the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sharded_train.collectives import axis_index, axis_size, pass_on
from sharded_train.ops import cudnn, tiles
from sharded_train.ops.attention import Kernel
from sharded_train.ops.cudnn import Attended, Gradients
from sharded_train.ops.zigzag import AXIS, FP32, merged


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp of this device's two chunks, `[batch, seq / S, ...]` as they come."""
    q, kv, own, seen = _apart(q, k, v, segments, kernel)
    by = _by_cudnn if kernel.name == "cudnn" else lambda *args: tiles.band_forward(*args[:-1])
    out, lse = by(q, kv[:, :, 0], kv[:, :, 1], own, seen, kernel)
    return _together(out), jnp.concatenate(jnp.split(lse, 2), 2)


def backward(x: Attended, d_out: jax.Array, segments: jax.Array, kernel: Kernel) -> Gradients:
    """Gradients of q, k and v, those of k and v summed in fp32 over the devices that saw them."""
    q, kv, own, seen = _apart(x.q, x.k, x.v, segments, kernel)
    lse = jnp.concatenate(jnp.split(x.lse, 2, 2))
    now = Attended(q, kv[:, :, 0], kv[:, :, 1], _chunks(x.out), lse)
    if kernel.name == "cudnn":
        d_q, d_k, d_v = _back_by_cudnn(now, _chunks(d_out), own, seen, kernel)
    else:
        d_q, d_k, d_v = tiles.band_backward(now, _chunks(d_out), own, seen)
    before = kv.shape[1] - q.shape[1]
    d_kv = jnp.stack([d_k, d_v], 2).astype(FP32)
    d_kv = _together(d_kv[:, before:] + _sent_back(d_kv[:, :before], q.shape[1]))
    return _together(d_q), d_kv[:, :, 0], d_kv[:, :, 1]


def _apart(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Chunks of queries; keys with values `[2 batch, window - 1 + chunk, 2, kv_heads, head_dim]`; documents of both."""
    assert kernel.window is not None
    before, own = kernel.window - 1, _chunks(segments)
    chunk, i = own.shape[1], axis_index(AXIS)
    kv = _chunks(jnp.stack([k, v], 2))
    first = jnp.repeat(jnp.stack([i, 2 * axis_size(AXIS) - 1 - i]) * chunk, segments.shape[0])
    there = first[:, None] >= before - jnp.arange(before)
    seen = jnp.where(there, _received(own, before), -1)
    with_own = lambda x, y: jnp.concatenate([x, y], 1)
    return _chunks(q), with_own(_received(kv, before), kv), own, with_own(seen, own)


def _chunks(x: jax.Array) -> jax.Array:
    return jnp.concatenate(jnp.split(x, 2, 1))


def _together(x: jax.Array) -> jax.Array:
    return jnp.concatenate(jnp.split(x, 2), 1)


# ---- from chunk to chunk --------------------------------------------------------------------------------------------


def _received(x: jax.Array, count: int) -> jax.Array:
    """The `count` tokens before each chunk of `x [2 batch, chunk, ...]`; anything before the row's beginning."""
    parts, left = [x[:, :0]], count
    while left > 0:
        x = _hop(x[:, -left:])
        parts.append(x)
        left -= x.shape[1]
    return jnp.concatenate(parts[::-1], 1)


def _sent_back(d: jax.Array, chunk: int) -> jax.Array:
    """The transpose: `[2 batch, count, ...]` -> what is to be added to the gradients of the chunks they came from."""
    count = d.shape[1]
    back = jnp.zeros((d.shape[0], 0, *d.shape[2:]), d.dtype)
    for far in range(-(-count // chunk), 0, -1):
        part = d[:, max(0, count - far * chunk) : count - (far - 1) * chunk]
        back = _hop_back(part + _at_the_end(back, part.shape[1]))
    return _at_the_end(back, chunk)


def _at_the_end(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (length - x.shape[1], 0)] + [(0, 0)] * (x.ndim - 2))


def _hop(x: jax.Array) -> jax.Array:
    """What the chunk before each of these has."""
    first, last = jnp.split(x, 2)
    at_end = axis_index(AXIS) == axis_size(AXIS) - 1
    return jnp.concatenate([pass_on(first, AXIS), jnp.where(at_end, first, pass_on(last, AXIS, -1))])


def _hop_back(d: jax.Array) -> jax.Array:
    first, last = jnp.split(d, 2)
    at_end = axis_index(AXIS) == axis_size(AXIS) - 1
    own = jnp.where(at_end, last, 0)
    return jnp.concatenate([pass_on(first, AXIS, -1) + own, pass_on(last - own, AXIS)])


# ---- cuDNN: the chunk's own keys, a rectangle, and a corner ----------------------------------------------------------


def _by_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array, seen: jax.Array, kernel: Kernel
) -> tuple[jax.Array, jax.Array]:
    chunk, before = q.shape[1], k.shape[1] - q.shape[1]
    rows, keys = _of_the_document(own, seen[:, :before])
    corner = min(before, chunk)
    out, lse = cudnn.forward(q, k[:, before:], v[:, before:], own, kernel.max_documents, _own_window(kernel, chunk))
    state = out.astype(FP32), lse
    if before > corner:
        near = k[:, corner:before], v[:, corner:before]
        state = merged(state, cudnn.pair_forward(q, *near, *_both(rows, jnp.minimum(keys, before - corner))))
    if corner:
        sight = _both(jnp.minimum(rows, corner), keys - (before - corner))
        out, lse = cudnn.corner_forward(q[:, :corner], k[:, :corner], v[:, :corner], *sight)
        unseen = chunk - corner
        out = jnp.pad(out, [(0, 0), (0, unseen), (0, 0), (0, 0)])
        lse = jnp.pad(lse, [(0, 0), (0, 0), (0, unseen)], constant_values=-cudnn.OUT_OF_SIGHT)
        state = merged(state, (out, lse))
    return state[0].astype(q.dtype), state[1]


def _back_by_cudnn(x: Attended, d_out: jax.Array, own: jax.Array, seen: jax.Array, kernel: Kernel) -> Gradients:
    chunk, before = x.q.shape[1], x.k.shape[1] - x.q.shape[1]
    rows, keys = _of_the_document(own, seen[:, :before])
    corner = min(before, chunk)
    here = x._replace(k=x.k[:, before:], v=x.v[:, before:])
    parts = [(0, before, cudnn.backward(here, d_out, own, kernel.max_documents, _own_window(kernel, chunk)))]
    if before > corner:
        near = x._replace(k=x.k[:, corner:before], v=x.v[:, corner:before])
        sight = _both(rows, jnp.minimum(keys, before - corner))
        parts.append((0, corner, cudnn.pair_backward(near, d_out, *sight)))
    if corner:
        q, k, v, out, lse = x
        far = Attended(q[:, :corner], k[:, :corner], v[:, :corner], out[:, :corner], lse[:, :, :corner])
        sight = _both(jnp.minimum(rows, corner), keys - (before - corner))
        parts.append((0, 0, cudnn.corner_backward(far, d_out[:, :corner], *sight)))
    d_q, d_k, d_v = (jnp.zeros(a.shape, FP32) for a in (x.q, x.k, x.v))
    for first, at, (part_q, part_k, part_v) in parts:
        d_q = d_q.at[:, first : first + part_q.shape[1]].add(part_q.astype(FP32))
        d_k = d_k.at[:, at : at + part_k.shape[1]].add(part_k.astype(FP32))
        d_v = d_v.at[:, at : at + part_v.shape[1]].add(part_v.astype(FP32))
    return d_q.astype(x.q.dtype), d_k, d_v


def _own_window(kernel: Kernel, chunk: int) -> int | None:
    return kernel.window if kernel.window is not None and kernel.window < chunk else None


def _of_the_document(own: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many queries a chunk's first document has, and how many of the keys before are of it: the last so many."""
    count = lambda segments: (segments == own[:, :1]).sum(1, dtype=jnp.int32)
    return count(own), count(before)


def _both(rows: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """None of the one where there is none of the other."""
    return jnp.where(keys > 0, rows, 0), jnp.maximum(keys, 0)
