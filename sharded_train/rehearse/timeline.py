"""How long, at best? The compiled schedule on paper, as one section: step time, MFU, what is exposed, and the timeline.

A lower bound: every kernel and link at what its data sheet says, no time for launches, no jitter, no stragglers. How an
instruction costs stands in `rehearse.costs`, how streams run side by side in `rehearse.streams`.

    step = products + attention + other kernels + exposed communication
    MFU  = model FLOPs of one device / (step x peak of the compute dtype)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.flops import CONVENTION, Flops
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.costs import LANES
from sharded_train.rehearse.hlo import Module
from sharded_train.rehearse.pace import Pace
from sharded_train.rehearse.products import format_of
from sharded_train.rehearse.scopes import words_of
from sharded_train.rehearse.streams import Streams
from sharded_train.rehearse.streams_state import LoopRun, Result
from sharded_train.rehearse.wires import Collective
from sharded_train.tables import flops_in_words, new_table

KINDS = {"products": "matrix products", "attention": "attention", "other": "other kernels"}
IDLE = "The pipeline's bubble, what the mean stage waits for those that the step waits for"
MOST_KERNELS = 12  # of the table of those that take longest
BOUND = (
    "A lower bound: kernels at 100 % of the data sheet's FLOP/s or memory bandwidth, links at 100 % of theirs, ring "
    "collectives, nothing for launches or stragglers. What stays in the cache from one kernel to the next would be "
    "faster; sums within the switch are not counted. Streams: one computes, NVLink and network carry one collective "
    "at a time each."
)


def describe(
    module: Module,
    cluster: Cluster,
    collectives: Sequence[Collective],
    model: Flops | None,
    compute_dtype: str,
    pace: Pace | None = None,
) -> dict[str, Any]:
    """The section as JSON values; seconds and FLOPs are one device's. `compute_dtype` is HLO's name ("bf16").

    Without a `model` there is no MFU.
    With the `pace` of a pipeline it is the stage that the step waits for that is followed in each tick, and "idle" is
    what the mean one is not at work; without a pipeline that is 0.
    """
    streams = Streams(module, cluster.device, collectives, pace)
    result = streams.run()
    num_devices = cluster.num_devices
    peak_format = format_of(compute_dtype)
    peak = cluster.device.peaks[peak_format.lower()]
    needed = model and model.total / num_devices
    return {
        "step_seconds": result.seconds,
        "mfu": needed and needed / (result.seconds * peak),
        "model_flops": needed,
        "peak": peak,
        "peak_words": f"{peak / 1e12:,.0f} TFLOP/s, {cluster.device.name}, dense {peak_format} of the data sheet",
        "tokens_per_second_per_device": model and model.num_tokens / num_devices / result.seconds,
        "compute": {kind: result.totals.get(("kind", kind), 0.0) for kind in KINDS},
        "idle": result.totals.get(("idle",), 0.0),
        "links": {lane: result.totals.get(("busy", lane), 0.0) for lane in LANES},
        "exposed": _exposed(result),
        "kernels": _kernels(module, streams, result),
        "notes": list(result.notes),
        "bound": BOUND,
        "convention": CONVENTION,
        "loops": [_loop(loop, result) for loop in result.loops],
        "events": [dataclasses.asdict(event) for event in result.events],
    }


def _loop(loop: LoopRun, result: Result) -> dict[str, Any]:
    """One run of a loop that can be drawn, with its seconds and turns in the whole step."""
    whole = {"step_seconds": result.totals["loop", loop.name], "step_turns": round(result.totals["turns", loop.name])}
    return {**dataclasses.asdict(loop), **whole}


def _exposed(result: Result) -> list[dict[str, Any]]:
    """Of the collectives of each set of axes over each link: how long they take, and how much of that is waited for."""
    keys = [key[1:] for key in result.totals if key[0] == "sent"]
    rows = [
        {
            "axes": axes,
            "link": link,
            "seconds": result.totals["sent", axes, link],
            "exposed": result.totals.get(("exposed", axes, link), 0.0),
        }
        for axes, link in keys
        if result.totals["sent", axes, link] > 0
    ]
    return sorted(rows, key=lambda row: -row["exposed"])


def _kernels(module: Module, streams: Streams, result: Result) -> list[dict[str, Any]]:
    """Kernels by what they are and where in the model, the longest first; those that do not fit in one row together."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for key, seconds in result.totals.items():
        if key[0] != "kernel":
            continue
        _, computation, name = key
        cost = streams.costs[computation, name]
        instruction = module.computations[computation].instructions[name]
        what = kernel_words(name) if cost.kind == "other" else KINDS[cost.kind]
        row = rows.setdefault((words_of(instruction.scope), what, cost.bound), Counter())
        row["seconds"] += seconds  # type: ignore[assignment]
        row["runs"] += round(seconds / cost.seconds)
    ordered = sorted(rows.items(), key=lambda item: -item[1]["seconds"])
    return [
        {"part": part, "what": what, "bound": bound, "seconds": row["seconds"], "runs": row["runs"]}
        for (part, what, bound), row in ordered
    ]


