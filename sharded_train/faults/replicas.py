"""Whether what several devices hold alike is alike, bit for bit: a flipped bit, a bad chip or a wrong collective.

Nothing else notices a replica that drifts: each device computes with its own, and the loss is an average.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train import compat
from sharded_train.params import Tree

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_MOST = 10  # differences told


class Replicas:
    """Compares what any two devices hold alike of a state. Every process calls `differences`, at one step."""

    def __init__(self, mesh: Mesh, abstract_state: Tree):
        leaves = jax.tree.leaves_with_path(abstract_state)
        split = [_axes(leaf.sharding.spec) for _, leaf in leaves]
        self._mesh = mesh
        self._chosen = [i for i, axes in enumerate(split) if any(n > 1 for a, n in mesh.shape.items() if a not in axes)]
        self._names = [jax.tree_util.keystr(leaves[i][0], simple=True, separator="/") for i in self._chosen]
        self._specs = [leaves[i][1].sharding.spec for i in self._chosen]
        self._alike = np.stack([_groups(mesh, split[i]) for i in self._chosen]) if self._chosen else np.zeros((0, 0))

    def differences(self, state: Tree) -> list[str]:
        """In words: the leaf, and which devices of which process hold something else than the others."""
        if not self._chosen:
            return []
        leaves = jax.tree.leaves(state)
        digests = self._digests([leaves[i] for i in self._chosen])
        if jax.process_count() > 1:
            digests = multihost_utils.process_allgather(digests, tiled=True)
        found = [
            f"{name}: {words}"
            for name, of_leaf, alike in zip(self._names, np.asarray(digests).T, self._alike, strict=True)
            for words in self._odd(of_leaf, alike)
        ]
        return [*found[:_MOST], *([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])]

    @functools.cached_property
    def _digests(self) -> Any:
        """Leaves -> uint32[device, leaf]."""
        axes = self._mesh.axis_names

        def local(leaves: list[jax.Array]) -> jax.Array:
            row = jnp.stack([compat.vary(_digest(leaf), axes) for leaf in leaves])
            return row[None]

        return jax.jit(jax.shard_map(local, mesh=self._mesh, in_specs=(self._specs,), out_specs=P(axes)))

    def _odd(self, digests: np.ndarray, alike: np.ndarray) -> list[str]:
        """Of one leaf: for each set of devices that should hold alike, those that do not."""
        same = np.zeros(alike.max() + 1, digests.dtype)
        same[alike] = digests  # any one of each set
        found = []
        for group in np.unique(alike[digests != same[alike]]):
            members = np.flatnonzero(alike == group)
            (usual, count), *_ = Counter(digests[members].tolist()).most_common()
            if 2 * count > len(members):
                members = members[digests[members] != usual]
                found.append(f"{self._devices(members)} differs from the {count} others that hold the same part")
            else:
                found.append(f"{self._devices(members)} differ, and none is in the majority")
        return found

    def _devices(self, places: np.ndarray) -> str:
        devices = self._mesh.devices.reshape(-1)
        told = [f"{devices[i]} of process {devices[i].process_index}" for i in places[:4]]
        return " and ".join([*told, *([f"{len(places) - 4} more"] if len(places) > 4 else [])])


def _digest(x: jax.Array) -> jax.Array:
    """sum_i (2 i + 1) word_i mod 2^32: every weight is odd, so that no single flipped bit is lost."""
    bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    words = bits.reshape(-1).astype(jnp.uint32)
    weights = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return (words * weights).sum(dtype=jnp.uint32)


def _axes(spec: P) -> set[str]:
    """The mesh axes that an array is split over."""
    return {axis for entry in spec if entry is not None for axis in ([entry] if isinstance(entry, str) else entry)}


def _groups(mesh: Mesh, split: set[str]) -> np.ndarray:
    """For each device, in the mesh's order, a number that it shares with those that hold the same part."""
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    kept = [i for i, axis in enumerate(mesh.axis_names) if axis in split]
    sizes = [mesh.devices.shape[i] for i in kept]
    return np.ravel_multi_index(list(places[kept]), sizes) if kept else np.zeros(places.shape[1], int)
