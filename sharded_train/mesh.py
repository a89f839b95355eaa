"""The device mesh: axis sizes, and which device stands where, from the hosts' real topology.

A *host* here is what one NVLink (or, without NVLink, one PCIe) domain joins; what lies between hosts is the network.
See `links.host_of` for how it is told. Devices are ordered by host, then process, then their place within the process,
and laid out over the axes in `mesh.order`, so that the innermost axis gets the nearest devices. Device ids are
never used: they leave gaps between processes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharded_train.errors import ConfigError
from sharded_train.links import host_of, hosts_of

AXES = ("pipeline", "data", "sequence", "tensor")
Fits = Callable[[Mapping[str, int]], bool]  # whether sizes of the axes would do for what is to run on them
ANY: Fits = lambda sizes: True


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways each axis splits the devices; one size may be -1 (all that remain)."""

    data: int = -1  # different rows; ZeRO splits the state over it
    tensor: int = 1  # Megatron's: devices that share each layer's matrices, within a host
    pipeline: int = 1  # stages of layers
    sequence: int = 1  # parts of each row
    order: tuple[str, ...] = AXES  # outermost first; the last one's neighbours are the nearest devices
    allow_tensor_across_hosts: bool = False  # otherwise refused


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What a device of a cluster that is not there would say of itself: host = process, as on one process a host."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"


