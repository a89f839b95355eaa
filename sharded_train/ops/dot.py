"""Matrix products in the form that each platform is fastest at. Not differentiable: callers write their own vjp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def dot(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: jnp.dtype,
    precision: str | None = None,
) -> jax.Array:
    """`a [..., m, k] @ b [..., k, n]` -> `[..., m, n]`, either with its last two dims swapped; summed in fp32.

    Of factors in FP8 a GPU sums fast, with fewer bits, unless `precision` is "highest".

    XLA's CPU back end has one fast bf16 product (AMX where there is one): the left side not transposed, the result
    fp32. It is up to seven times as fast as the others, so that the detour by way of it pays; numbers in
    FP8 are made bf16 for it, which is exact.
    """
    plain = functools.partial(
        _plain, transpose_a=transpose_a, transpose_b=transpose_b, out_dtype=out_dtype, precision=precision
    )
    if a.dtype.itemsize > 2 or a.dtype == jnp.float16:
        return plain(a, b)

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        if transpose_a:
            a = lax.optimization_barrier(a.mT)  # else XLA folds the transpose back into the product
        return _plain(a, b, False, transpose_b, jnp.dtype(jnp.float32), None).astype(out_dtype)

    return lax.platform_dependent(a, b, cpu=on_cpu, default=plain)  # type: ignore[no-any-return]


def _plain(
    a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool, out_dtype: jnp.dtype, precision: str | None
) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    contracted = ((a.ndim - 2 if transpose_a else a.ndim - 1,), (b.ndim - 1 if transpose_b else b.ndim - 2,))
    dims = (contracted, (batch, batch))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out_dtype)
