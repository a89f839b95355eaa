"""8-bit numbers in blocks of 32 that share a scale: MXFP8 of OCP's Microscaling Formats (MX) Specification 1.0, 2023.

A block's scale is a power of two, kept as its exponent (e8m0): the least with which the block's amax is within e4m3, so
that nothing saturates. The specification (section 6.3) rounds amax down to a power of two and clips what lies between
448 and 512 scales, by which training is worse (Mishra et al. 2025, arXiv:2506.08027).
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from sharded_train.precision.formats import E4M3, counted, scaled_to

BLOCK = 32
E8M0 = jnp.dtype(jnp.float8_e8m0fnu)
BIAS, MANTISSA = 127, 23  # of fp32, whose exponent e8m0 is
TOP = 8  # the exponent of e4m3's largest number, 1.75 x 2^8
BEYOND = 0x1FFFFF  # added to fp32's bits: the next exponent, if the mantissa is beyond 1.75


class Blocks(flax.struct.PyTreeNode):
    """A matrix `q` in e4m3 with a scale for each block of 32 along `dim`, of which it has a 32nd in `scale`."""

    q: jax.Array
    scale: jax.Array
    dim: int = flax.struct.field(pytree_node=False)

    def along_last(self) -> Blocks:
        """The same with the blocks along the last dim, the matrix transposed where they are not."""
        return self if self.dim == 1 else dataclasses.replace(self, q=self.q.T, scale=self.scale.T, dim=1)


def quantised(x: jax.Array, dim: int) -> Blocks:
    """A matrix in blocks along `dim`, a multiple of 32. An infinity becomes NaN, as under `formats.quantise`."""
    exponents = _exponents(x, dim)
    q = scaled_to(x, _inverse(exponents, dim), E4M3)
    return Blocks(q, lax.bitcast_convert_type(exponents.astype(jnp.uint8), E8M0), dim)


def dequantised(x: Blocks) -> jax.Array:
    """bf16, which is exact: 4 bits times a power of two. Below fp32's smallest normal number it may be zero."""
    exponents = lax.bitcast_convert_type(x.scale, jnp.uint8).astype(jnp.int32)
    scale = lax.bitcast_convert_type(jnp.maximum(exponents, 1) << MANTISSA, jnp.float32)
    halved = jnp.where(exponents == 0, 0.5, 1.0)  # 2^-127 is no normal number
    spread = lambda scale: _spread(scale.astype(jnp.bfloat16), x.dim)
    return x.q.astype(jnp.bfloat16) * spread(halved) * spread(scale)


def observe(x: jax.Array, dim: int) -> jax.Array:
    """As `formats.observe` of one tensor: its amax; the shares that saturate and that become zero."""
    size = jnp.abs(x.astype(jnp.float32))
    return counted(size, size * _inverse(_exponents(x, dim), dim), E4M3, (0, 1))


def _exponents(x: jax.Array, dim: int) -> jax.Array:
    """Of each block's scale, with e8m0's bias, as int32; the smallest for a block of zeros."""
    assert x.shape[dim] % BLOCK == 0, (x.shape, dim)
    amax = jnp.abs(x.astype(jnp.float32)).reshape(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :]).max(dim + 1)
    exponents = (lax.bitcast_convert_type(amax, jnp.int32) + BEYOND) >> MANTISSA
    return jnp.clip(exponents - TOP, 0, 2 * BIAS - 1)  # so that 1 / scale is a normal number


def _inverse(exponents: jax.Array, dim: int) -> jax.Array:
    """1 / scale, fp32, for each number of the matrix."""
    return _spread(lax.bitcast_convert_type((2 * BIAS - exponents) << MANTISSA, jnp.float32), dim)


def _spread(scale: jax.Array, dim: int) -> jax.Array:
    return jnp.repeat(scale, BLOCK, axis=dim)
