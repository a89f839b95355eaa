"""Normalisation over the last dim, computed in fp32 and returned in the dtype it came in.

Gain and bias are applied in fp32 too: their gradients are sums over all tokens, which a GPU would make in bf16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * gain` (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps) * gain.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """`(x - mean(x)) / std(x) * gain + bias` (Ba et al. 2016, arXiv:1607.06450)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    x32 = x32 * lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps) * gain.astype(jnp.float32)
    return (x32 + bias.astype(jnp.float32)).astype(x.dtype)
