"""Facts as tables in text: those of `show`, and the parts that other verbs print with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

WIDTH = 100  # of what is piped into a file
MOST_STAGES = 16  # that are listed
KINDS = {
    "master_weights": "master weights, fp32",
    "moments": "optimizer moments",
    "averaged_weights": "averaged weights, fp32",
    "scales": "scales and histories of FP8",
    "counters": "counters",
    "gathered_weights": "weights to multiply with, {weights}{layerwise}",
    "weight_gradients": "their gradients, {dtype}{layerwise}",
    "gradient_sums": "gradient sums, fp32",
}


def print_facts(facts: Mapping[str, Any], picture: str, console: Console | None = None) -> None:
    """Print what `show.describe` returns, below a picture of the mesh."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)

    def put(title: str, *things: Any) -> None:
        console.print(Text(title, style="bold"))
        for thing in things:
            console.print(Text(thing) if isinstance(thing, str) else thing)
        console.print()

    put("Mesh", picture, "", links_table(facts["mesh"]))
    put("Attention", attention_in_words(facts["attention"]))
    if facts["context"]:
        put("Attention over the sequence axis", "{strategy}: {why}".format(**facts["context"]))
    put("Parameters", _parameters(facts))
    if facts["pipeline"]:
        put("Pipeline", *pipeline_tables(facts["pipeline"]))
    put("Bytes on each device", _memory(facts), "Activations and the compiler's buffers come on top.")
    put("Left whole", _left_whole(facts))
    put("Work", _work(facts), facts["flops_convention"])
    if facts["warnings"]:
        put("Warnings", *facts["warnings"])


def attention_in_words(attention: Mapping[str, Any]) -> str:
    """What computes it, and how much of a row it sees."""
    by = {"cudnn": "cuDNN's flash attention", "xla": "plain XLA, in tiles"}[attention["by"]]
    several = len(attention["layers"]) > 1
    keys = lambda window: "all keys" if window is None else f"a window of {window:,} keys"
    layers = lambda n: f" in {n} layer{'s' * (n > 1)}" if several else ""
    seen = [keys(window) + layers(n) for window, n in attention["layers"]]
    return f"{by}; causal, over {' and '.join(seen)}"


def bytes_in_words(n: int) -> str:
    """1536 -> "1.50 KiB"."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_in_words(n: float) -> str:
    """3.96e11 -> "396 GFLOP"."""
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    for unit in units:
        if n < 0.9995 * base or unit == units[-1]:
            return f"{n:,.0f} {unit}" if unit == units[0] or n >= 99.95 else f"{n:#.3g} {unit}"
        n /= base
    raise AssertionError(units)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table in the looks of all of ours, with the columns of `right` aligned to the right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def links_table(mesh: Mapping[str, Any]) -> Table:
    """Each axis of `show.describe`'s mesh and what it rides on."""
    table = new_table("axis", "size", "rides on", right=["size"])
    for axis, size in mesh["sizes"].items():
        table.add_row(axis, f"{size:,}", mesh["links"][axis]["words"])
    return table


def _parameters(facts: Mapping[str, Any]) -> Table:
    """Parameters outside the layers, then those of one layer, whose state is that of all layers."""
    table = new_table("parameter", "shape", "logical axes", "stored", "gathered", "state", right=["state"])
    table.columns[0].no_wrap = True  # axes are broken between words, a name is not

    def row(p: Mapping[str, Any], name: str, first: int) -> None:
        shape = "×".join(map(str, p["shape"][first:]))
        axes = " ".join(p["axes"][first:])
        table.add_row(name, shape, axes, _spec(p["stored"][first:]), _spec(p["gathered"][first:]), _state(p))

    in_layers = [p for p in facts["parameters"] if p["axes"][0] == "layers"]
    for p in facts["parameters"]:
        if p not in in_layers:
            row(p, p["name"], 0)
    table.add_section()
    table.add_row("layers/", f"{facts['num_layers']} ×", *[""] * 4)
    for p in in_layers:
        row(p, "  " + p["name"].removeprefix("layers/"), 1)
    return table


def _state(p: Mapping[str, Any]) -> str:
    return bytes_in_words(sum(p["bytes"].get(kind, 0) for kind in ("master_weights", "moments", "averaged_weights")))


def _spec(dims: Sequence[Sequence[str]]) -> str:
    return " ".join("+".join(dim) or "·" for dim in dims)