def kernel_words(name: str) -> str:
    """A kernel by the kind of its fusion: "loop_transpose_fusion.4" is "transpose"."""
    stem = name.rstrip("0123456789.").removesuffix(".clone").removesuffix("_fusion")
    for prefix in ("loop_", "input_", "wrapped_"):
        stem = stem.removeprefix(prefix)
    return stem.replace("_", " ")


def exposed_seconds(section: Mapping[str, Any]) -> float:
    """All that computing waits for."""
    return sum(row["exposed"] for row in section["exposed"])


def seconds_in_words(seconds: float, digits: int = 4) -> str:
    """0.0123 -> "12.30 ms"; with fewer than 4 digits without trailing zeros."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            words = f"{seconds / size:#.4g}" if digits == 4 else f"{round(seconds / size, digits):g}"
            return f"{words} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.2g} µs" if seconds else "0 s"


def tables(section: Mapping[str, Any]) -> list[Any]:
    """The section for a terminal."""
    return list(_tables(section))


def _tables(section: Mapping[str, Any]) -> Iterator[Any]:
    step = section["step_seconds"]

    def share(seconds: float) -> str:
        return f"{100 * seconds / step:.1f} %" if step else ""

    parts = new_table("of a step", "time", "share", right=["time", "share"])
    for kind, seconds in section["compute"].items():
        parts.add_row(KINDS[kind], seconds_in_words(seconds), share(seconds))
    for row in section["exposed"]:
        if row["exposed"]:
            name = f"waiting for {row['axes']} over {link_words(row['link'])}"
            parts.add_row(name, seconds_in_words(row["exposed"]), share(row["exposed"]))
    parts.add_row("step, at least", seconds_in_words(step), "", style="bold")
    yield parts
    if section["mfu"] is not None:
        tokens = section["tokens_per_second_per_device"]
        yield (
            f"MFU {100 * section['mfu']:.1f} % at most = {flops_in_words(section['model_flops'])} / "
            f"{seconds_in_words(step)} / {section['peak_words']}; {tokens:,.0f} tokens/s on each device."
        )
    yield from section["notes"]
    if section["idle"]:
        yield f"{IDLE}: {seconds_in_words(section['idle'])}, {share(section['idle'])} of the step."
    links = new_table("collectives over", "link", "take", "exposed", "hidden", right=["take", "exposed", "hidden"])
    for row in section["exposed"]:
        hidden = f"{100 * max(0.0, 1 - row['exposed'] / row['seconds']):.0f} %"
        times = seconds_in_words(row["seconds"]), seconds_in_words(row["exposed"])
        links.add_row(row["axes"], link_words(row["link"]), *times, hidden)
    yield links
    kernels = new_table("kernels of", "what", "bound by", "runs", "time", "share", right=["runs", "time", "share"])
    for row in section["kernels"][:MOST_KERNELS]:
        seconds = row["seconds"]
        runs = f"{row['runs']:,}"
        kernels.add_row(row["part"], row["what"], row["bound"], runs, seconds_in_words(seconds), share(seconds))
    if left := section["kernels"][MOST_KERNELS:]:
        rest = sum(row["seconds"] for row in left)
        kernels.add_row(f"{len(left)} more", "", "", "", seconds_in_words(rest), share(rest))
    yield kernels
    yield section["bound"]


def link_words(link: str) -> str:
    """ "both" -> "NVLink and network"."""
    return {"both": "NVLink and network", "network": "the network"}.get(link, link)
