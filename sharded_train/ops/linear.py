"""The only place that multiplies activations by a weight; what a product's precision is, is decided here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from sharded_train import compat
from sharded_train.ops.dot import dot


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x [rows, in] @ w [*in, *out] + bias [*out]` -> `[rows, out]`: dims of a weight are taken together.

    Where `in` ends is told by x. Rows are all tokens of a batch: XLA's CPU back end multiplies batches of matrices
    several times more slowly than one matrix, and cuBLAS sees one large product.
    """
    split = next(i for i in range(w.ndim) if math.prod(w.shape[:i]) == x.shape[1])
    y = product(x, w.reshape(x.shape[1], math.prod(w.shape[split:])))
    return y if bias is None else y + bias.reshape(-1)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x [rows, in] @ w [in, out]`, differentiable by both."""
    return _product(compat.vary(x, compat.varying_axes(w)), compat.vary(w, compat.varying_axes(x)))


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return dot(x, w, out_dtype=x.dtype)


def _backward(saved: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return dot(d_y, w, transpose_b=True, out_dtype=x.dtype), dot(x, d_y, transpose_a=True, out_dtype=w.dtype)


_product.defvjp(lambda x, w: (_product(x, w), (x, w)), _backward)


def similarity(x: jax.Array, rows: jax.Array) -> jax.Array:
    """fp32 products of `x [tokens, embed]` with each row of a table `[vocab, embed]`; not differentiable."""
    return dot(x, rows, transpose_b=True, out_dtype=jnp.dtype(jnp.float32))
