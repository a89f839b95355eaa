"""A weight product in MXFP8: numbers in blocks of 32 along the dim that is contracted, of `precision.blocks`.

    y = [x]_in [w]_in       d_x = [d_y]_out [w]_out^T       d_w = [x]_rows^T [d_y]_rows

where the index says what the blocks lie along. So every factor is quantised twice, each time from the number itself. On
NVIDIA's Blackwell XLA makes a call of cuDNN of each product; elsewhere dequantised numbers are multiplied in bf16,
which comes to the same: they are exact in it, and their products in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.ops.dot import dot
from sharded_train.params import Tree
from sharded_train.precision.blocks import E8M0, Blocks, dequantised, observe, quantised
from sharded_train.precision.formats import E4M3


@jax.custom_vjp
def products(x: jax.Array, ws: list[jax.Array], slots: list[Tree]) -> list[jax.Array]:
    """`x [rows, in] @ w [in, out]` of each weight; the cotangents of `slots` are its gradient, and what was seen.

    `slots` are zeros: "g" `[1, 3]` and, or None, "x" `[1, 3]`, "grad" like the weight, "factors" of a gradient that is
    left for later, which are kept as they are. The weights have no cotangent.
    """
    return _forward(x, ws, slots)[0]


@jax.named_scope("fp8")
def _forward(x: jax.Array, ws: list[jax.Array], slots: list[Tree]) -> tuple[list[jax.Array], Tree]:
    along_in = quantised(x, 1)
    ys = [block_dot(along_in, quantised(w, 0), x.dtype) for w in ws]
    seen = [None if slot["x"] is None else observe(x, 1)[None] for slot in slots]
    if any(slot["factors"] is not None for slot in slots):
        kept: Any = x
    else:  # As bytes: to write one layer into a stack of f8, XLA's CPU back end converts the whole stack.
        kept = jax.tree.map(lambda a: lax.bitcast_convert_type(a, jnp.uint8), quantised(x, 0))
    return ys, (kept, ws, seen, jax.tree.map(lambda _: (), slots))  # the last: which there are, without the arrays


@jax.named_scope("fp8")
def _backward(saved: Tree, d_ys: list[jax.Array]) -> tuple[jax.Array, None, list[Tree]]:
    kept, ws, seen, wanted = saved
    if isinstance(kept, Blocks):
        x = Blocks(lax.bitcast_convert_type(kept.q, E4M3), lax.bitcast_convert_type(kept.scale, E8M0), kept.dim)
    else:
        x = quantised(kept, 0)
    d_xs, found = [], []
    for w, d_y, of_x, want in zip(ws, d_ys, seen, wanted, strict=True):
        d_xs.append(block_dot(quantised(d_y, 1), quantised(w, 1), jnp.dtype(jnp.float32)))
        grad, factors = None, want["factors"]
        if factors is None:
            grad = block_dot(x, quantised(d_y, 0), d_y.dtype)
        else:
            one = compat.vary(jnp.float32(1), compat.varying_axes(d_y))
            factors = (None if factors[0] is None else kept, d_y, one)
        found.append({"grad": grad, "g": observe(d_y, 1)[None], "x": of_x, "factors": factors})
    return functools.reduce(jnp.add, d_xs).astype(d_ys[0].dtype), None, found


products.defvjp(_forward, _backward)


def block_dot(a: Blocks, b: Blocks, out_dtype: jnp.dtype) -> jax.Array:
    """The product of two matrices over the dims that their blocks lie along: `[m, n]`, m being a's other dim."""

    def on_gpu(a: Blocks, b: Blocks) -> jax.Array:
        a, b = a.along_last(), b.along_last()
        y = jax.nn.scaled_matmul(a.q[None], b.q[None], a.scale[None], b.scale[None], out_dtype)[0]
        return compat.vary(y, compat.varying_axes(a.q, b.q))  # which jax.nn forgets

    def emulated(a: Blocks, b: Blocks) -> jax.Array:
        turn_a, turn_b = a.dim == 0, b.dim == 1
        return dot(dequantised(a), dequantised(b), transpose_a=turn_a, transpose_b=turn_b, out_dtype=out_dtype)

    return lax.platform_dependent(a, b, cuda=on_gpu, default=emulated)  # type: ignore[no-any-return]
