"""Causal attention within documents, over the heads that this device holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sharded_train.ops.dot import dot
from sharded_train.ops.saved import SAVED

Implementation = Literal["auto", "xla", "cudnn"]
CUDNN_MAX_HEAD_DIM = 128  # on every GPU from Ampere on
HIDDEN = -1e30  # the score of a key that a query must not see
FP32 = jnp.dtype(jnp.float32)


def choose(implementation: Implementation, platform: str, head_dim: int, dtype: jnp.dtype) -> Literal["xla", "cudnn"]:
    """What "auto" means: cuDNN's flash attention where it exists and is exact, plain XLA elsewhere."""
    if implementation != "auto":
        return implementation
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0 and dtype.itemsize == 2
    return "cudnn" if platform == "gpu" and fits else "xla"


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """Each query attends to the keys of its own document at or before its place in the row.

    q `[batch, seq, heads, head_dim]`, k and v `[batch, seq, kv_heads, head_dim]`, heads a multiple of kv_heads;
    segments `[batch, seq]` int32, one number a document.
    """
    if implementation == "cudnn":
        mask = within_documents(segments, segments)[:, None]
        return checkpoint_name(jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn"), SAVED)
    out = _tiled(*_heads_first(q, k, v), segments)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of few queries to many keys, as `visible [batch, seq, keys]` allows; not differentiable."""
    out, _ = _forward(*_heads_first(q, k, v), visible)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def within_documents(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """May a query `[batch, seq]` see a key `[batch, keys]`? `[batch, seq, keys]` bool; the last query sees all keys'
    places, the ones before it one fewer each.
    """
    seq, keys = query_segments.shape[1], key_segments.shape[1]
    causal = keys - seq + jnp.arange(seq)[:, None] >= jnp.arange(keys)[None, :]
    return causal & (query_segments[:, :, None] == key_segments[:, None, :])


# ---- plain XLA: queries in tiles, each with the keys that it can see; nothing of [seq, seq] is kept ---------------
# q [batch, kv_heads, group, seq, head_dim], the queries of a group sharing a kv head; k, v [batch, kv_heads, seq, ...].


def _heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, seq, _, head_dim = q.shape
    grouped = q.reshape(batch, seq, k.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    return grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _tiles(seq: int) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys up to their end. Tiles of a quarter to an eighth waste little on what is hidden."""
    fits = [n for n in range(1, 9) if seq % n == 0 and seq // n >= 128]
    tile = seq // max(fits, default=1)
    for start in range(0, seq, tile):
        yield slice(start, start + tile), slice(0, start + tile)


@jax.custom_vjp
def _tiled(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    return _tiled_forward(q, k, v, segments)[0]


def _tiled_forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> tuple[jax.Array, tuple]:
    parts = [
        _forward(q[..., rows, :], k[..., keys, :], v[..., keys, :], _visible(segments, rows, keys))
        for rows, keys in _tiles(q.shape[3])
    ]
    out, lse = (checkpoint_name(jnp.concatenate(part, axis=3), SAVED) for part in zip(*parts, strict=True))
    return out, (q, k, v, segments, out, lse)


def _tiled_backward(saved: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, lse = saved
    delta = (out.astype(FP32) * d_out.astype(FP32)).sum(-1)
    d_qs, d_ks, d_vs = [], [], []
    for rows, keys in _tiles(q.shape[3]):
        d_q, d_k, d_v = _backward(
            q[..., rows, :],
            k[..., keys, :],
            v[..., keys, :],
            _visible(segments, rows, keys),
            lse[..., rows],
            delta[..., rows],
            d_out[..., rows, :],
        )
        unseen = [(0, 0), (0, 0), (0, k.shape[2] - keys.stop), (0, 0)]
        d_qs.append(d_q)
        d_ks.append(jnp.pad(d_k, unseen))
        d_vs.append(jnp.pad(d_v, unseen))
    add_up = lambda parts, dtype: functools.reduce(jnp.add, parts).astype(dtype)
    return jnp.concatenate(d_qs, axis=3), add_up(d_ks, k.dtype), add_up(d_vs, v.dtype), None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _visible(segments: jax.Array, rows: slice, keys: slice) -> jax.Array:
    return within_documents(segments[:, rows], segments[:, keys])


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
