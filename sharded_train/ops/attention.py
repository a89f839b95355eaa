"""Causal attention within documents, over the heads that this device holds."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["auto", "xla", "cudnn"]
CUDNN_MAX_HEAD_DIM = 128  # on every GPU from Ampere on


def choose(implementation: Implementation, platform: str, head_dim: int, dtype: jnp.dtype) -> Literal["xla", "cudnn"]:
    """What "auto" means: cuDNN's flash attention where it exists and is exact, plain XLA elsewhere."""
    if implementation != "auto":
        return implementation
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and head_dim % 8 == 0 and dtype.itemsize == 2
    return "cudnn" if platform == "gpu" and fits else "xla"


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """Each query attends to the keys at or before its place in the row that `visible` allows.

    q `[batch, seq, heads, head_dim]`, k and v `[batch, keys, kv_heads, head_dim]`, heads a multiple of kv_heads;
    visible `[batch, seq, keys]` bool, None for plain causal with seq = keys.
    """
    if implementation == "cudnn":
        mask = None if visible is None else visible[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=visible is None, implementation="cudnn")
    return _xla(q, k, v, visible)


def within_documents(segments: jax.Array) -> jax.Array:
    """Segment ids `[batch, seq]` -> `[batch, seq, seq]`: may query t (dim 1) see key s (dim 2)?"""
    seq = segments.shape[1]
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
    return causal & (segments[:, :, None] == segments[:, None, :])


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None) -> jax.Array:
    batch, seq, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if visible is None:
        visible = (jnp.arange(seq)[:, None] >= jnp.arange(keys)[None, :])[None]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    probabilities = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), -1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", probabilities, v).reshape(q.shape)
