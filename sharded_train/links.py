"""What the axes of a mesh run over, told from the hosts that its devices belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Link:
    """What the collectives of one axis run over: nothing (size 1), a host's inside, the network between hosts, or both.

    `hosts` is how many hosts one group of the axis touches at most, `per_host` how many devices it has there at most.
    """

    size: int
    kind: Literal["nothing", "host", "network", "both"]
    hosts: int
    per_host: int

    def words(self, platform: str = "gpu") -> str:
        """The link in words. What counts as a host of CPU devices is a process: several may share a machine."""
        cpu = platform == "cpu"
        inside, between = ("shared memory", "sockets") if cpu else ("NVLink", "network")
        at, host, hosts = ("in", "process", "processes") if cpu else ("on", "host", "hosts")
        devices = f"{self.size:,} devices"
        if self.kind == "nothing":
            return "nothing: one device"
        if self.kind == "host":
            return f"{inside}: {devices} of one host"
        if self.kind == "network":
            return f"{between}: {devices}, each {at} its own {host}"
        return f"{inside} and {between}: {devices} {at} {self.hosts:,} {hosts}, at most {self.per_host:,} {at} one"


def host_of(device: Any) -> int:
    """Number of the host, that is of the NVLink domain, that a device belongs to.

    It is `slice_index` where the device has one, else `process_index`; and always `process_index` for CPU devices and
    for those of a compile-only topology. Why, read in XLA (xla/pjrt/distributed/topology_util.cc, BuildGlobalTopology)
    and tried with jax 0.10.2 and 0.12.0.1:

    - GPUs of several processes: `slice_index` is the index of the GPU's NVLink fabric (NVML's cluster UUID and clique)
      when every GPU has one, as on an NVL72 rack over several machines, else that of the machine's boot id. So it is
      right for one process a host, one process a GPU, and racks. `JAX_PARTITION_INDEX` overrides it.
    - GPUs of one process: 0 for all.
    - CPU devices share memory within a process and talk over sockets between processes, even on one machine, where
      all would say 0 for the one boot id. A single process's say nothing.
    - Compile-only devices say 0 whatever the topology asked for, and their `process_index` is the host.
    """
    compile_only = getattr(getattr(device, "client", None), "runtime_type", None) == "compile_only_runtime"
    domain = getattr(device, "slice_index", None)
    if domain is None or compile_only or getattr(device, "platform", None) == "cpu":
        return device.process_index
    return domain


def hosts_of(array: np.ndarray) -> np.ndarray:
    """Host number of every device of an array, in the array's shape."""
    return np.array([host_of(device) for device in array.flat], dtype=int).reshape(array.shape)


def links(array: np.ndarray, names: Sequence[str]) -> dict[str, Link]:
    """Per axis, what its collectives run over, read from the devices as they stand."""
    hosts = hosts_of(array)
    return {axis: _link(np.moveaxis(hosts, i, -1).reshape(-1, hosts.shape[i])) for i, axis in enumerate(names)}


def _link(groups: np.ndarray) -> Link:
    """The link of an axis from the hosts `[num_groups, size]` of its groups."""
    size = groups.shape[1]
    if size == 1:
        return Link(1, "nothing", 1, 1)
    counts = [np.unique(group, return_counts=True)[1] for group in np.unique(groups, axis=0)]
    hosts, per_host = max(len(c) for c in counts), max(c.max() for c in counts)
    kind: Literal["host", "network", "both"] = "host" if hosts == 1 else "network" if per_host == 1 else "both"
    return Link(size, kind, hosts, int(per_host))
