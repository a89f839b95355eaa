"""Causal attention within documents, over the heads that this device holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sharded_train import compat
from sharded_train.ops import cudnn
from sharded_train.ops.cudnn import Attended, Gradients
from sharded_train.ops.dot import dot
from sharded_train.ops.saved import SAVED

Implementation = Literal["auto", "xla", "cudnn"]
Tiles = Iterable[tuple[slice, slice]]  # queries, and the keys that any of them sees
Visible = Callable[[slice, slice], jax.Array]  # [batch, queries, keys] bool, of one tile
CUDNN_MAX_HEAD_DIM = 128  # on every GPU from Ampere on
HIDDEN = -1e30  # the score of a key that a query must not see
FP32 = jnp.dtype(jnp.float32)


def choose(implementation: Implementation, platform: str, head_dim: int, dtype: jnp.dtype) -> Literal["xla", "cudnn"]:
    """What "auto" means: cuDNN's flash attention where it exists and is exact, plain XLA elsewhere."""
    if implementation != "auto":
        return implementation
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0 and dtype.itemsize == 2
    return "cudnn" if platform == "gpu" and fits else "xla"


class Kernel(NamedTuple):
    """What computes, and what is known of the rows before they are seen."""

    name: Literal["xla", "cudnn"]
    window: int | None  # a query sees the last so many keys of its document; None: all
    max_documents: int  # a row's, see `attention`


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    implementation: Literal["xla", "cudnn"],
    *,
    window: int | None = None,
    max_documents: int | None = None,
) -> jax.Array:
    """Each query attends to the keys of its document at or before its place in the row, or the last `window` of them.

    q `[batch, seq, heads, head_dim]`, k and v `[batch, seq, kv_heads, head_dim]`, heads a multiple of kv_heads;
    segments `[batch, seq]` int32, one number a document, whose tokens stand side by side.

    Output and logsumexp are kept under the selective policy. cuDNN's table of documents holds `max_documents` a row, on
    average over a device's rows (None: `cudnn.MOST_DOCUMENTS`); with more the output is NaN, and 1 says that no row
    holds several, padding at its end aside.
    """
    limit = cudnn.MOST_DOCUMENTS if max_documents is None else max_documents
    axes = compat.varying_axes(q, k, v, segments)
    q, k, v, segments = (compat.vary(x, axes) for x in (q, k, v, segments))
    return _attention(q, k, v, segments, Kernel(implementation, window, limit))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel) -> jax.Array:
    return forward(q, k, v, segments, kernel)[0]


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel
) -> tuple[jax.Array, tuple[Attended, jax.Array]]:
    out, lse = (checkpoint_name(x, SAVED) for x in forward(q, k, v, segments, kernel))
    return out, (Attended(q, k, v, out, lse), segments)


