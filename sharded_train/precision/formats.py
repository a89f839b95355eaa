"""8-bit floating-point numbers: their limits, the cast, and what it costs (Micikevicius et al. 2022, arXiv:2209.05433).

A tensor is multiplied by its scale, clipped and cast. Scales lie within 2^-126 and 2^126, so that they and their
inverses are finite normal numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

E4M3 = jnp.dtype(jnp.float8_e4m3fn)  # 4 bits of exponent, 3 of mantissa: up to 448, no infinity
E5M2 = jnp.dtype(jnp.float8_e5m2)  # up to 57344
LEAST, MOST = 2.0**-126, 2.0**126  # scales


@dataclasses.dataclass(frozen=True)
class Fp8:
    """How products are quantised. `scaling` says where scales come from: the state, or the numbers at hand, of all of a
    tensor or of its blocks (`precision.blocks`).
    """

    scaling: Literal["delayed", "current", "blocks"]
    forward: jnp.dtype = E4M3
    backward: jnp.dtype = E5M2
    margin: int = 0


def largest(dtype: jnp.dtype) -> float:
    return float(jnp.finfo(dtype).max)


def scale_for(amax: jax.Array, dtype: jnp.dtype, margin: int) -> jax.Array:
    """largest / amax / 2^margin, within bounds: numbers up to amax then fill the format."""
    return jnp.clip(largest(dtype) / jnp.maximum(amax, LEAST) * 2.0**-margin, LEAST, MOST)


def current_scale(amax: jax.Array, dtype: jnp.dtype, margin: int) -> jax.Array:
    """The power of two below `scale_for`; 1 where amax is zero or not finite.

    With powers of two a number is quantised alike whatever the scale, as long as it is within the format's range: two
    devices or microbatches that find another amax still compute the same.
    """
    bits = lax.bitcast_convert_type(scale_for(amax, dtype, margin).astype(jnp.float32), jnp.uint32)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(is_amax(amax), power, 1)


def is_amax(amax: jax.Array) -> jax.Array:
    """Whether something was seen: neither nothing but zeros, nor anything that is not finite."""
    return jnp.isfinite(amax) & (amax > 0)


def quantise(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x times scale in the format, clipped to its largest number. `scale` is a number, or one for each of dim 0.

    An infinity becomes NaN: clipped, it would not be noticed.
    """
    return scaled_to(x, scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim)), dtype)


def scaled_to(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same with scales that broadcast to x."""
    top, wide = largest(dtype), x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(wide), lax.clamp(-top, wide * scale, top), jnp.nan).astype(dtype)


def observe(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What quantising x comes to, `[..., 3]`: the largest magnitude; the shares that saturate and that become zero.

    A number beyond the largest saturates; one of at most half the smallest, and not zero, is lost. With a scale for
    each of dim 0 so are the results.
    """
    dims = tuple(range(scale.ndim, x.ndim))
    size = jnp.abs(x.astype(jnp.float32))
    return counted(size, size * scale.reshape(scale.shape + (1,) * len(dims)), dtype, dims)


def counted(size: jax.Array, scaled: jax.Array, dtype: jnp.dtype, dims: tuple[int, ...]) -> jax.Array:
    """The same, from magnitudes in fp32 and these times their scale."""
    lost = (scaled <= float(jnp.finfo(dtype).smallest_subnormal) / 2) & (size > 0)
    counts = [which.astype(jnp.uint32) for which in (scaled > largest(dtype), lost)]
    # In one pass: reductions of their own XLA's CPU back end makes forty times as slow (it splits sums into windows).
    both = lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2])
    amax, *counts = lax.reduce((size, *counts), (jnp.float32(0), jnp.uint32(0), jnp.uint32(0)), both, dims)
    share = lambda count: count.astype(jnp.float32) / (size.size // amax.size)
    return jnp.stack([amax, *map(share, counts)], -1)
