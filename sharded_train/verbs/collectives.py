"""`sharded-train collectives`: are the collectives right over each axis of a mesh, and how fast; what to run first."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from sharded_train.bench.measure import Point, constants, measure, summary
from sharded_train.bench.operations import OPERATIONS
from sharded_train.bench.picture import svg
from sharded_train.devices import kind_of
from sharded_train.errors import ConfigError, did_you_mean
from sharded_train.exits import Exit
from sharded_train.mesh import MeshConfig, build_mesh
from sharded_train.rehearse.outputs import STDOUT, problems_of
from sharded_train.rehearse.timeline import seconds_in_words
from sharded_train.show import mesh_facts
from sharded_train.tables import WIDTH, bytes_in_words, links_table, new_table

LEAST, MOST_CPU, MOST_GPU = 4 * 2**10, 4 * 2**20, 2**30  # bytes
NOTE = (
    "Medians; all groups of an axis at once. Bandwidths by the conventions of nccl-tests: algorithm bandwidth is "
    "size / time, bus bandwidth that of each device's link. Latency is the smallest size's time."
)


def collectives(
    config: MeshConfig,
    *,
    axis: str | None,
    least: int,
    most: int | None,
    repeat: int,
    outputs: Mapping[str, Path],
) -> int:
    """Measure over each axis of the mesh with more than one device, or over one; print, and write "json" and "svg".

    Returns FAILED where a result was wrong. Raises ConfigError before anything runs: an unknown axis, one of one
    device, sizes that are none, a file that cannot be written.
    """
    mesh = build_mesh(config)
    largest = most or (MOST_CPU if mesh.devices.flat[0].platform == "cpu" else MOST_GPU)
    axes = _axes(mesh, axis)
    problems = [f"--max={largest}: is below --min={least}"] if largest < least else []
    problems += problems_of(outputs) if jax.process_index() == 0 else []
    if problems:
        raise ConfigError(problems)
    speaks = jax.process_index() == 0
    progress = (lambda words: print(words, file=sys.stderr)) if speaks and sys.stderr.isatty() else lambda words: None
    points = measure(mesh, axes, least, largest, repeat, progress)
    facts = describe(points, mesh)
    wrong = sum(each.wrong for each in points)
    if speaks:
        _write(facts, points, outputs)
        if outputs.get("json") != STDOUT:
            _print(facts, points)
        if wrong:
            print(f"error: {wrong:,} entries of results are wrong: see the column", file=sys.stderr)
    return Exit.FAILED if wrong else Exit.DONE


def describe(points: Sequence[Point], mesh: Mesh) -> dict[str, Any]:
    """All that was found as JSON values; `device` holds what `rehearse` can take of it."""
    shown = mesh_facts(mesh.devices, mesh.axis_names)
    first = mesh.devices.flat[0]
    return {
        "collectives": 1,  # the version of this form
        "kind": kind_of(first.device_kind),
        "device_kind": first.device_kind,
        "hosts": shown["num_hosts"],
        "devices_per_host": mesh.size // shown["num_hosts"],
        "mesh": shown,
        "device": constants(points, mesh),
        "points": [dataclasses.asdict(each) for each in points],
    }


def _axes(mesh: Mesh, asked: str | None) -> list[str]:
    several = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if asked is not None and asked not in mesh.axis_names:
        raise ConfigError(f"--axis={asked}: no axis of the mesh{did_you_mean(asked, mesh.axis_names)}")
    if asked is not None and asked not in several:
        sizes = " × ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
        raise ConfigError(f"--axis={asked}: has one device in {sizes}; set --config.mesh.{asked}=N")
    if not several:
        raise ConfigError("collectives need two devices or more; on a CPU: --cpu-devices=8")
    return several if asked is None else [asked]


def _print(facts: Mapping[str, Any], points: Sequence[Point]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    hosts, each = facts["hosts"], facts["devices_per_host"]
    console.print(Text(f"{hosts} × {each} × {facts['device_kind']}", style="bold"))
    console.print(links_table(facts["mesh"]))
    uses = new_table("operation", "used for")
    for operation in OPERATIONS.values():
        uses.add_row(operation.name, operation.use)
    console.print(Text(""), uses)
    for axis in dict.fromkeys(each.axis for each in points):
        console.print()
        console.print(Text(f"Over {axis}, {facts['mesh']['links'][axis]['words']}", style="bold"))
        for table in _tables(points, axis):
            console.print(table)
    console.print()
    console.print(Text(NOTE))
    for words in _links_in_words(facts["device"]):
        console.print(Text(words))


def _tables(points: Sequence[Point], axis: str) -> Iterator[Any]:
    """Of each operation the numbers that decide, then bus bandwidth by size."""
    heads = ("latency", "algorithm", "bus", "wrong")
    table = new_table("operation", *heads, "runs as", right=heads)
    for row in summary(points, axis):
        rates = (_rate(row[f"{kind}_bandwidth"]) for kind in ("algorithm", "bus"))
        latency = seconds_in_words(row["latency"])
        table.add_row(row["operation"], latency, *rates, f"{row['wrong']:,}", row["runs_as"])
    yield table
    those = [each for each in points if each.axis == axis]
    columns = [bytes_in_words(size) for size in sorted({each.bytes for each in those})]
    by_size = new_table("GB/s on the bus", *columns, right=columns)
    for name in dict.fromkeys(each.operation for each in those):
        found = {bytes_in_words(each.bytes): each.bus_bandwidth for each in those if each.operation == name}
        by_size.add_row(name, *(f"{found[size] / 1e9:.3g}" for size in columns))
    yield by_size


def _links_in_words(device: Mapping[str, float]) -> Iterator[str]:
    for name, words in (("nvlink", "within a host"), ("network", "between hosts")):
        if f"{name}_bandwidth" in device:
            rate, latency = _rate(device[f"{name}_bandwidth"]), seconds_in_words(device[f"{name}_latency"])
            yield f"Measured {words}, for `rehearse`: {rate} each direction of a device, latency {latency}."


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _write(facts: Mapping[str, Any], points: Sequence[Point], outputs: Mapping[str, Path]) -> None:
    text = dumps(facts, indent=2, allow_nan=False) + "\n"
    for kind, path in outputs.items():
        if path == STDOUT:
            print(text, end="")
            continue
        words = {axis: link["words"] for axis, link in facts["mesh"]["links"].items()}
        path.write_text(text if kind == "json" else svg(points, words), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
