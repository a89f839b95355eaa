"""Where on the mesh the groups of a collective lie: along which axes, over which links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from sharded_train.links import hosts_of

Link = Literal["none", "NVLink", "network", "both"]


@dataclasses.dataclass(frozen=True)
class Places:
    """The devices of a program by their place in its mesh: sizes by axis, and the host of each device `[*sizes]`."""

    sizes: Mapping[str, int]
    hosts: np.ndarray

    @classmethod
    def of(cls, mesh: Mesh) -> Places:
        """Those of a mesh of real or compile-only devices."""
        return cls(dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)), hosts_of(mesh.devices))

    @property
    def num_devices(self) -> int:
        return self.hosts.size

    @property
    def host_size(self) -> int:
        """How many devices the largest host has."""
        return int(np.unique(self.hosts, return_counts=True)[1].max())


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of one collective; `axes` are those that differ within a group, `note` what is odd about them.

    `link` is NVLink when each group (of a permutation: each pair) lies within one host, network when no two members
    of a group share a host, else both. `per_host` is how many members of a group one host has at most.
    """

    size: int
    count: int
    axes: tuple[str, ...]
    link: Link
    per_host: int
    note: str = ""


def place_groups(groups: np.ndarray, places: Places) -> Groups:
    """What groups `[count, size]` of device numbers are on the mesh."""
    count, size = groups.shape
    coordinates = dict(zip(places.sizes, np.unravel_index(groups, places.hosts.shape), strict=True))
    axes = tuple(axis for axis, at in coordinates.items() if (at != at[:, :1]).any())
    hosts = np.sort(places.hosts.ravel()[groups], axis=1)
    note = ""
    whole = int(np.prod([places.sizes[axis] for axis in axes], dtype=int))
    if whole != size:
        over = " x ".join(f"{axis} {places.sizes[axis]}" for axis in axes)
        note = f"groups of {size} that are no product of mesh axes: their members differ over {over}"
    elif count * size != places.num_devices:
        note = f"{count} groups of {size}, which are not all of the {places.num_devices} devices"
    per_host = int(max(np.unique(row, return_counts=True)[1].max() for row in np.unique(hosts, axis=0)))
    return Groups(size, count, axes, _link(hosts), per_host, note)


def place_pairs(pairs: np.ndarray, places: Places) -> Groups:
    """What the (source, target) pairs `[pairs, 2]` of a permutation are; a pair with itself moves nothing."""
    moved = pairs[pairs[:, 0] != pairs[:, 1]]
    if not len(moved):
        return Groups(1, len(pairs), (), "none", 1)
    groups = place_groups(moved, places)
    return dataclasses.replace(groups, note="")


def _link(hosts: np.ndarray) -> Link:
    """The link of groups with these hosts `[groups, size]`, sorted within a group."""
    if hosts.shape[1] == 1:
        return "none"
    same = hosts[:, 1:] == hosts[:, :-1]
    return "NVLink" if same.all() else "both" if same.any() else "network"
