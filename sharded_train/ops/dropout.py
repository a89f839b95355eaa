"""Dropout whose masks belong to tokens, not to devices: the same on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, key: jax.Array, tokens: jax.Array, rate: float) -> jax.Array:
    """Zero entries of `x [batch, seq, dim]` with probability `rate`, scaling the rest by 1 / (1 - rate).

    `tokens [batch, seq]` numbers every token of the global batch; its mask depends on that number alone.
    """
    if rate == 0:
        return x
    one = lambda token: jax.random.bernoulli(jax.random.fold_in(key, token), 1 - rate, x.shape[-1:])
    keep = jax.vmap(jax.vmap(one))(tokens)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
