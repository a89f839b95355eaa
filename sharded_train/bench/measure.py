"""Times collectives: warm-up, medians, bandwidths, and the constants of a link that `rehearse` can take."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from sharded_train.bench.operations import ITEMSIZE, OPERATIONS, Operation, programs
from sharded_train.links import links

WARM_UPS = 3
IN_A_ROW = 20  # runs that a GPU is given at once; a CPU gets one, as its collectives are not to be queued
PER_POINT = 2.0  # seconds, beyond which no further repetition is begun
FOR_LINKS = ("all-reduce", "all-gather", "reduce-scatter")  # what a step is made of; their medians are a link's


@dataclasses.dataclass(frozen=True)
class Point:
    """One collective of one size over one axis. Seconds and bytes per second; `wrong` entries of all devices."""

    axis: str
    operation: str
    bytes: int
    devices: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    repetitions: int
    wrong: int


def sizes(least: int, most: int, devices: int) -> list[int]:
    """Bytes from least to most, each four times the one before; multiples of what `devices` can share in fp32."""
    unit, found, each = ITEMSIZE * devices, [], least
    while each <= most:
        found.append(max(unit, each // unit * unit))
        each *= 4
    return list(dict.fromkeys(found))


def measure(
    mesh: Mesh, axes: Iterable[str], least: int, most: int, repeat: int, progress: Callable[[str], Any]
) -> list[Point]:
    """Every operation of every size over each of the axes, all of which have more than one device."""
    found = []
    for axis in axes:
        for operation in OPERATIONS.values():
            for each in sizes(least, most, mesh.shape[axis]):
                progress(f"{axis}: {operation.name}, {each:,} bytes")
                found.append(_point(mesh, axis, operation, each, repeat))
    return found


def _point(mesh: Mesh, axis: str, operation: Operation, size: int, repeat: int) -> Point:
    start, run, wrong = programs(operation, mesh, axis, size // ITEMSIZE)
    x = start()
    in_a_row = 1 if mesh.devices.flat[0].platform == "cpu" else IN_A_ROW
    for _ in range(WARM_UPS):
        y = run(x).block_until_ready()
    took: list[float] = []
    begun = time.perf_counter()
    for _ in range(repeat):
        before = time.perf_counter()
        for _ in range(in_a_row):
            y = run(x)
        y.block_until_ready()
        took.append((time.perf_counter() - before) / in_a_row)
        if _all_think(time.perf_counter() - begun > PER_POINT):
            break
    seconds, n = statistics.median(took), mesh.shape[axis]
    bandwidth = size / seconds
    bus = bandwidth * operation.bus(n)
    return Point(axis, operation.name, size, n, seconds, bandwidth, bus, len(took), int(wrong(y)))


def _all_think(enough: bool) -> bool:
    """Process 0's word, so that all do the same number of collectives."""
    if jax.process_count() == 1:
        return enough
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(enough))


def constants(points: Sequence[Point], mesh: Mesh) -> dict[str, float]:
    """Fields of `devices.Device` that were measured: of axes within hosts NVLink's, of those across the network's.

    Bandwidth is the bus bandwidth of the largest size, latency the time of the smallest; medians over all-reduce,
    all-gather and reduce-scatter, and the best of several axes on one link.
    """
    found: dict[str, float] = {}
    for axis, link in links(mesh.devices, mesh.axis_names).items():
        those = [each for each in points if each.axis == axis and each.operation in FOR_LINKS and not each.wrong]
        if link.kind not in ("host", "network") or not those:
            continue
        name = "nvlink" if link.kind == "host" else "network"
        least, most = min(each.bytes for each in those), max(each.bytes for each in those)
        bandwidth = statistics.median(each.bus_bandwidth for each in those if each.bytes == most)
        latency = statistics.median(each.seconds for each in those if each.bytes == least)
        found[f"{name}_bandwidth"] = max(bandwidth, found.get(f"{name}_bandwidth", 0.0))
        found[f"{name}_latency"] = min(latency, found.get(f"{name}_latency", latency))
    return found


def summary(points: Sequence[Point], axis: str) -> list[Mapping[str, Any]]:
    """Of each operation over an axis: latency (its smallest size's time), best bandwidths, wrong entries in all."""
    rows: list[Mapping[str, Any]] = []
    for name, operation in OPERATIONS.items():
        those = [each for each in points if each.axis == axis and each.operation == name]
        if those:
            rows.append(
                {
                    "operation": name,
                    "latency": min(those, key=lambda each: each.bytes).seconds,
                    "algorithm_bandwidth": max(each.algorithm_bandwidth for each in those),
                    "bus_bandwidth": max(each.bus_bandwidth for each in those),
                    "wrong": sum(each.wrong for each in those),
                    "runs_as": operation.runs_as,
                }
            )
    return rows
