"""Attention of rows that are split over `sequence`: keys in a ring, keys gathered, or heads in exchange for tokens.

The rows lie in the zigzag of `ops/zigzag.py`, which makes all devices' work equal and of one shape: docs/context.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sharded_train import compat
from sharded_train.collectives import axis_size, pass_on
from sharded_train.ops import attention as whole
from sharded_train.ops import cudnn, zigzag
from sharded_train.ops.saved import SAVED
from sharded_train.ops.zigzag import AXIS, FP32

Strategy = Literal["all_gather", "ring", "ulysses"]
State = Any


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    implementation: Literal["xla", "cudnn"],
    strategy: Strategy,
    *,
    window: int | None = None,
    max_documents: int | None = None,
) -> jax.Array:
    """As `attention.attention`, of the whole row, inside `jax.shard_map` over an axis `sequence` of size S > 1.

    q `[batch, seq / S, heads, head_dim]`, k and v `[batch, seq / S, kv_heads, head_dim]` and segments
    `[batch, seq / S]` are this device's two chunks of the zigzag, as `zigzag.arrange` puts them, and so is the output.
    Numbers of documents are each of one run of the row, padding's 0 included. `max_documents` is of a whole row.

    `ring` passes keys and values round, and their gradients with them: memory does not grow with S. `all_gather` holds
    the keys and values of the whole row (and once more in fp32 for their gradients). `ulysses` holds whole rows of a
    share of the heads, which S must divide. Output and logsumexp are kept under the selective policy; what was
    communicated is so again in the backward pass.

    Raises ValueError if S does not divide the heads for `ulysses`, and for a window on cuDNN with any other strategy.
    """
    size = axis_size(AXIS)
    assert size > 1, "the axis sequence has one device: use attention.attention"
    assert q.shape[1] % 2 == 0, q.shape
    axes = sorted({AXIS, *compat.varying_axes(q, k, v, segments)})
    q, k, v, segments = (compat.vary(x, axes) for x in (q, k, v, segments))
    if strategy == "ulysses":
        return _ulysses(q, k, v, segments, implementation, window, max_documents)
    if window is not None and implementation == "cudnn":
        raise ValueError(
            f"attention.context = {strategy} with a window of {window} keys: cuDNN counts places side by side, "
            f"which the zigzag does not keep. Use ulysses, or model.attention = xla"
        )
    limit = cudnn.MOST_DOCUMENTS if max_documents is None else max_documents
    return _in_turns(q, k, v, segments, whole.Kernel(implementation, window, limit), strategy)


def wire_bytes(
    strategy: Strategy, size: int, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> tuple[int, int]:
    """Bytes that each device sends in the forward and in the backward pass; `seq` is the whole row's.

    A gather's or reduce-scatter's are those of the ring algorithm. Gradients of keys and values travel in fp32. What
    one number a chunk needs (documents), and ulysses' segments of 4 bytes a token, are left out.
    """
    others, of_token = size - 1, batch * (seq // size) * head_dim
    kv = 2 * of_token * kv_heads
    if strategy in ("ring", "all_gather"):
        return others * kv * itemsize, others * kv * (itemsize + 4)
    exchanged = 2 * of_token * (heads + kv_copies(kv_heads, size) * kv_heads) * itemsize * others // size
    return exchanged, exchanged


def cheapest(size: int, seq: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> tuple[Strategy, str]:
    """The strategy that sends the fewest bytes, and why in words; the ring's are hidden, so that it wins a draw."""
    sent = {s: sum(wire_bytes(s, size, 1, seq, heads, kv_heads, head_dim, itemsize)) for s in ("ring", "ulysses")}
    words = {s: f"{s} sends {bytes_ / 2**20:.4g} MiB a row and layer" for s, bytes_ in sent.items()}
    if heads % size:
        return "ring", f"{words['ring']}; ulysses would need {heads} heads to split over {size} devices"
    if sent["ulysses"] < sent["ring"]:
        return "ulysses", f"{words['ulysses']}, {words['ring']}"
    return "ring", f"{words['ring']}, {words['ulysses']}"


def kv_copies(kv_heads: int, size: int) -> int:
    """How often ulysses repeats each kv head so that `size` devices have the same number."""
    return math.lcm(kv_heads, size) // kv_heads


# ---- heads in exchange for the sequence (Jacobs et al. 2023, arXiv:2309.14509) --------------------------------------


def _ulysses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    implementation: Literal["xla", "cudnn"],
    window: int | None,
    max_documents: int | None,
) -> jax.Array:
    size, heads, kv_heads = axis_size(AXIS), q.shape[2], k.shape[2]
    if heads % size:
        raise ValueError(
            f"attention.context = ulysses: mesh.sequence = {size} does not divide the {heads} heads of a device "
            f"(model.num_heads / mesh.tensor). Use ring or all_gather, or sequence = {math.gcd(heads, size)}"
        )
    rows = lambda x: zigzag.undo(lax.all_to_all(x, AXIS, 2, 1, tiled=True), size)
    k, v = (jnp.repeat(x, kv_copies(kv_heads, size), axis=2) for x in (k, v))
    segments = zigzag.undo(lax.all_gather(segments, AXIS, axis=1, tiled=True), size)
    out = whole.attention(
        rows(q), rows(k), rows(v), segments, implementation, window=window, max_documents=max_documents
    )
    return lax.all_to_all(zigzag.arrange(out, size), AXIS, 1, 2, tiled=True)


