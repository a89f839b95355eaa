"""A weight product in FP8: f8 times f8, the result scaled, and what was seen on the way.

    y = (q(x s_x) q(w s_w)) / (s_x s_w)       d_x = (q(d_y s_g) q(w s_w)^T) / (s_g s_w)
                                              d_w = (q(x s_x)^T q(d_y s_g)) / (s_x s_g)

with numbers of `formats`. Operands are multiplied as they are: XLA makes a cuBLAS call in FP8 of that, wherever it
stands, while it leaves a product of dequantised numbers in bf16 in loops. Forward it may sum fast, backward it may not.

What is seen leaves as the cotangent of zeros (how: `linear.Deferred`), one for each use of the weight, so that autodiff
does not add up what is to be maximised.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.collectives import TensorParallel
from sharded_train.ops import mx
from sharded_train.ops.dot import dot
from sharded_train.params import Tree
from sharded_train.precision.formats import Fp8, current_scale, observe, quantise

SEEN = 3  # numbers of `formats.observe`


class Quantised(flax.struct.PyTreeNode):
    """A weight in FP8, and its product's scales: fp32, one each or `[layers]`; None: taken from the numbers at hand.

    One that is to be quantised in blocks is not yet: it is in the dtype of activations.
    """

    q: jax.Array
    w_scale: Any
    x_scale: jax.Array | None
    g_scale: jax.Array | None
    how: Fp8 = flax.struct.field(pytree_node=False)


class Observed(flax.struct.PyTreeNode):
    """A quantised weight to be multiplied by; the cotangents of the zeros are its gradient and what was seen."""

    w: Quantised | None
    grad: jax.Array | None  # shaped as the weight, in the dtype that gradients are computed in; None: left for later
    g: jax.Array  # [uses, 3], see `formats.observe`: of the output's cotangent
    x: jax.Array | None  # the same of the input; None where another weight of the same input has it

    @classmethod
    def of(cls, w: Quantised, uses: int, dtype: jnp.dtype, *, x: bool, axes: tuple[str, ...]) -> Observed:
        """With zeros that vary over `axes`."""
        zeros = lambda shape, dtype=jnp.float32: compat.vary(jnp.zeros(shape, dtype), axes)
        return cls(w, zeros(w.q.shape, dtype), zeros((uses, SEEN)), zeros((uses, SEEN)) if x else None)

    @property
    def size(self) -> int:
        assert self.w is not None
        return self.w.q.size

    def use(self, number: int) -> Observed:
        """With the zeros of one use alone."""
        one = lambda zeros: None if zeros is None else zeros[number : number + 1]
        return self.replace(g=one(self.g), x=one(self.x))  # type: ignore[no-any-return]

    def each(self, fn: Any) -> Observed:
        """With `fn` of the weight, as of a plain one: a slice, or another shape."""
        assert self.w is not None
        grad = None if self.grad is None else fn(self.grad)
        return self.replace(w=self.w.replace(q=fn(self.w.q)), grad=grad)  # type: ignore[no-any-return]


def one_use(weights: Tree, number: int) -> Tree:
    """A layer's weights for one of the block's uses of them."""
    one = lambda w: w.use(number) if isinstance(w, Observed) else w
    return jax.tree.map(one, weights, is_leaf=lambda w: isinstance(w, Observed))


# Zeros whose cotangents make a weight's gradient later: q(x s_x) `[rows, in]`, None where another weight of the same
# input has it; q(d_y s_g) `[rows, out]`; 1 / (s_x s_g). Of products in blocks x, d_y and 1.
Factors = tuple[jax.Array | None, jax.Array, jax.Array | None]


class Entered(flax.struct.PyTreeNode):
    """Quantised activations, and zeros whose cotangent is theirs: autodiff gives numbers in FP8 none but in FP8."""

    # Bytes of f8 `[..., in]`: to write one layer into a stack of f8, XLA's CPU back end converts the whole stack.
    q: jax.Array
    zero: jax.Array  # [..., in]
    inverse: jax.Array  # 1 / s_x

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    def reshape(self, *shape: int) -> Entered:
        return self.replace(q=self.q.reshape(shape), zero=self.zero.reshape(shape))  # type: ignore[no-any-return]


def enter(x: jax.Array, weights: Sequence[Observed], tp: TensorParallel | None = None) -> Entered:
    """x quantised for products by these weights, then, with `tp`, gathered: by a scale that its devices share."""
    ws, slot = [w.w for w in weights if w.w is not None], next((w.x for w in weights if w.x is not None), None)
    x = compat.vary(x, compat.varying_axes(*(w.q for w in ws), *(w.g for w in weights)))
    return _enter(ws[0].how, tp, x, ws[0].x_scale, slot)  # type: ignore[no-any-return]


def _entering(how: Fp8, tp: TensorParallel | None, x: jax.Array, known: jax.Array | None, slot: Tree) -> Any:
    if tp is not None:  # else XLA leaves out that x is rounded: its amax would not be that of one device
        x = lax.optimization_barrier(x)
    with jax.named_scope("fp8"):
        scale = _scale(known, x, how.forward, how.margin)
        q = lax.bitcast_convert_type(quantise(x, scale, how.forward), jnp.uint8)
        seen = None if slot is None else observe(x, scale, how.forward)[None]
    q = q if tp is None else tp.enter(q)
    return Entered(q, compat.vary(jnp.zeros(q.shape, x.dtype), compat.varying_axes(q)), 1 / scale), seen


_enter = jax.custom_vjp(lambda *args: _entering(*args)[0], nondiff_argnums=(0, 1))
_enter.defvjp(_entering, lambda _, tp, seen, d: (d.zero if tp is None else tp.leave(d.zero), None, seen))


@jax.custom_vjp
def together(h: Entered, y: jax.Array) -> tuple[Entered, jax.Array]:
    """Neither before the other is there, nor going back; the zeros are never made, as a barrier would have them."""
    q, y = lax.optimization_barrier((h.q, y))
    return h.replace(q=q), y


def _apart(_: None, d: tuple[Entered, jax.Array]) -> tuple[Entered, jax.Array]:
    zero, d_y = lax.optimization_barrier((d[0].zero, d[1]))
    return Entered(None, zero, None), d_y  # type: ignore[arg-type]


together.defvjp(lambda h, y: (together(h, y), None), _apart)


def products(x: jax.Array | Entered, weights: Sequence[tuple[Observed, Factors | None]]) -> list[jax.Array]:
    """`x [rows, in] @ w [in, out]` of each of the weights: x is quantised once, and kept once for the backward pass."""
    ws = [w.w for w, _ in weights if w.w is not None]
    slots: list[Tree] = [{"grad": w.grad, "g": w.g, "factors": factors} for w, factors in weights]
    if ws[0].how.scaling == "blocks":
        assert not isinstance(x, Entered)
        x = compat.vary(x, compat.varying_axes(*(w.q for w in ws), *(w.g for w, _ in weights)))
        slots = [{**slot, "x": w.x} for slot, (w, _) in zip(slots, weights, strict=True)]
        return mx.products(x, [w.q for w in ws], slots)  # type: ignore[no-any-return]
    entered = x if isinstance(x, Entered) else enter(x, [w for w, _ in weights])
    return _products(ws[0].how, entered, ws, slots)  # type: ignore[no-any-return]


@jax.named_scope("fp8")
def _forward(how: Fp8, x: Entered, ws: list[Quantised], slots: list[Tree]) -> tuple[list[jax.Array], Tree]:
    q = lax.bitcast_convert_type(x.q, how.forward)
    ys = [_scaled(dot(q, w.q, out_dtype=x.zero.dtype), x.inverse * (1 / w.w_scale)) for w in ws]
    wanted = jax.tree.map(lambda _: (), slots)  # which there are, without the arrays
    return ys, (x.replace(zero=None), ws, wanted)


@jax.named_scope("fp8")
def _backward(how: Fp8, saved: Tree, d_ys: list[jax.Array]) -> tuple[Entered, None, list[Tree]]:
    x, ws, wanted = saved
    q_x = lax.bitcast_convert_type(x.q, how.forward)
    each = [_back(how, q_x, x.inverse, w, d_y, want) for w, d_y, want in zip(ws, d_ys, wanted, strict=True)]
    d_x = functools.reduce(jnp.add, (d_x for d_x, _ in each)).astype(d_ys[0].dtype)
    return Entered(None, d_x, None), None, [found for _, found in each]  # type: ignore[arg-type]


def _back(
    how: Fp8, q_x: jax.Array, x_inverse: jax.Array, w: Quantised, d_y: jax.Array, wanted: Tree
) -> tuple[jax.Array, Tree]:
    """One weight's part of the cotangent of x, fp32, and the cotangents of its zeros."""
    scale = _scale(w.g_scale, d_y, how.backward, how.margin)
    q_g, seen = quantise(d_y, scale, how.backward), observe(d_y, scale, how.backward)
    exact = functools.partial(dot, out_dtype=d_y.dtype, precision="highest")
    d_x = exact(q_g, w.q, transpose_b=True).astype(jnp.float32) * (1 / scale * (1 / w.w_scale))
    factor = compat.vary(x_inverse * (1 / scale), compat.varying_axes(q_x, q_g))
    found: Tree = {"grad": None, "g": seen[None], "factors": None}
    if wanted["grad"] is not None:
        found["grad"] = _scaled(exact(q_x, q_g, transpose_a=True), factor)
    if wanted["factors"] is not None:
        found["factors"] = (None if wanted["factors"][0] is None else q_x, q_g, factor)
    return d_x, found


_products = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_products.defvjp(_forward, _backward)


def _scale(known: jax.Array | None, x: jax.Array, dtype: jnp.dtype, margin: int) -> jax.Array:
    return current_scale(jnp.abs(x.astype(jnp.float32)).max(), dtype, margin) if known is None else known


def _scaled(x: jax.Array, by: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * by).astype(x.dtype)
