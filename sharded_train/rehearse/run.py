"""One rehearsal: a recipe and a cluster in, the compiled program's facts out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

from sharded_train import __version__
from sharded_train.config import to_dict
from sharded_train.flops import flops_of
from sharded_train.recipe import Recipe
from sharded_train.rehearse import computed, fp8, hlo, memory, timeline, verdict, wires
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.compile import PLUGINS, Compiled, compile_for, stand_ins
from sharded_train.rehearse.pace import pace_of
from sharded_train.rehearse.wires_places import Places
from sharded_train.show import describe

HLO_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found, and the optimised HLO that it was read from."""

    facts: dict[str, Any]  # JSON values, see docs/rehearse.md
    text: str


def rehearse(recipe: Recipe, cluster: Cluster, progress: Callable[[str], Any] = lambda words: None) -> Rehearsal:
    """Compile the train step of a recipe for a cluster and read it. Raises what `compile_for` raises."""
    compiled = compile_for(recipe, cluster, progress)
    progress("counting what it holds, sends and computes")
    return Rehearsal(facts_of(compiled), compiled.text)


def facts_of(compiled: Compiled) -> dict[str, Any]:
    """Everything that a compiled step says, as JSON values."""
    recipe, cluster, program = compiled.recipe, compiled.cluster, compiled.program
    module = hlo.parse(compiled.text)
    collectives, _ = wires.collectives(module, Places.of(program.mesh))
    flops = flops_of(program)
    spans = () if program.pipe is None else program.pipe.spans(program.local.bf16_ends)
    pace = pace_of(program.pipe, module, program.model.layer_windows, spans)
    dtype = HLO_NAMES[recipe.precision.compute_dtype.name]
    shown = describe(recipe, stand_ins(cluster))
    facts: dict[str, Any] = {
        "config": to_dict(recipe),
        "cluster": cluster_facts(cluster),
        "mesh": shown["mesh"],
        "pipeline": shown["pipeline"],
        "context": shown["context"],
        "compile": {"seconds": compiled.seconds, "options": compiled.options, "versions": versions()},
        "memory": memory.describe(compiled, module, collectives),
        "wires": wires.describe(module, program.mesh, pace),
        "computed": computed.describe(module, flops, dtype, pace),
        "time": timeline.describe(module, cluster, collectives, flops, dtype, pace),
    }
    if facts["memory"]["verdict"] == "does not fit":
        facts["time"]["notes"].insert(0, verdict.UNLIKE)
    facts["fp8"] = fp8.of_text(compiled.text)
    facts["verdict"] = verdict.describe(facts)
    facts["warnings"] = [
        *cluster.remarks,
        *shown["warnings"],
        *([fp8.words(facts["fp8"])] if fp8.falls_short(facts["fp8"]) else []),
        *facts["memory"]["warnings"],
        *facts["wires"]["warnings"],
    ]
    return facts


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """The cluster as JSON values."""
    sizes = {"num_hosts": cluster.num_hosts, "devices_per_host": cluster.devices_per_host}
    device = dataclasses.asdict(cluster.device)
    return {"kind": cluster.kind, "words": cluster.words, "num_devices": cluster.num_devices, **sizes, "device": device}


def versions() -> dict[str, str]:
    """The versions of what compiled it."""
    found = {"sharded_train": __version__}
    for package in ("jax", "jaxlib", *PLUGINS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
