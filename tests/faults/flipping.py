"""Arrays with one bit wrong on some of their devices."""

from __future__ import annotations

import jax
import numpy as np


def flipped(x: jax.Array, places: list[int], element: int, bit: int) -> jax.Array:
    """The same array, but for one bit on some of its devices, by their place in the mesh."""
    mesh = x.sharding.mesh  # type: ignore[attr-defined]
    wrong = {mesh.devices.reshape(-1)[place] for place in places}
    parts = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device in wrong:
            words = data.reshape(-1).view({2: np.uint16, 4: np.uint32}[data.itemsize])
            words[element] ^= words.dtype.type(1 << bit)
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