def _attention_backward(
    kernel: Kernel, saved: tuple[Attended, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    x, segments = saved
    d_q, d_k, d_v = backward(x, d_out, segments, kernel)
    return d_q, d_k.astype(x.k.dtype), d_v.astype(x.v.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel
) -> tuple[jax.Array, jax.Array]:
    """The attention, and the logsumexp of each query's scores, `[batch, heads, seq]` fp32."""
    if kernel.name == "cudnn":
        return cudnn.forward(q, k, v, segments, kernel.max_documents, kernel.window)
    tiles = causal_tiles(q.shape[1], kernel.window)
    return tiled_forward(q, k, v, tiles, _within(segments, kernel.window))


def backward(x: Attended, d_out: jax.Array, segments: jax.Array, kernel: Kernel) -> Gradients:
    """Gradients of q in its dtype, of k and v in theirs or fp32. `out` and `lse` may be those over more keys than
    these: then they are the gradients by way of these alone.
    """
    if kernel.name == "cudnn":
        return cudnn.backward(x, d_out, segments, kernel.max_documents, kernel.window)
    return tiled_backward(x, d_out, causal_tiles(x.q.shape[1], kernel.window), _within(segments, kernel.window))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of few queries to many keys, as `visible [batch, seq, keys]` allows; not differentiable."""
    out, _ = _forward(*_heads_first(q, k, v), visible)
    return _heads_last(out)


def within_documents(query_segments: jax.Array, key_segments: jax.Array, window: int | None = None) -> jax.Array:
    """May a query `[batch, seq]` see a key `[batch, keys]`? `[batch, seq, keys]` bool; the last query sees all keys'
    places (or the last `window`), the ones before it one fewer each.
    """
    seq, keys = query_segments.shape[1], key_segments.shape[1]
    behind = keys - seq + jnp.arange(seq)[:, None] - jnp.arange(keys)[None, :]
    near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return near & (query_segments[:, :, None] == key_segments[:, None, :])


def _within(segments: jax.Array, window: int | None) -> Visible:
    return lambda rows, keys: within_documents(segments[:, rows], segments[:, keys], window)


# ---- plain XLA: queries in tiles, each with the keys that it can see; nothing of [seq, seq] is kept ---------------
# q [batch, kv_heads, group, seq, head_dim], the queries of a group sharing a kv head; k, v [batch, kv_heads, seq, ...].


def _heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _grouped(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    batch, seq, _, head_dim = q.shape
    return q.reshape(batch, seq, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def _heads_last(q: jax.Array) -> jax.Array:
    return q.transpose(0, 3, 1, 2, 4).reshape(q.shape[0], q.shape[3], -1, q.shape[4])


def causal_tiles(seq: int, window: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys up to their end. Tiles of a quarter to an eighth waste little on what is hidden."""
    for rows, _ in whole_tiles(seq, seq):
        first = 0 if window is None else max(0, rows.start - window + 1)
        yield rows, slice(first, rows.stop)


def whole_tiles(seq: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Queries, each with all keys."""
    fits = [n for n in range(1, 9) if seq % n == 0 and seq // n >= 128]
    tile = seq // max(fits, default=1)
    for start in range(0, seq, tile):
        yield slice(start, start + tile), slice(0, keys)


def tiled_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, visible: Visible
) -> tuple[jax.Array, jax.Array]:
    """As `forward`, for what `visible` says. A query that sees nothing has an lse of about -1e30 and any output."""
    batch, seq, heads, _ = q.shape
    q, k, v = _heads_first(q, k, v)
    parts = [_forward(q[..., rows, :], k[..., keys, :], v[..., keys, :], visible(rows, keys)) for rows, keys in tiles]
    out, lse = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    return _heads_last(out), lse.reshape(batch, heads, seq)


def tiled_backward(x: Attended, d_out: jax.Array, tiles: Tiles, visible: Visible) -> Gradients:
    """As `backward`; those of k and v are summed in fp32."""
    q, k, v = _heads_first(x.q, x.k, x.v)
    delta = (x.out.astype(FP32) * d_out.astype(FP32)).sum(-1).transpose(0, 2, 1).reshape(q.shape[:4])
    d_out, lse = _grouped(d_out, k.shape[1]), x.lse.reshape(q.shape[:4])
    d_qs, d_ks, d_vs = [], [], []
    for rows, keys in tiles:
        d_q, d_k, d_v = _backward(
            q[..., rows, :],
            k[..., keys, :],
            v[..., keys, :],
            visible(rows, keys),
            lse[..., rows],
            delta[..., rows],
            d_out[..., rows, :],
        )
        unseen = [(0, 0), (0, 0), (keys.start, k.shape[2] - keys.stop), (0, 0)]
        d_qs.append(d_q)
        d_ks.append(jnp.pad(d_k, unseen))
        d_vs.append(jnp.pad(d_v, unseen))
    add_up = lambda parts: functools.reduce(jnp.add, parts).transpose(0, 2, 1, 3)
    return _heads_last(jnp.concatenate(d_qs, axis=3)), add_up(d_ks), add_up(d_vs)


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """fp32 `[batch, kv_heads, group, seq, keys]`."""
    scores = dot(_stacked(q), k, transpose_b=True, out_dtype=FP32).reshape(*q.shape[:-1], -1) * q.shape[-1] ** -0.5
    return jnp.where(visible[:, None, None], scores, HIDDEN)


@jax.named_scope("scores")
def _forward(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention, and the logsumexp of each query's scores in fp32."""
    scores = _scores(q, k, visible)
    top = scores.max(-1, keepdims=True)
    exps = jnp.exp(scores - top)
    total = exps.sum(-1, keepdims=True)
    out = dot(_stacked(exps.astype(v.dtype)), v, out_dtype=FP32).reshape(*q.shape)
    return (out / total).astype(q.dtype), (top + jnp.log(total))[..., 0]


@jax.named_scope("scores")
def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of one tile: that of q in its dtype, those of k and v in fp32 to be summed.

    With p = exp(scores - lse) and delta = sum(out d_out): d_v = p^T d_out, d_scores = p (d_out v^T - delta) / sqrt(d).
    """
    p = jnp.exp(_scores(q, k, visible) - lse[..., None])
    d_p = dot(_stacked(d_out), v, transpose_b=True, out_dtype=FP32).reshape(p.shape)
    d_scores = _stacked((p * (d_p - delta[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype))
    d_v = dot(_stacked(p.astype(q.dtype)), _stacked(d_out), transpose_a=True, out_dtype=FP32)
    d_k = dot(d_scores, _stacked(q), transpose_a=True, out_dtype=FP32)
    return dot(d_scores, k, out_dtype=q.dtype).reshape(q.shape), d_k, d_v


def _stacked(x: jax.Array) -> jax.Array:
    """The queries of a group one after another: `[batch, kv_heads, group * seq, ...]`."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