def resolve_sizes(config: MeshConfig, num_devices: int, fits: Fits = ANY) -> dict[str, int]:
    """Axis sizes, in `mesh.order`, whose product is the number of devices; -1 becomes what remains.

    Others are offered if they pass `fits`, such as that heads split over tensor.

    Raises:
        ConfigError: naming every violation, each with its operands and the nearest sizes that work.
    """
    assert num_devices > 0, num_devices
    asked = {axis: getattr(config, axis) for axis in AXES}
    rest = [axis for axis, size in asked.items() if size == -1]
    problems = [
        f"mesh.{axis} = {size}: a size is 1 or more, or -1 for all devices that remain"
        for axis, size in asked.items()
        if size < 1 and size != -1
    ]
    if len(rest) > 1:
        settings = " and ".join(f"mesh.{axis} = -1" for axis in rest)
        problems.append(f"{settings}: only one axis can take all devices that remain; give the others a size")
    problems += _order_problems(config.order)
    if problems:
        raise ConfigError(problems)
    fixed = math.prod(size for size in asked.values() if size != -1)
    if num_devices % fixed or (not rest and fixed != num_devices):
        raise ConfigError(_size_problem(asked, fixed, num_devices, fits))
    return {axis: num_devices // fixed if asked[axis] == -1 else asked[axis] for axis in config.order}


def layout(config: MeshConfig, devices: Sequence[Any], fits: Fits = ANY) -> np.ndarray:
    """Devices `[...]` shaped by the sizes of the axes in `mesh.order`, from outermost to innermost.

    Anything with `process_index` will do as a device, see `host_of`. All processes must pass the same list.

    Raises:
        ConfigError: if the sizes do not fit, or a tensor group does not lie within one host and
            `mesh.allow_tensor_across_hosts` is off. This looks at the resulting array, whatever made it strange.
    """
    sizes = resolve_sizes(config, len(devices), fits)
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = sorted(devices, key=lambda d: (host_of(d), d.process_index))  # stable: keeps the place in a process
    array = ordered.reshape(tuple(sizes.values()))
    if not config.allow_tensor_across_hosts:
        _check_tensor(config, hosts_of(array), tuple(sizes), fits)
    return array


def build_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices`, by default all of `jax.devices()` (which every process must then call)."""
    array = layout(config, jax.devices() if devices is None else devices)
    return Mesh(array, config.order)  # not jax.make_mesh, whose axes are Explicit in jax 0.12


def stand_ins(cluster: str) -> list[StandIn]:
    """Devices of a cluster that is not there, from "HOSTSxDEVICES" such as "8x8".

    A kind before it, as `rehearse` has in "h100:8x8", is passed over: where devices stand does not depend on it.
    """
    if not (match := re.fullmatch(r"(?:\w+:)?([1-9]\d*)x([1-9]\d*)", cluster)):
        raise ConfigError(f"cluster {cluster!r}: wanted HOSTSxDEVICES, such as 8x8 for 8 hosts of 8 devices each")
    hosts, devices = int(match[1]), int(match[2])
    return [StandIn(host * devices + i, host, host) for host in range(hosts) for i in range(devices)]


def _order_problems(order: Sequence[str]) -> list[str]:
    if sorted(order) == sorted(AXES):
        return []
    faults = [f"{axis} is missing" for axis in AXES if axis not in order]
    faults += [f"{axis} stands {n} times" for axis, n in Counter(order).items() if n > 1]
    for axis in order:
        if axis not in AXES:
            close = difflib.get_close_matches(axis, AXES, n=1)
            faults.append(f"there is no axis {axis!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return [f"mesh.order = {tuple(order)}: wanted each of {', '.join(AXES)} once, but {', '.join(faults)}"]


def _size_problem(asked: Mapping[str, int], fixed: int, num_devices: int, fits: Fits) -> str:
    """The equation that does not hold, and what is nearest to it and does."""
    rest = [axis for axis, size in asked.items() if size == -1]
    product = " × ".join(f"{axis} {size}" for axis, size in asked.items() if size != -1)
    if rest:
        ratio = f"{num_devices / fixed:.4g}"
        problem = f"mesh.{rest[0]} = -1: number of devices {num_devices} / ({product}) = {ratio}, no whole number"
    else:
        problem = f"mesh: {product} = {fixed}, but the number of devices is {num_devices}"
    found = _nearest(asked, num_devices, fits)
    return f"{problem}; nearest that works: {' or '.join(found)}" if found else problem


def _nearest(asked: Mapping[str, int], num_devices: int, fits: Fits) -> list[str]:
    """Settings whose product is the number of devices: those that change the fewest sizes by the smallest factors."""
    fixed = {axis: size for axis, size in asked.items() if size != -1}

    def changes(sizes: Mapping[str, int]) -> dict[str, int]:
        return {axis: sizes[axis] for axis, old in fixed.items() if old != sizes[axis]}

    def cost(change: Mapping[str, int]) -> tuple[int, float, bool, bool]:
        factors = [math.log(size / asked[axis]) ** 2 for axis, size in change.items()]
        return len(factors), round(sum(factors), 6), "data" not in change, "tensor" not in change

    products = (dict(zip(asked, sizes, strict=True)) for sizes in _factorisations(num_devices, len(asked)))
    options = [changes(sizes) for sizes in products if fits(sizes)]
    options.sort(key=cost)
    best = [option for option in options if len(option) == len(options[0])][:2]
    return [" with ".join(f"mesh.{axis} = {size}" for axis, size in option.items()) for option in best]


def _factorisations(n: int, length: int) -> Iterator[tuple[int, ...]]:
    if length == 1:
        yield (n,)
        return
    for first in _divisors(n):
        yield from ((first, *others) for others in _factorisations(n // first, length - 1))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_tensor(config: MeshConfig, hosts: np.ndarray, names: tuple[str, ...], fits: Fits) -> None:
    """Every tensor group within one host, or a ConfigError that names the first that is not."""
    crossing = _crossing(hosts, names)
    if not crossing.any():
        return
    sizes = dict(zip(names, hosts.shape, strict=True))
    place = np.unravel_index(np.argmax(crossing), crossing.shape)
    group = np.moveaxis(hosts, names.index("tensor"), -1)[place]
    spread = ", ".join(f"{n} on host {host}" for host, n in Counter(group.tolist()).items())
    outside = zip((name for name in names if name != "tensor"), place, strict=True)
    where = ", ".join(f"{name} {i}" for name, i in outside if sizes[name] > 1)
    group_there = f"the tensor group at {where}" if where else "the tensor group"
    advice = _advice(config, hosts.ravel(), sizes, fits)
    raise ConfigError(
        f"mesh.tensor = {len(group)}: {group_there} lies across hosts ({spread}), but tensor belongs within one host's "
        f"NVLink; {advice}; or accept the network with mesh.allow_tensor_across_hosts = True"
    )


def _crossing(hosts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Whether each tensor group, `[*other axes]`, has devices of more than one host."""
    groups = np.moveaxis(hosts, list(names).index("tensor"), -1)
    return (groups != groups[..., :1]).any(axis=-1)


def _advice(config: MeshConfig, hosts: np.ndarray, sizes: Mapping[str, int], fits: Fits) -> str:
    """What would keep tensor within hosts: another size of it (data giving or taking), or tensor innermost."""
    budget = sizes["data"] * sizes["tensor"]

    def works(order: Sequence[str], tensor: int) -> bool:
        changed = {**sizes, "tensor": tensor, "data": budget // tensor}
        shape = [changed[axis] for axis in order]
        return fits(changed) and not _crossing(hosts.reshape(shape), order).any()

    inner = (*(axis for axis in config.order if axis != "tensor"), "tensor")
    if works(inner, sizes["tensor"]):
        return f"with tensor last in mesh.order = {inner} it would be"
    fit = [t for t in _divisors(budget) if works(config.order, t)]
    return f"sizes that fit: tensor = {', '.join(map(str, fit))} (with data = {budget} / tensor)"
