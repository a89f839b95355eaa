"""The only place that multiplies activations by a weight; what a product's precision is, is decided here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, num_contracted: int = 1) -> jax.Array:
    """`x [..., *in] @ w [*in, *out] + bias [*out]` -> `[..., *out]`, `in` being `num_contracted` dims.

    Both are flattened to matrices first: XLA's CPU back end multiplies bf16 batches of matrices several times more
    slowly than one matrix, and cuBLAS sees one large product.
    """
    lead, contracted = x.shape[: x.ndim - num_contracted], w.shape[:num_contracted]
    assert x.shape[x.ndim - num_contracted :] == contracted, (x.shape, w.shape)
    inner = math.prod(contracted)
    y = product(x.reshape(-1, inner), w.reshape(inner, -1)).reshape(*lead, *w.shape[num_contracted:])
    return y if bias is None else y + bias


def product(x: jax.Array, w: jax.Array, *, transposed: bool = False, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`x [rows, in] @ w [in, out]`, or `w [out, in]` when `transposed`."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=out_dtype or x.dtype)
