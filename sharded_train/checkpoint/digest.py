"""Digests of arrays: 64 bits a leaf, the same on every mesh, on devices by XLA and on the host by NumPy.

An element with the bits x (as uint32) at index (i_0, i_1, ...) is hashed with its place, and the hashes are summed:

    w = sum_d i_d A_d,   v = sum_d i_d B_d   (mod 2^32, A_d and B_d odd and different for each dim)
    h = mix(x ^ w),   digest = (sum h mod 2^32,  sum h (2 v + 1) mod 2^32)

`mix` is the finalizer of MurmurHash3: one-to-one, so that one changed element, whatever was changed in it, changes the
first sum for certain. It is not linear, so that several changes cancel in both sums as rarely as 64 random bits agree;
a plain weighted sum misses every pair of flipped sign bits, since 2^31 (a + b) = 0 for odd a and b. Places count dim by
dim and not by one running number, which would begin again after 2^32 elements. A sum has no order: shards are summed
where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Digest = tuple[int, int]
_A, _B = 0x9E3779B1, 0x85EBCA77  # of dim 0; each further dim multiplies them by _NEXT
_NEXT = 0x2545F491
_MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_BLOCK = 1 << 15  # elements that the host hashes at once: they stay in its cache
_MASK = 0xFFFFFFFF


def on_devices(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """uint32 [leaf, 2]: the digests of global arrays, in the order of `leaves`, begun and not waited for.

    Every process calls it. Nothing is moved but the sums.
    """
    arrays = list(leaves.values())
    sharding = next((x.sharding for x in arrays if isinstance(x.sharding, NamedSharding)), None)
    sums: jax.Array = _compiled(None if sharding is None else sharding.mesh)(arrays)
    if jax.default_backend() == "cpu":
        sums.block_until_ready()  # of two programs at once virtual devices could wait for each other
    return sums


def as_digests(leaves: Mapping[str, Any], sums: jax.Array) -> dict[str, Digest]:
    """What `on_devices` found, waited for, by the leaves' names."""
    return {name: (int(a), int(b)) for name, (a, b) in zip(leaves, np.asarray(sums), strict=True)}


def on_host(part: npt.NDArray[Any], start: Sequence[int] = ()) -> Digest:
    """The digest of a part of a leaf, whose first element has the index `start` in the leaf.

    The sums (mod 2^32) of the digests of a leaf's parts are its digest.
    """
    part = np.ascontiguousarray(part)
    words = _host_words(part)
    starts = [*(start or [0] * part.ndim), *[0] * (words.ndim - part.ndim)]
    if words.ndim == 0:
        words, starts = words.reshape(1), [0]
    first, second = [_host_place(words.shape, starts, of) for of in (_A, _B)]
    total = (0, 0)
    rows, columns = first[0].size, words.shape[-1]
    flat = words.reshape(rows, columns)
    height, width = max(1, _BLOCK // max(1, columns)), min(columns, _BLOCK)
    for row in range(0, rows, height):
        for column in range(0, columns, width or 1):
            at = np.s_[row : row + height], np.s_[column : column + width]
            w, v = (leading[at[0], None] + last[None, at[1]] for leading, last in (first, second))
            total = added(total, _host_sums(flat[at], w, v))
    return total


def added(a: Digest, b: Digest) -> Digest:
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def as_text(digest: Digest) -> str:
    """Such as 00c0ffee12345678."""
    return f"{digest[0]:08x}{digest[1]:08x}"


def _constants(start: int, count: int) -> list[int]:
    return [start * pow(_NEXT, dim, 1 << 32) & _MASK for dim in range(count)]


# ---- on devices ------------------------------------------------------------------------------------------------------


@functools.cache
def _compiled(mesh: Any) -> Any:
    return jax.jit(_all, out_shardings=None if mesh is None else NamedSharding(mesh, P()))


def _all(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_one(x) for x in arrays]) if arrays else jnp.zeros((0, 2), jnp.uint32)


def _one(x: jax.Array) -> jax.Array:
    words = _device_words(x)
    w, v = (_device_place(words.shape, start) for start in (_A, _B))
    h = words ^ w
    for shift, factor in _MIX:
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    h = h ^ (h >> 16)
    return jnp.stack([h.sum(dtype=jnp.uint32), (h * (2 * v + 1)).sum(dtype=jnp.uint32)])


def _device_words(x: jax.Array) -> jax.Array:
    """The bits as uint32; of 64 bits two words in one more dim at the end."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, bits).astype(jnp.uint32)


def _device_place(shape: tuple[int, ...], start: int) -> jax.Array:
    terms = [
        lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(of)
        for dim, of in enumerate(_constants(start, len(shape)))
    ]
    return sum(terms, jnp.zeros(shape, jnp.uint32))


# ---- on the host -----------------------------------------------------------------------------------------------------


def _host_words(part: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger]:
    """As `_device_words`, without a copy: what is narrower than 32 bits is widened block by block."""
    if part.dtype == np.bool_:
        return part.view(np.uint8)
    if part.dtype.itemsize == 8:
        return part.reshape(*part.shape, 1).view(np.uint32)
    return part.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[part.dtype.itemsize])


def _host_place(shape: tuple[int, ...], starts: Sequence[int], of: int) -> tuple[npt.NDArray[np.uint32], ...]:
    """A place as the sum of two: of all dims but the last, flattened, and of the last."""
    terms = [
        ((np.arange(size, dtype=np.uint64) + np.uint64(start)) * np.uint64(factor)).astype(np.uint32)
        for size, start, factor in zip(shape, starts, _constants(of, len(shape)), strict=True)
    ]
    leading = np.zeros(1, np.uint32)
    for term in terms[:-1]:
        leading = (leading[:, None] + term[None, :]).reshape(-1)
    return leading, terms[-1]


def _host_sums(words: npt.NDArray[Any], w: npt.NDArray[np.uint32], v: npt.NDArray[np.uint32]) -> Digest:
    h = np.bitwise_xor(words, w, out=w, dtype=np.uint32)
    shifted = np.empty_like(h)
    for shift, factor in _MIX:
        np.right_shift(h, np.uint32(shift), out=shifted)
        np.bitwise_xor(h, shifted, out=h)
        np.multiply(h, np.uint32(factor), out=h)
    np.right_shift(h, np.uint32(16), out=shifted)
    np.bitwise_xor(h, shifted, out=h)
    first = int(h.sum(dtype=np.uint32))
    np.add(v, v, out=v)
    np.add(v, np.uint32(1), out=v)
    np.multiply(v, h, out=v)
    return first, int(v.sum(dtype=np.uint32))
