"""The device mesh: axis sizes, and which device stands where, from the hosts' real topology."""

from __future__ import annotations

import dataclasses

AXES = ("pipeline", "data", "sequence", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways each axis splits the devices; one size may be -1 (all that remain)."""

    data: int = -1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    order: tuple[str, ...] = AXES  # outermost first; the last one's neighbours are the nearest devices
    allow_tensor_across_hosts: bool = False
