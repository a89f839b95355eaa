"""Attention in plain XLA: queries in tiles, each with the keys that it can see; nothing of `[seq, seq]` is kept.

Inside q is `[batch, kv_heads, group, seq, head_dim]`, the queries of a group sharing a kv head; k and v are
`[batch, kv_heads, seq, head_dim]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.ops.cudnn import Attended, Gradients
from sharded_train.ops.dot import dot

Tiles = Iterable[tuple[slice, slice]]  # queries, and the keys that any of them sees
Visible = Callable[[slice, slice], jax.Array]  # [batch, queries, keys] bool, of one tile
HIDDEN = -1e30  # the score of a key that a query must not see
FP32 = jnp.dtype(jnp.float32)
SMALLEST = 128  # queries of a tile: with fewer the products are small


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


def within(segments: jax.Array, window: int | None) -> Visible:
    """What the tiles of whole rows show."""
    return lambda rows, keys: within_documents(segments[:, rows], segments[:, keys], window)


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
    fits = [n for n in range(1, 9) if seq % n == 0 and seq // n >= SMALLEST]
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
    delta, lse, d_out = _delta(x, d_out, q), x.lse.reshape(q.shape[:4]), _grouped(d_out, k.shape[1])
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


# ---- a band: of equal tiles there may be any number, and each is worked on with as many keys ------------------------


def band_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, query_segments: jax.Array, key_segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `tiled_forward`; query t sees those of keys t, ..., t + (keys - seq) that are of its document."""
    batch, seq, heads, _ = q.shape
    band = _Band.of(seq, k.shape[1], query_segments, key_segments)
    q, k, v = _heads_first(q, k, v)

    def tile(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, _forward(band.queries(q, i, 3), band.keys(k, i, 2), band.keys(v, i, 2), band.visible(i))

    out, lse = (jnp.moveaxis(x, 0, 3).reshape(q.shape[: x.ndim - 1]) for x in band.scan(tile, None)[1])
    return _heads_last(out), lse.reshape(batch, heads, seq)


def band_backward(x: Attended, d_out: jax.Array, query_segments: jax.Array, key_segments: jax.Array) -> Gradients:
    """As `tiled_backward`, of `band_forward`."""
    q, k, v = _heads_first(x.q, x.k, x.v)
    band = _Band.of(q.shape[3], k.shape[2], query_segments, key_segments)
    delta, lse, d_out = _delta(x, d_out, q), x.lse.reshape(q.shape[:4]), _grouped(d_out, k.shape[1])

    def tile(sums: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        now = [band.queries(a, i, 3) for a in (q, lse, delta, d_out)]
        d_q, *d_kv = _backward(now[0], band.keys(k, i, 2), band.keys(v, i, 2), band.visible(i), *now[1:])
        return tuple(band.added(total, d, i) for total, d in zip(sums, d_kv, strict=True)), d_q  # type: ignore[return-value]

    zeros = compat.vary(jnp.zeros(k.shape, FP32), compat.varying_axes(*x, d_out))
    (d_k, d_v), d_q = band.scan(tile, (zeros, zeros))
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(q.shape)
    return _heads_last(d_q), d_k.transpose(0, 2, 1, 3), d_v.transpose(0, 2, 1, 3)


class _Band(NamedTuple):
    """Tiles of `size` queries, of all `seq`, each of which sees `before` keys before its own."""

    seq: int
    size: int
    before: int
    query_segments: jax.Array
    key_segments: jax.Array

    @classmethod
    def of(cls, seq: int, keys: int, query_segments: jax.Array, key_segments: jax.Array) -> _Band:
        """A tile of a quarter of the window wastes little on what is hidden."""
        before = keys - seq
        most = max(SMALLEST, before // 4)
        divisors = [n for n in range(1, seq + 1) if seq % n == 0]
        small, large = [n for n in divisors if n <= most], [n for n in divisors if n > most]
        size = small[-1] if small[-1] >= SMALLEST // 2 or not large else large[0]
        return cls(seq, size, before, query_segments, key_segments)

    def queries(self, x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def keys(self, x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self.size, self.before + self.size, axis)

    def added(self, total: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(total, self.keys(total, i, 2) + x, i * self.size, 2)

    def visible(self, i: jax.Array) -> jax.Array:
        queries, keys = self.queries(self.query_segments, i, 1), self.keys(self.key_segments, i, 1)
        return within_documents(queries, keys, self.before + 1)

    def scan(self, tile: Callable[..., Any], carry: Any) -> Any:
        return lax.scan(tile, carry, jnp.arange(self.seq // self.size))


# ---- one tile -----------------------------------------------------------------------------------------------------


def _delta(x: Attended, d_out: jax.Array, q: jax.Array) -> jax.Array:
    """The sum over each query's output times its gradient, for `q` with heads first."""
    return (x.out.astype(FP32) * d_out.astype(FP32)).sum(-1).transpose(0, 2, 1).reshape(q.shape[:4])


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
