"""Where the axes of a mesh lie on the hosts, and what that costs: quiz 2, from the compiled program.

    python benchmarks/mappings.py [--config FILE] [--cluster h100:8x8] [--seed N] [--json OUT] [--config.KEY=VALUE ...]

Sizes stay the same, places change: each axis once innermost, so that it gets a host's NVLink and the others the network
(`mesh.order`, with `mesh.allow_tensor_across_hosts` where tensor does not fit), and once every device drawn at random.
Each mapping is compiled for the cluster and its schedule run on paper; the random one is the first program with its
devices shuffled, since what a program computes and sends does not depend on where its devices stand.

Within a ring over hosts that hold unequally many of its members, the host with the fewest NICs sets the pace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from sharded_train import launch
from sharded_train.flops import flops_of
from sharded_train.links import hosts_of
from sharded_train.mesh import resolve_sizes
from sharded_train.recipe import Recipe, load
from sharded_train.rehearse import clusters, hlo, timeline
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.compare import BEST
from sharded_train.rehearse.compile import Compiled, compile_for
from sharded_train.rehearse.pace import pace_of
from sharded_train.rehearse.timeline import exposed_seconds, seconds_in_words
from sharded_train.rehearse.wires import Collective, collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.tables import bytes_in_words, new_table

ROOT = Path(__file__).parent.parent
SHORT = {"pipeline": "PP", "data": "DP", "sequence": "CP", "tensor": "TP"}
OUTSIDE_IN = ("pipeline", "data", "sequence", "tensor")


@dataclasses.dataclass(frozen=True)
class Placed:
    """One way to place a mesh on the hosts, and what its step is."""

    name: str
    rides_on: Mapping[str, str]
    nvlink_bytes: float
    network_bytes: float
    exposed: float
    step: float


def mappings(recipe: Recipe, cluster: Cluster, seed: int) -> Iterator[Placed]:
    """Each axis of more than one device innermost, tensor first, and then all at random."""
    sizes = resolve_sizes(recipe.mesh, cluster.num_devices)
    axes = [axis for axis in reversed(OUTSIDE_IN) if sizes[axis] > 1]
    first: Compiled | None = None
    for inner in axes:
        order = (*(axis for axis in _outer(inner) if axis != inner), inner)
        mesh = dataclasses.replace(recipe.mesh, order=order, allow_tensor_across_hosts=inner != "tensor")
        compiled = compile_for(dataclasses.replace(recipe, mesh=mesh), cluster)
        first = first or compiled
        across = " and ".join(SHORT[axis] for axis in OUTSIDE_IN if axis in axes and axis != inner)
        yield measured(
            f"{SHORT[inner]} inside a host, {across} across", compiled, hosts_of(compiled.program.mesh.devices)
        )
    if first is not None:
        hosts = hosts_of(first.program.mesh.devices)
        yield measured(
            "all at random", first, np.random.default_rng(seed).permutation(hosts.ravel()).reshape(hosts.shape)
        )


def _outer(inner: str) -> tuple[str, ...]:
    """Axes from outermost on: tensor is across, where it is not inside."""
    return OUTSIDE_IN if inner == "tensor" else ("tensor", *OUTSIDE_IN[:-1])


def measured(name: str, compiled: Compiled, hosts: np.ndarray) -> Placed:
    """What the step of a program is when its devices stand on these hosts, an array of the mesh's shape."""
    cluster = compiled.cluster
    places = Places(dict(zip(compiled.program.mesh.axis_names, hosts.shape, strict=True)), hosts)
    module = hlo.parse(compiled.text)
    pace = pace_of(compiled.program.pipe, module, compiled.program.model.layer_windows)
    found, unknown = collectives(module, places, pace)
    assert not unknown, unknown
    found = [dataclasses.replace(each, per_host=fewest_on_a_host(each, places)) for each in found]
    model = flops_of(compiled.program)
    time = timeline.describe(module, cluster, found, model, "bf16", pace)
    return Placed(
        name,
        {"+".join(each.axes): each.link for each in found if each.link != "none"},
        float(sum(over_nvlink(each) * each.times for each in found)),
        float(sum(over_network(each) * each.times for each in found)),
        exposed_seconds(time),
        time["step_seconds"],
    )


def fewest_on_a_host(collective: Collective, places: Places) -> int:
    """The fewest members that a host has of a group along the collective's axes, of those hosts that have any."""
    if collective.link != "both" or not collective.axes:
        return collective.per_host
    names = list(places.sizes)
    last = np.moveaxis(places.hosts, [names.index(axis) for axis in collective.axes], range(-len(collective.axes), 0))
    groups = last.reshape(-1, math.prod(places.sizes[axis] for axis in collective.axes))
    return int(min(np.unique(group, return_counts=True)[1].min() for group in groups))


def over_nvlink(collective: Collective) -> float:
    """Bytes that each device sends over NVLink in one run."""
    return collective.wire_bytes if collective.link in ("NVLink", "both") else 0.0


def over_network(collective: Collective) -> float:
    """Bytes that the busiest NIC sends in one run."""
    if collective.link == "both":
        return collective.wire_bytes / collective.per_host
    return collective.wire_bytes if collective.link == "network" else 0.0


def print_table(found: Sequence[Placed], console: Console) -> None:
    """A row for each mapping, the shortest step marked."""
    best = min(each.step for each in found)
    columns = ("sent over NVLink", "sent over the network", "waits", "step, at least", "of the best")
    table = new_table("mapping", *columns, right=columns)
    table.columns[0].no_wrap = True
    for each in found:
        table.add_row(
            each.name,
            bytes_in_words(round(each.nvlink_bytes)),
            bytes_in_words(round(each.network_bytes)),
            seconds_in_words(each.exposed),
            seconds_in_words(each.step),
            f"{each.step / best:.2f}×" + (f" {BEST}" if each.step == best else ""),
        )
    console.print(table)


def main() -> None:
    """Compile, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "llama3_8b.py")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--seed", type=int, default=0, help="of the random mapping")
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    launch.without_gpu()
    recipe, cluster = load(args.config, overrides), clusters.parse(args.cluster)
    found = list(mappings(recipe, cluster, args.seed))
    sizes = resolve_sizes(recipe.mesh, cluster.num_devices)
    console = Console(width=120, highlight=False)
    shape = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    console.print(
        f"{args.config.name} on {cluster.words}, {shape}, ZeRO {recipe.zero.stage}; bytes of one device in a step"
    )
    print_table(found, console)
    if args.json:
        args.json.write_text(
            json.dumps([dataclasses.asdict(each) for each in found], indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
