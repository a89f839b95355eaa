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
from sharded_train.ops import attention, window, zigzag
from sharded_train.ops.attention import Kernel
from sharded_train.ops.context_cost import Strategy, kv_copies
from sharded_train.ops.cudnn import Attended, Gradients
from sharded_train.ops.saved import SAVED
from sharded_train.ops.zigzag import AXIS, FP32

State = Any


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    implementation: Literal["xla", "cudnn"],
    strategy: Strategy,
    *,
    windows: attention.Windows = (None,),
    layer: jax.Array | int = 0,
    max_documents: int | None = None,
) -> jax.Array:
    """As `attention.attention`, of the whole row, inside `jax.shard_map` over an axis `sequence` of size S > 1.

    q `[batch, seq / S, heads, head_dim]`, k and v `[batch, seq / S, kv_heads, head_dim]` and segments
    `[batch, seq / S]` are this device's two chunks of the zigzag, as `zigzag.arrange` puts them, and so is the output.
    Numbers of documents are each of one run of the row, padding's 0 included. `max_documents` is of a whole row.

    `ring` passes keys and values round, and their gradients with them: memory does not grow with S. `all_gather` holds
    the keys and values of the whole row (and once more in fp32 for their gradients). In layers with a window these two
    are one: a chunk gets the keys before it that its queries see, and no others (`ops/window.py`). `ulysses` holds
    whole rows of a share of the heads, which S must divide. Output and logsumexp are kept under the selective policy;
    what was communicated is so again in the backward pass.

    Raises ValueError if S does not divide the heads for `ulysses`.
    """
    size = axis_size(AXIS)
    assert size > 1, "the axis sequence has one device: use attention.attention"
    assert q.shape[1] % 2 == 0, q.shape
    kernels = attention.Kernels.of(implementation, windows, max_documents, layer)
    axes = sorted({AXIS, *compat.varying_axes(q, k, v, segments, kernels.this)})
    q, k, v, segments, this = (compat.vary(x, axes) for x in (q, k, v, segments, kernels.this))
    if strategy == "ulysses":
        attend = functools.partial(attention.attention, windows=windows, layer=layer, max_documents=max_documents)
        return _ulysses(q, k, v, segments, functools.partial(attend, implementation=implementation))
    return _split(q, k, v, segments, this, kernels.all, strategy)  # type: ignore[no-any-return]


# ---- heads in exchange for the sequence (Jacobs et al. 2023, arXiv:2309.14509) --------------------------------------


def _ulysses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    attend: Callable[..., jax.Array],
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
    out = attend(rows(q), rows(k), rows(v), segments)
    return lax.all_to_all(zigzag.arrange(out, size), AXIS, 1, 2, tiled=True)


# ---- rows stay split: all keys in turns, or those before a chunk -----------------------------------------------------


def _split_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    this: jax.Array,
    kernels: tuple[Kernel, ...],
    strategy: Strategy,
) -> tuple[jax.Array, tuple[Attended, jax.Array, jax.Array]]:
    def forward(kernel: Kernel) -> tuple[jax.Array, jax.Array]:
        if kernel.window is not None:
            return window.forward(q, k, v, segments, kernel)
        return _forward(q, k, v, segments, kernel, strategy)

    out, lse = (checkpoint_name(x, SAVED) for x in attention.by_kernel(kernels, this, forward))
    return out, (Attended(q, k, v, out, lse), segments, this)


def _split_backward(
    kernels: tuple[Kernel, ...],
    strategy: Strategy,
    saved: tuple[Attended, jax.Array, jax.Array],
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    x, segments, this = saved
    k, v = lax.optimization_barrier((x.k, x.v))  # else XLA may keep what the forward pass has received
    x = x._replace(k=k, v=v)

    def backward(kernel: Kernel) -> Gradients:
        if kernel.window is not None:
            d_q, d_k, d_v = window.backward(x, d_out, segments, kernel)
        else:
            d_q, d_k, d_v = _backward(x, d_out, segments, kernel, strategy)
        return d_q.astype(x.q.dtype), d_k.astype(x.k.dtype), d_v.astype(x.v.dtype)

    return *attention.by_kernel(kernels, this, backward), None, None


_split = jax.custom_vjp(lambda *args: _split_forward(*args)[0], nondiff_argnums=(5, 6))
_split.defvjp(_split_forward, _split_backward)


# ---- keys in turns: those of the device r places before, r = 1 ... S - 1 -------------------------------------------


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel, strategy: Strategy
) -> tuple[jax.Array, jax.Array]:
    edges = zigzag.edges_of(segments)

    def turn(state: State, kv: jax.Array, r: Any) -> State:
        """State: (output, lse) so far of the first chunk, and of the last, which sees something in every turn."""
        (first, last), sight = state, zigzag.sight_of(edges, r)
        k, v = zigzag.keys(kv, sight)
        out, lse = zigzag.pair_forward(zigzag.queries(q, sight), k, v, sight, kernel)
        (out, out_either), (lse, lse_either) = jnp.split(out, 2), jnp.split(lse, 2)
        last = zigzag.merged(last, (out, lse))
        either = zigzag.merged(zigzag.where(sight.earlier, first, last), (out_either, lse_either))
        return zigzag.where(sight.earlier, (either, last), (first, either))

    own = attention.forward(q, k, v, segments, kernel)
    state = tuple(zip(jnp.split(own[0].astype(FP32), 2, 1), jnp.split(own[1], 2, 2), strict=True))
    (out, lse), (out_last, lse_last) = _turns(strategy, jnp.stack([k, v]), state, turn, turn)
    return jnp.concatenate([out, out_last], 1).astype(q.dtype), jnp.concatenate([lse, lse_last], 2)


def _backward(x: Attended, d_out: jax.Array, segments: jax.Array, kernel: Kernel, strategy: Strategy) -> Gradients:
    edges, ring, size = zigzag.edges_of(segments), strategy == "ring", axis_size(AXIS)
    kv = jnp.stack([x.k, x.v])

    def through(kv: jax.Array, r: Any) -> tuple[jax.Array, jax.Array]:
        """What turn r adds to the gradients of q, and of `kv`."""
        sight = zigzag.sight_of(edges, r)
        q, out, now_d_out = (zigzag.queries(a, sight) for a in (x.q, x.out, d_out))
        k, v = zigzag.keys(kv, sight)
        now = Attended(q, k, v, out, zigzag.queries(x.lse, sight, 2))
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

    own_q, own_k, own_v = attention.backward(x, d_out, segments, kernel)
    d_q, sums = _turns(strategy, kv, own_q.astype(FP32), first, turn)
    sums = pass_on(sums, AXIS) if ring else lax.psum_scatter(sums, AXIS, scatter_dimension=0)
    return d_q, sums[0] + own_k, sums[1] + own_v


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
