"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating the two halves of each head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """`theta^(-2i/head_dim)` for each pair i, in radians a position: `[head_dim / 2]` fp64."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def stretched(freq: np.ndarray, factor: float, low: float, high: float, original_context: int) -> np.ndarray:
    """Llama-3.1's scaling: long waves slowed by `factor`, short ones kept, those between blended.

    A wave is long when fewer than `low` of its periods fit the original context, short when more than `high` do.
    """
    periods = original_context * freq / (2 * math.pi)
    keep = np.clip((periods - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / factor)


def tables(positions: jax.Array, freq: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every token's angles: positions `[batch, seq]` -> two `[batch, seq, 1, head_dim / 2]` fp32."""
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn `x [batch, seq, heads, head_dim]` by its tokens' angles, in fp32."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
