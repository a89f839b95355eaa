"""`audit`: what `rehearse` says of our train step, for any jitted function, sharded by GSPMD or by `shard_map`."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sharded_train import gpu_flags
from sharded_train.devices import Device
from sharded_train.rehearse import audit_memory, audit_page, computed, hlo, memory, timeline, verdict, wires
from sharded_train.rehearse import wires_tables as of_wires
from sharded_train.rehearse.clusters import Cluster, parse
from sharded_train.rehearse.compile import Phases, check_compiler, compile_lowered
from sharded_train.rehearse.products import format_of
from sharded_train.rehearse.run import cluster_facts, versions
from sharded_train.rehearse.transplant import name_of_function, transplant
from sharded_train.rehearse.wires_places import Places
from sharded_train.show import mesh_facts
from sharded_train.tables import WIDTH, bytes_in_words, links_table, new_table


@dataclasses.dataclass(frozen=True)
class Audit:
    """What was found, as JSON values in `facts`, and the optimised HLO. A notebook shows it; `print` gives tables."""

    facts: dict[str, Any]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
        for title, things in _tables(self.facts):
            console.print(Text(title, style="bold"))
            for thing in things:
                console.print(Text(thing) if isinstance(thing, str) else thing)
            console.print()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def _repr_html_(self) -> str:
        return audit_page.in_notebook(self.facts)

    def save(self, path: str | Path) -> None:
        """Write it as one HTML page that needs nothing else."""
        Path(path).write_text(audit_page.page(self.facts), encoding="utf-8")


def audit(
    fn: Callable[..., Any],
    *args: Any,
    cluster: str = "h100:8x8",
    options: Mapping[str, str | bool] | None = None,
    **kwargs: Any,
) -> Audit:
    """Compile `fn(*args, **kwargs)` for a GPU cluster that is not there, and read the program.

    Args:
        fn: any function of JAX's, jitted or not, over a mesh of the cluster's number of devices. What it is jitted with
            (shardings, donated arguments) counts; static arguments are bound before, with `functools.partial`.
        args, kwargs: arrays, or `jax.ShapeDtypeStruct`s, with their shardings. The mesh may be of virtual CPU devices,
            of `draw.cluster_mesh`, or abstract: device k of it becomes device k of the cluster.
        cluster: "KIND:HOSTSxDEVICES", or "file:SPEC.toml"; see `rehearse.clusters`.
        options: compiler options; by default those that our train step is compiled with.

    Example:
        mesh = draw.cluster_mesh("h100:8x8", data=8, tensor=8)
        w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "tensor")))
        audit(lambda w, x: x @ w, w, x, cluster="h100:8x8")

    Raises:
        ConfigError: unknown cluster, no mesh or one of another size, the compiler's plugin is missing.
        CompilerFailure: XLA gave up.
    """
    place = parse(cluster)
    check_compiler()
    phases = Phases(lambda words: None)
    with phases("trace", "tracing the function"):
        program = transplant(fn, args, kwargs, place)
    chosen = dict(options) if options is not None else gpu_flags.options("gpu") or {}
    text, stats, temporaries = compile_lowered(program.lowered, place, chosen, phases)
    module = hlo.parse(text)
    found, _ = wires.collectives(module, Places.of(program.mesh))
    dtype = _main_dtype(module, place.device)
    facts: dict[str, Any] = {
        "function": name_of_function(fn),
        "arguments": [_argument(name, leaf) for name, leaf in program.arguments.items()],
        "cluster": cluster_facts(place),
        "mesh": mesh_facts(program.mesh.devices, program.mesh.axis_names),
        "compile": {"seconds": phases.seconds, "options": chosen, "versions": versions()},
        "memory": audit_memory.describe(place.device, stats, temporaries, module, found, program),
        "wires": wires.describe(module, program.mesh),
        "computed": computed.describe(module, None, None),
        "time": timeline.describe(module, place, found, None, dtype),
    }
    facts["verdict"] = _verdict(facts, place)
    about = [*facts["memory"]["warnings"], *facts["wires"]["warnings"]]
    facts["warnings"] = [*place.remarks, *program.remarks, *about]
    return Audit(facts, text)


def _main_dtype(module: hlo.Module, device: Device) -> str:
    """HLO's name of the format of most products; bf16 where there are none."""
    flops: collections.Counter[str] = collections.Counter()
    for each in computed.count(module):
        for product in each.work.products:
            flops[product.dtype] += int(product.flops * each.times)
    return next((dtype for dtype, _ in flops.most_common() if format_of(dtype).lower() in device.peaks), "bf16")


def _argument(name: str, leaf: Any) -> dict[str, Any]:
    local = list(leaf.sharding.shard_shape(leaf.shape))
    return {
        "name": name,
        "dtype": leaf.dtype.name,
        "shape": list(leaf.shape),
        "spec": [list(dim) if isinstance(dim, tuple) else dim for dim in leaf.sharding.spec],
        "local_shape": local,
        "bytes": audit_memory.bytes_on_device(leaf),
    }


def _verdict(facts: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """One paragraph in plain words."""
    time, products = facts["time"], facts["computed"]["products"]
    step, peak = time["step_seconds"], time["peak"]
    words = [
        verdict.sentence(facts["memory"]["words"]),
        f"One call takes at least {timeline.seconds_in_words(step)}; its products are "
        f"{100 * products / (step * peak) if step else 0:.1f} % of {time['peak_words']}.",
    ]
    if step:
        words += verdict.of_time(time) if facts["memory"]["verdict"] != "does not fit" else [verdict.UNLIKE]
    return {"words": " ".join(words), "tries": []}


def _tables(facts: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """Titles and what stands below them, in the order in which one asks."""
    arguments = new_table("argument", "dtype", "shape", "split over", "on a device", "bytes", right=["bytes"])
    for each in facts["arguments"]:
        size = bytes_in_words(each["bytes"])
        arguments.add_row(each["name"], each["dtype"], *audit_page.shapes_in_words(each), size)
    return [
        (f"{facts['function']} on {facts['cluster']['words']}", [links_table(facts["mesh"]), "", arguments]),
        ("Does it fit?", memory.tables(facts["memory"])),
        ("What crosses which wire?", of_wires.tables(facts["wires"])),
        ("What is computed?", computed.tables(facts["computed"])),
        ("How long, at best?", timeline.tables(facts["time"])),
        ("Verdict", [facts["verdict"]["words"]]),
        *([("Warnings", list(facts["warnings"]))] if facts["warnings"] else []),
    ]
