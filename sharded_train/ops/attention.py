"""Causal attention within documents, over the heads that this device holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sharded_train import compat
from sharded_train.ops import cudnn, tiles
from sharded_train.ops.cudnn import Attended, Gradients
from sharded_train.ops.saved import SAVED

Implementation = Literal["auto", "xla", "cudnn"]
CUDNN_MAX_HEAD_DIM = 128  # on every GPU from Ampere on, which is the first that has it
BY_KERNEL = "by_kernel"  # the scope of conditionals in which a layer takes the branch of its window
Windows = Sequence[int | None]  # of the layers in turn, again and again; None: all keys


def choose(implementation: Implementation, platform: str, head_dim: int, dtype: jnp.dtype) -> Literal["xla", "cudnn"]:
    """What "auto" means: cuDNN's flash attention where it exists and is exact, plain XLA elsewhere."""
    if implementation != "auto":
        return implementation
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0 and dtype.itemsize == 2
    return "cudnn" if platform == "gpu" and fits and cudnn.capability() >= 8.0 else "xla"


class Kernel(NamedTuple):
    """What computes, and what is known of the rows before they are seen."""

    name: Literal["xla", "cudnn"]
    window: int | None  # a query sees the last so many keys of its document, itself included; None: all
    max_documents: int  # a row's, see `attention`


class Kernels(NamedTuple):
    """A kernel for each kind of layer, and which of them is this layer's (0 where there is one)."""

    all: tuple[Kernel, ...]
    this: jax.Array

    @classmethod
    def of(
        cls, name: Literal["xla", "cudnn"], windows: Windows, max_documents: int | None, layer: jax.Array | int
    ) -> Kernels:
        kinds = tuple(dict.fromkeys(windows))
        limit = cudnn.MOST_DOCUMENTS if max_documents is None else max_documents
        number = jnp.array([kinds.index(window) for window in windows], jnp.int32)[layer % len(windows)]
        return cls(tuple(Kernel(name, window, limit) for window in kinds), number)


def by_kernel(kernels: tuple[Kernel, ...], this: jax.Array, fn: Callable[[Kernel], Any]) -> Any:
    """`fn` of this layer's kernel. Layers of several kinds are one loop, in which each takes its own branch."""
    if len(kernels) == 1:
        return fn(kernels[0])
    with jax.named_scope(BY_KERNEL):
        return lax.switch(this, [functools.partial(fn, kernel) for kernel in kernels])


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    implementation: Literal["xla", "cudnn"],
    *,
    windows: Windows = (None,),
    layer: jax.Array | int = 0,
    max_documents: int | None = None,
) -> jax.Array:
    """Each query attends to the keys of its document at or before its place in the row, or the last few of them.

    q `[batch, seq, heads, head_dim]`, k and v `[batch, seq, kv_heads, head_dim]`, heads a multiple of kv_heads;
    segments `[batch, seq]` int32, one number a document, whose tokens stand side by side. Layer i of the model sees
    `windows[i % len(windows)]` keys.

    Output and logsumexp are kept under the selective policy. cuDNN's table of documents holds `max_documents` a row, on
    average over a device's rows (None: `cudnn.MOST_DOCUMENTS`); with more the output is NaN, and 1 says that no row
    holds several, padding at its end aside.
    """
    kernels = Kernels.of(implementation, windows, max_documents, layer)
    axes = compat.varying_axes(q, k, v, segments, kernels.this)
    q, k, v, segments, this = (compat.vary(x, axes) for x in (q, k, v, segments, kernels.this))
    return _attention(q, k, v, segments, this, kernels.all)  # type: ignore[no-any-return]


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, this: jax.Array, kernels: tuple[Kernel, ...]
) -> tuple[jax.Array, tuple[Attended, jax.Array, jax.Array]]:
    made = by_kernel(kernels, this, lambda kernel: forward(q, k, v, segments, kernel))
    out, lse = (checkpoint_name(x, SAVED) for x in made)
    return out, (Attended(q, k, v, out, lse), segments, this)


def _attention_backward(
    kernels: tuple[Kernel, ...], saved: tuple[Attended, jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    x, segments, this = saved

    def gradients(kernel: Kernel) -> Gradients:
        d_q, d_k, d_v = backward(x, d_out, segments, kernel)
        return d_q, d_k.astype(x.k.dtype), d_v.astype(x.v.dtype)

    return *by_kernel(kernels, this, gradients), None, None


_attention = jax.custom_vjp(lambda *args: _attention_forward(*args)[0], nondiff_argnums=(5,))
_attention.defvjp(_attention_forward, _attention_backward)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, kernel: Kernel
) -> tuple[jax.Array, jax.Array]:
    """The attention, and the logsumexp of each query's scores, `[batch, heads, seq]` fp32."""
    seq, window = q.shape[1], kernel.window
    if kernel.name == "cudnn":
        return cudnn.forward(q, k, v, segments, kernel.max_documents, window)
    if is_band(seq, window):
        return tiles.band_forward(q, _behind(k, window), _behind(v, window), segments, _behind(segments, window, -1))
    return tiles.tiled_forward(q, k, v, tiles.causal_tiles(seq, window), tiles.within(segments, window))


def backward(x: Attended, d_out: jax.Array, segments: jax.Array, kernel: Kernel) -> Gradients:
    """Gradients of q in its dtype, of k and v in theirs or fp32. `out` and `lse` may be those over more keys than
    these: then they are the gradients by way of these alone.
    """
    seq, window = x.q.shape[1], kernel.window
    if kernel.name == "cudnn":
        return cudnn.backward(x, d_out, segments, kernel.max_documents, window)
    if is_band(seq, window):
        wide = x._replace(k=_behind(x.k, window), v=_behind(x.v, window))
        d_q, d_k, d_v = tiles.band_backward(wide, d_out, segments, _behind(segments, window, -1))
        return d_q, d_k[:, -seq:], d_v[:, -seq:]
    return tiles.tiled_backward(x, d_out, tiles.causal_tiles(seq, window), tiles.within(segments, window))


def is_band(seq: int, window: int | None) -> bool:
    """Whether a window is so short that keys beyond the row's beginning cost less than those outside of the window."""
    return window is not None and 2 * window <= seq


def _behind(x: jax.Array, window: int | None, fill: int = 0) -> jax.Array:
    """With what the first query of a row would see before it."""
    assert window is not None
    return jnp.pad(x, [(0, 0), (window - 1, 0)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def pairs_seen(seq: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in a row of one document."""
    beyond = 0 if window is None else max(seq - window, 0)
    return (seq * (seq + 1) - beyond * (beyond + 1)) // 2