def _memory(facts: Mapping[str, Any]) -> Table:
    table = new_table("kind", "bytes", "", right=["bytes", ""])
    layerwise = ", one layer at a time" if facts["zero_stage"] == 3 else ""
    dtype = facts["compute_dtype"]
    weights = f"{dtype} and FP8" if facts["recipe"].startswith("fp8") else dtype

    def rows(kinds: Mapping[str, int]) -> None:
        for kind, n in kinds.items():
            words = KINDS[kind].format(dtype=dtype, weights=weights, layerwise=layerwise)
            table.add_row(words, f"{n:,}", bytes_in_words(n))

    rows(facts["state_bytes"])
    total = facts["state_bytes_total"]
    table.add_row("state, held between steps", f"{total:,}", bytes_in_words(total), style="bold", end_section=True)
    rows(facts["step_bytes"])
    total += sum(facts["step_bytes"].values())
    table.add_row("state and step", f"{total:,}", bytes_in_words(total), style="bold")
    return table


def pipeline_tables(facts: Mapping[str, Any]) -> list[Any]:
    """What `show.pipeline.describe` found, for a terminal."""
    numbers = Table.grid("", Column("", justify="right"), "", padding=(0, 2, 0, 0))
    slower = facts["time"] / facts["time_1f1b"] - 1
    beside = f"; 1f1b takes {-slower / (1 + slower):.1%} longer" if slower < -1e-3 else ""
    numbers.add_row("bubble", f"{facts['bubble']:.1%}", f"of the stages' time is idle{beside}")
    most = max(facts["in_flight"])
    numbers.add_row("in flight", f"{most:.4g}", f"of {facts['num_microbatches']} microbatches on a stage, at most")
    numbers.add_row("send", bytes_in_words(facts["bytes_per_send"]), "of activations, on and back in every tick")
    if kept := facts["kept_bytes"]:
        words = "of inputs and cotangents of products, until their weights' turn"
        numbers.add_row("kept", bytes_in_words(kept), words)
    if most := max(facts["padding"]):
        numbers.add_row("padding", f"{most} layer{'s' * (most > 1)}", "of zeros on a stage at most, as chunks differ")
    outside = facts["outside"]
    state, step = (bytes_in_words(outside[kind]) for kind in ("state_bytes", "step_bytes"))
    words = f"of state and {step} in the step: {', '.join(outside['names'])}"
    numbers.add_row("on every stage", state, words)
    return [pipeline_title(facts), numbers, _stages_table(facts)]


def pipeline_title(facts: Mapping[str, Any]) -> str:
    """One line: schedule, stages, chunks and layers."""
    chunks = f" × {facts['num_chunks']} chunks" if facts["num_chunks"] > 1 else ""
    each = sorted({n for stage in facts["layers"] for n in stage})
    layers = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
    word = "layer" if each[-1] == 1 else "layers"
    return f"{facts['schedule']}, {facts['num_stages']} stages{chunks} of {layers} {word}"


def _stages_table(facts: Mapping[str, Any]) -> Any:
    """Each stage's layers, by chunks, how busy it is, and how many microbatches are in flight."""
    p = facts["num_stages"]
    table = new_table("stage", "layers", "load", "in flight", right=["layers", "load", "in flight"])
    for stage in range(p):
        if MOST_STAGES // 2 <= stage < p - MOST_STAGES // 2 and p > MOST_STAGES:
            if stage == MOST_STAGES // 2:
                table.add_row("…")
            continue
        layers = " + ".join(map(str, facts["layers"][stage]))
        load = f"{sum(facts['loads'][stage]):.4g}"
        words = " layers' work" if stage == 0 else ""
        table.add_row(str(stage), layers, load + words, f"{facts['in_flight'][stage]:.4g}")
    return table


def _left_whole(facts: Mapping[str, Any]) -> Table | str:
    whole = [p for p in facts["parameters"] if p["left_whole"]]
    if not whole:
        if facts["zero_stage"] == 0:
            return "Nothing over tensor; ZeRO 0 keeps every parameter whole over data."
        return "Nothing: every parameter is split over every axis that splits its kind."
    table = new_table("parameter", "state", "why", right=["state"])
    for p in whole:
        table.add_row(p["name"], _state(p), "; ".join(p["left_whole"]))
    return table


def _work(facts: Mapping[str, Any]) -> Table:
    table = new_table("", "amount", right=["amount"])
    table.add_row("parameters", f"{facts['num_parameters']:,}")
    table.add_row("tokens a step", f"{facts['tokens_per_step']:,}", end_section=True)
    for kind, flops in facts["flops_per_step"].items():
        table.add_row(kind, flops_in_words(flops))
    table.add_section()
    table.add_row("a step", flops_in_words(facts["flops_per_step_total"]), style="bold")
    table.add_row("a token", flops_in_words(facts["flops_per_token"]))
    return table