# ---- keys in turns: those of the device r places before, r = 1 ... S - 1 -------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _in_turns(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: whole.Kernel, strategy: Strategy
) -> jax.Array:
    return _forward(q, k, v, segments, kernel, strategy)[0]


def _forward_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: whole.Kernel, strategy: Strategy
) -> tuple[jax.Array, tuple[whole.Attended, jax.Array]]:
    out, lse = (checkpoint_name(x, SAVED) for x in _forward(q, k, v, segments, kernel, strategy))
    return out, (whole.Attended(q, k, v, out, lse), segments)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: whole.Kernel, strategy: Strategy
) -> tuple[jax.Array, jax.Array]:
    edges = zigzag.edges_of(segments)

    def turn(state: State, kv: jax.Array, r: Any) -> State:
        (first, last), sight = state, zigzag.sight_of(edges, r, q.shape[1] // 2)
        k, v = zigzag.keys(kv, sight)
        out, lse = zigzag.pair_forward(zigzag.queries(q, sight), k, v, sight, kernel)
        (out, out_either), (lse, lse_either) = jnp.split(out, 2), jnp.split(lse, 2)
        last = zigzag.merged(last, (out, lse))
        either = zigzag.merged(zigzag.where(sight.earlier, first, last), (out_either, lse_either))
        return zigzag.where(sight.earlier, (either, last), (first, either))

    own = zigzag.own_forward(q, k, v, segments, kernel)
    state = tuple(zip(jnp.split(own[0].astype(FP32), 2, 1), jnp.split(own[1], 2, 2), strict=True))
    (out, lse), (out_last, lse_last) = _turns(strategy, jnp.stack([k, v]), state, turn, turn)
    return jnp.concatenate([out, out_last], 1).astype(q.dtype), jnp.concatenate([lse, lse_last], 2)


def _backward_rule(
    kernel: whole.Kernel, strategy: Strategy, saved: tuple[whole.Attended, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    x, segments = saved
    edges, ring = zigzag.edges_of(segments), strategy == "ring"
    kv = lax.optimization_barrier(jnp.stack([x.k, x.v]))  # else XLA may keep what the forward pass has received
    size, chunk = axis_size(AXIS), x.q.shape[1] // 2

    def through(kv: jax.Array, r: Any) -> tuple[jax.Array, jax.Array]:
        """What turn r adds to the gradients of q, and of `kv`."""
        sight = zigzag.sight_of(edges, r, chunk)
        q, out, now_d_out = (zigzag.queries(a, sight) for a in (x.q, x.out, d_out))
        k, v = zigzag.keys(kv, sight)
        now = whole.Attended(q, k, v, out, zigzag.queries(x.lse, sight, 2))
        d_q, d_k, d_v = zigzag.pair_backward(now, now_d_out, sight, kernel)
        d_kv = jnp.stack([d_k, d_v]).astype(FP32)
        return zigzag.of_queries(d_q.astype(FP32), sight), zigzag.of_keys(d_kv, sight)

    def first(own_q: jax.Array, kv: jax.Array, r: Any) -> State:
        d_q, d_kv = through(kv, r)
        if ring:
            return own_q + d_q, d_kv
        nothing = compat.vary(jnp.zeros((size, *d_kv.shape), FP32), compat.varying_axes(d_kv))
        return own_q + d_q, lax.dynamic_update_index_in_dim(nothing, d_kv, zigzag.source(r), 0)

    def turn(state: State, kv: jax.Array, r: Any) -> State:
        d_q, sums = state
        if ring:
            sums = pass_on(sums, AXIS)  # travels behind its keys: as late as the turn that adds to it
        now_q, now_kv = through(kv, r)
        if ring:
            return d_q + now_q, sums + now_kv
        return d_q + now_q, lax.dynamic_update_index_in_dim(sums, now_kv, zigzag.source(r), 0)

    own_q, own_k, own_v = zigzag.own_backward(x, d_out, segments, kernel)
    d_q, sums = _turns(strategy, kv, own_q.astype(FP32), first, turn)
    sums = pass_on(sums, AXIS) if ring else lax.psum_scatter(sums, AXIS, scatter_dimension=0)
    d_k, d_v = sums[0] + own_k, sums[1] + own_v
    return d_q.astype(x.q.dtype), d_k.astype(x.k.dtype), d_v.astype(x.v.dtype), None


_in_turns.defvjp(_forward_rule, _backward_rule)


def _turns(
    strategy: Strategy,
    kv: jax.Array,
    state: State,
    first: Callable[..., State],
    turn: Callable[..., State],
) -> State:
    """`first`, then `turn`, with the keys and values of the device r places before.

    Each hop spans one block: the first what makes `state`, the others the turn before. Else XLA may send twice while
    it computes once, as keys depend on nothing that is computed.
    """
    last, together = axis_size(AXIS) - 1, lax.optimization_barrier
    if strategy == "all_gather":
        everything = lax.all_gather(kv, AXIS)
        of = lambda r: lax.dynamic_index_in_dim(everything, zigzag.source(r), 0, keepdims=False)
        by_turn = lambda state, r: (turn(state, of(r), r), None)
        return lax.scan(by_turn, first(state, of(1), 1), jnp.arange(2, last + 1))[0]
    state, kv = together((state, pass_on(kv, AXIS)))
    if last == 1:
        return first(state, kv, 1)
    by_hop = lambda carry, r: (together((turn(*carry, r), pass_on(carry[1], AXIS))), None)
    carry = together((first(state, kv, 1), pass_on(kv, AXIS)))
    if last > 2:
        carry, _ = lax.scan(by_hop, carry, jnp.arange(2, last))
    return turn(*carry, last)
