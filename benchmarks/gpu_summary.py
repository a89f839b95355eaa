"""What `gpu.sh` found, in one table in Markdown: recipes beside bf16 and beside what was rehearsed, and the goals.

    python benchmarks/gpu_summary.py FOLDER

FOLDER holds the workdirs `1b_RECIPE` of `sharded-train train` and the files `rehearsed_RECIPE.json`. Rates are medians
of the logged ones; the loss is the mean of the last two logged. A run that ended before bf16's has no loss to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

GOAL_MFU, GOAL_SPEED = 0.55, 1.3  # bf16's MFU on an H200; FP8's tokens/s beside bf16's
ALONE = "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    runs = {path.name.removeprefix("1b_"): run_of(path) for path in sorted(args.folder.glob("1b_*"))}
    runs = {name: run for name, run in runs.items() if run}
    if ALONE not in runs:
        raise SystemExit(f"{args.folder} has no finished run of {ALONE}: {', '.join(runs) or 'none at all'}")
    for name, run in runs.items():
        path = args.folder / f"rehearsed_{name}.json"
        run["rehearsed"] = json.loads(path.read_text()) if path.exists() else None
    print("\n".join(table(runs)))
    print("\n".join(goals(runs)))


def run_of(workdir: Path) -> dict[str, Any]:
    """Seconds a step, tokens/s, MFU, loss and peak memory; nothing for a run that logged no rate."""
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rates = [line for line in lines if line.get("tokens_per_second")]  # the others are of evaluations
    if not rates:
        return {}
    train = json.loads((workdir / "config.json").read_text())["train"]
    rate = statistics.median(line["tokens_per_second"] for line in rates)
    losses = [line["loss"] for line in rates[-2:]]
    return {
        "seconds": train["global_batch_size"] * train["sequence_length"] / rate,
        "tokens/s": rate,
        "mfu": statistics.median(line["mfu"] for line in rates),
        "loss": math.nan if None in losses else statistics.mean(losses),
        "memory": max(line.get("peak_memory_bytes") or 0 for line in rates),
        "step": rates[-1]["step"],
    }


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"| recipe | step | tokens/s | beside {ALONE} | MFU | loss | beside {ALONE} | memory "
        "| of rehearsed time, memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    first = runs[ALONE]
    for name, run in runs.items():
        speed, loss = run["tokens/s"] / first["tokens/s"], run["loss"] / first["loss"] - 1
        beside = f"{loss:+.2%}" if run["step"] == first["step"] else f"of step {run['step']}, not {first['step']}"
        lines.append(
            f"| {name} | {1e3 * run['seconds']:,.1f} ms | {run['tokens/s']:,.0f} | {speed:.2f} | {run['mfu']:.1%} "
            f"| {run['loss']:.4f} | {beside} | {run['memory'] / 2**30:.1f} GiB | {beside_rehearsal(run)} |"
        )
    return lines


def beside_rehearsal(run: dict[str, Any]) -> str:
    if run["rehearsed"] is None:
        return "not rehearsed"
    said = run["rehearsed"]
    time = said["time"]["tokens_per_second_per_device"] / run["tokens/s"]
    return f"{time:.2f}, {run['memory'] / said['memory']['total_bytes']:.2f}"


def goals(runs: dict[str, dict[str, Any]]) -> list[str]:
    first = runs[ALONE]
    best = max((run["tokens/s"] for name, run in runs.items() if name.startswith(("fp8", "mxfp8"))), default=0.0)
    speed = best / first["tokens/s"]
    return [
        f"{ALONE}'s MFU {first['mfu']:.1%}: {reached(first['mfu'], GOAL_MFU)} (goal {GOAL_MFU:.0%})",
        f"best FP8 recipe {speed:.2f} of {ALONE}'s tokens/s: {reached(speed, GOAL_SPEED)} (goal {GOAL_SPEED})",
    ]


def reached(value: float, goal: float) -> str:
    return "reached" if value >= goal else "not reached"


if __name__ == "__main__":
    main()
