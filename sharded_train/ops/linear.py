"""The only place that multiplies activations by a weight; what a product's precision is, is decided here."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp

from sharded_train import compat
from sharded_train.ops import fp8
from sharded_train.ops.dot import dot


class Deferred(flax.struct.PyTreeNode):
    """A weight whose gradient `x^T d_y` is left for later: the cotangents of two zeros are its factors.

    `x [rows, in]` is None where another weight of the same input has it. In FP8 the factors are quantised, and the
    cotangent of `scale` is what their product is to be multiplied by.
    """

    w: jax.Array | fp8.Observed
    x: jax.Array | None
    y: jax.Array  # [rows, out]
    scale: jax.Array | None = None

    @classmethod
    def of(cls, w: jax.Array | fp8.Observed, rows: int, num_in: int, *, x: bool, axes: tuple[str, ...]) -> Deferred:
        """With zeros that vary over `axes`."""
        zeros = lambda n, dtype: compat.vary(jnp.zeros((rows, n), dtype), axes)
        if not isinstance(w, fp8.Observed):
            return cls(w, zeros(num_in, w.dtype) if x else None, zeros(w.size // num_in, w.dtype))
        assert w.w is not None
        how, num_out = w.w.how, w.size // num_in
        scale = compat.vary(jnp.float32(0), axes)
        return cls(w.replace(grad=None), zeros(num_in, how.forward) if x else None, zeros(num_out, how.backward), scale)


Weight = jax.Array | Deferred | fp8.Observed


def linear(x: jax.Array, w: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`x [rows, in] @ w [*in, *out] + bias [*out]` -> `[rows, out]`: dims of a weight are taken together.

    Where `in` ends is told by x. Rows are all tokens of a batch: XLA's CPU back end multiplies batches of matrices
    several times more slowly than one matrix, and cuBLAS sees one large product.
    """
    as_matrix = lambda w: w.reshape(x.shape[1], -1)
    if isinstance(w, fp8.Observed):
        y = fp8.product(x, w.each(as_matrix))
        return y if bias is None else y + bias.reshape(-1)
    if isinstance(w, Deferred):
        if isinstance(w.w, fp8.Observed):
            y = fp8.product(x, w.w.each(as_matrix), fp8.Factors(w.x, w.y, w.scale))
        else:
            matrix = as_matrix(w.w)
            y = _deferred(compat.vary(x, compat.varying_axes(matrix)), matrix, w.x, w.y)
        return y if bias is None else y + bias.reshape(-1)
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


@jax.custom_vjp
def _deferred(x: jax.Array, w: jax.Array, x_zero: jax.Array | None, y_zero: jax.Array) -> jax.Array:
    return dot(x, w, out_dtype=x.dtype)


def _backward_deferred(
    saved: tuple[jax.Array, jax.Array, tuple[()] | None], d_y: jax.Array
) -> tuple[jax.Array, None, jax.Array | None, jax.Array]:
    x, w, x_wanted = saved
    return dot(d_y, w, transpose_b=True, out_dtype=x.dtype), None, None if x_wanted is None else x, d_y


def _forward_deferred(
    x: jax.Array, w: jax.Array, x_zero: jax.Array | None, y_zero: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, tuple[()] | None]]:
    return _deferred(x, w, x_zero, y_zero), (x, w, None if x_zero is None else ())


_deferred.defvjp(_forward_deferred, _backward_deferred)


def deferred_gradient(x: jax.Array, kept: Deferred, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of a weight of that shape, fp32, from the input and what was kept."""
    fp32 = jnp.dtype(jnp.float32)
    if kept.scale is None:
        return dot(x, kept.y, transpose_a=True, out_dtype=fp32).reshape(shape)
    with jax.named_scope("fp8"):
        return dot(x, kept.y, transpose_a=True, out_dtype=fp32, precision="highest").reshape(shape) * kept.scale


def similarity(x: jax.Array, rows: jax.Array) -> jax.Array:
    """fp32 products of `x [tokens, embed]` with each row of a table `[vocab, embed]`; not differentiable."""
    return dot(x, rows, transpose_b=True, out_dtype=jnp.dtype(jnp.float32))
