"""The only place that multiplies activations by a layer's weight; what a product's precision is, is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from sharded_train import compat
from sharded_train.collectives import TensorParallel, axis_size
from sharded_train.ops import fp8
from sharded_train.ops.dot import dot
from sharded_train.ops.mx import block_dot
from sharded_train.params import Tree
from sharded_train.precision.blocks import quantised


class Deferred(flax.struct.PyTreeNode):
    """A weight whose gradient `x^T d_y` is left for later: the cotangents of two zeros are its factors.

    A pullback returns a cotangent for each argument and nothing else. So the product takes two zeros that it does not
    use, shaped like x and y, and its own vjp (`_product`) returns the factors as theirs, and none for w:

        y = x w        d_x, d_w, (d_zero_x, d_zero_y) = d_y w^T, None, (x, d_y)

    The zeros are never made. `x` is None where another weight of the same input has it. In FP8 the factors are
    quantised, and the cotangent of `scale` is what their product is to be multiplied by; blocks are quantised later.
    """

    w: jax.Array | fp8.Observed
    x: jax.Array | None  # [rows, in]
    y: jax.Array  # [rows, out]
    scale: jax.Array | None = None
    blocks: bool = flax.struct.field(pytree_node=False, default=False)  # whether the product is in them

    @classmethod
    def of(cls, w: jax.Array | fp8.Observed, rows: int, num_in: int, *, x: bool, axes: tuple[str, ...]) -> Deferred:
        """With zeros that vary over `axes`."""
        zeros = lambda n, dtype: compat.vary(jnp.zeros((rows, n), dtype), axes)
        if not isinstance(w, fp8.Observed):
            return cls(w, zeros(num_in, w.dtype) if x else None, zeros(w.size // num_in, w.dtype))
        assert w.w is not None
        how, num_out = w.w.how, w.size // num_in
        blocks = how.scaling == "blocks"
        of_x, of_y = (w.w.q.dtype, w.w.q.dtype) if blocks else (how.forward, how.backward)
        scale = compat.vary(jnp.float32(0), axes)
        return cls(w.replace(grad=None), zeros(num_in, of_x) if x else None, zeros(num_out, of_y), scale, blocks)


Weight = jax.Array | Deferred | fp8.Observed
Input = jax.Array | fp8.Entered


def linear(x: jax.Array, w: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`x [rows, in] @ w [*in, *out] + bias [*out]` -> `[rows, out]`: dims of a weight are taken together.

    Where `in` ends is told by x. Rows are all tokens of a batch: XLA's CPU back end multiplies batches of matrices
    several times more slowly than one matrix, and cuBLAS sees one large product.
    """
    return linears(x, [w], [bias])[0]


def linears(
    x: jax.Array | fp8.Entered, weights: Sequence[Weight], biases: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """The same of several weights that multiply one input: those in FP8 share it quantised."""
    as_fp8 = {i: both for i, w in enumerate(weights) if (both := _in_fp8(x, w)) is not None}
    made = dict(zip(as_fp8, fp8.products(x, list(as_fp8.values())), strict=True)) if as_fp8 else {}
    ys = [made[i] if i in made else _plain(x, w) for i, w in enumerate(weights)]  # type: ignore[arg-type]
    return [plus(y, bias) for y, bias in zip(ys, biases, strict=True)]


def plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`y [..., out]` and its bias, if it has one: added in fp32, so that its gradient is a sum over tokens in fp32."""
    return y if bias is None else (y.astype(jnp.float32) + bias.reshape(-1).astype(jnp.float32)).astype(y.dtype)


def entered(x: jax.Array, weights: Sequence[Weight], tp: TensorParallel) -> Input:
    """`x [batch, seq between blocks, in]` whole, for these weights: in FP8 where all are, by a scale that is known."""
    those = [w.w if isinstance(w, Deferred) else w for w in weights]
    in_fp8 = [w for w in those if isinstance(w, fp8.Observed) and w.w is not None and w.w.x_scale is not None]
    return fp8.enter(x, in_fp8, tp) if axis_size("tensor") > 1 and len(in_fp8) == len(those) else tp.enter(x)


def _in_fp8(x: Input, w: Weight) -> tuple[fp8.Observed, fp8.Factors | None] | None:
    """A weight in FP8 as a matrix, and the zeros for what its gradient is made of later; None of another one."""
    of, factors = (w.w, (w.x, w.y, w.scale)) if isinstance(w, Deferred) else (w, None)
    return (of.each(lambda w: w.reshape(x.shape[1], -1)), factors) if isinstance(of, fp8.Observed) else None


def _plain(x: jax.Array, w: Any) -> jax.Array:
    of, zeros = (w.w, (w.x, w.y)) if isinstance(w, Deferred) else (w, None)
    matrix: jax.Array = of.reshape(x.shape[1], -1)  # type: ignore[union-attr]
    x = compat.vary(x, compat.varying_axes(matrix))
    return _product(x, matrix if zeros else compat.vary(matrix, compat.varying_axes(x)), zeros)  # type: ignore[no-any-return]


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array, zeros: Tree) -> jax.Array:
    """With zeros for x and d_y their cotangents are those, and w has none."""
    return dot(x, w, out_dtype=x.dtype)


def _backward(saved: Tree, d_y: jax.Array) -> tuple[jax.Array, jax.Array | None, Tree]:
    x, w, wanted = saved
    d_x = dot(d_y, w, transpose_b=True, out_dtype=x.dtype)
    if wanted is None:
        return d_x, dot(x, d_y, transpose_a=True, out_dtype=w.dtype), None
    return d_x, None, (None if wanted[0] is None else x, d_y)


_product.defvjp(lambda x, w, zeros: (_product(x, w, zeros), (x, w, jax.tree.map(lambda _: (), zeros))), _backward)


def deferred_gradient(x: jax.Array, kept: Deferred, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of a weight of that shape, fp32, from the input and what was kept."""
    fp32 = jnp.dtype(jnp.float32)
    if kept.scale is None:
        return dot(x, kept.y, transpose_a=True, out_dtype=fp32).reshape(shape)
    with jax.named_scope("fp8"):
        if kept.blocks:
            return block_dot(quantised(x, 0), quantised(kept.y, 0), fp32).reshape(shape)
        return dot(x, kept.y, transpose_a=True, out_dtype=fp32, precision="highest").reshape(shape) * kept.scale


def similarity(x: jax.Array, rows: jax.Array) -> jax.Array:
    """fp32 products of `x [tokens, embed]` with each row of a table `[vocab, embed]`; not differentiable."""
    return dot(x, rows, transpose_b=True, out_dtype=jnp.dtype(jnp.float32))
