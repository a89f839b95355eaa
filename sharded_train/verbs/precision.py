"""`sharded-train precision`: what FP8 products saw, by layer and step, from what a run logged."""

from __future__ import annotations

import json as jsons
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sharded_train import precision_log
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.rehearse.outputs import problems_of
from sharded_train.tables import WIDTH, new_table

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 24  # of a history in the terminal
KINDS = {"x": "input", "w": "weight", "g": "gradient of the output"}


def precision(workdir: Path, *, html: Path | None, json: bool = False) -> int:
    """Prints the histories of the run in `workdir`, and returns the exit code."""
    if problems := problems_of({} if html is None else {"html": html}):
        raise ConfigError(problems)
    try:
        lines = precision_log.read(workdir)
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise ConfigError(f"{workdir} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(
            f"{workdir} has no log of FP8 products: it is written by a run with precision.recipe = fp8_delayed, "
            "fp8_current or mxfp8, every log.precision_every steps"
        )
    found = facts(lines)
    if html is not None:
        from sharded_train.verbs.precision_page import page

        html.write_text(page(found, str(workdir)), encoding="utf-8")
        print(f"wrote {html}", file=sys.stderr)
    if json:
        print(jsons.dumps(found, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        console.print(table(found))
        console.print(
            "amax, the largest of all layers, and scale, from the smallest to the largest, are of the last step. In "
            "brackets: the step and the layer of the worst.",
            style="dim",
        )
        for remark in found["remarks"]:
            console.print(remark, markup=False)
    return Exit.DONE


def facts(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """In values that JSON can hold: of every tensor each number as `[step][layer]`, and what is worst.

    A step with other tensors than the last one's is left out: the run had another recipe then.
    """
    names = set(lines[-1]["tensors"])
    steps = [line for line in lines if set(line["tensors"]) == names]
    tensors = {
        name: {what: [line["tensors"][name][what] for line in steps] for what in precision_log.NUMBERS}
        for name in lines[-1]["tensors"]
    }
    found: dict[str, Any] = {"steps": [line["step"] for line in steps], "tensors": tensors}
    shares = ("saturated", "lost")
    found["worst"] = {name: {what: _worst(of[what], found) for what in shares} for name, of in tensors.items()}
    found["remarks"] = list(_remarks(found))
    return found


def _worst(rows: Sequence[Sequence[float | None]], found: Mapping[str, Any]) -> dict[str, Any]:
    """The largest of `[step][layer]`, and where."""
    share, i, layer = max((share or 0.0, i, layer) for i, row in enumerate(rows) for layer, share in enumerate(row))
    return {"share": share, "step": found["steps"][i], "layer": layer}


def _remarks(found: Mapping[str, Any]) -> list[str]:
    """What is worth a look, in sentences."""
    said = []
    where = lambda worst: f"at step {worst['step']:,}, layer {worst['layer']}"
    for name, worst in found["worst"].items():
        saturated, lost = worst["saturated"], worst["lost"]
        in_blocks = not any(x is not None for row in found["tensors"][name]["scale"] for x in row)
        if saturated["share"] > 1e-2 and not in_blocks:  # where a block's largest is clipped by an eighth at most
            said.append(
                f"{name}: {saturated['share']:.1%} saturated {where(saturated)}: a spike, or an amax that grows faster "
                "than its history; precision.fp8.margin = 1 leaves room"
            )
        if name.endswith("/g") and lost["share"] > 0.5:
            said.append(
                f"{name}: {lost['share']:.0%} of the gradient became zero {where(lost)}: if it stays so, keep the "
                "product in bf16 (precision.fp8.bf16_products)"
            )
    return said or ["Nothing saturates or is lost in numbers that matter."]


def table(found: Mapping[str, Any]) -> Any:
    """A row for each tensor; the history is of the largest amax of its layers, each step's place in its own range."""
    steps = found["steps"]
    span = " to ".join(f"{step:,}" for step in sorted({steps[0], steps[-1]}))
    right = ("amax", "scale", "saturated", "lost")
    made = new_table("tensor", f"amax, step {span}", *right, right=right)
    made.columns[0].no_wrap = True
    for name, of in found["tensors"].items():
        history = [max((x for x in row if x is not None), default=0.0) for row in of["amax"]]
        scales = [x for x in of["scale"][-1] if x is not None]
        worst = found["worst"][name]
        made.add_row(
            name,
            spark(history),
            f"{history[-1]:.3g}",
            f"{min(scales):.3g} to {max(scales):.3g}" if scales else "by block",
            _share(worst["saturated"]),
            _share(worst["lost"]),
        )
    return made


def spark(values: Sequence[float], width: int = HISTORY) -> str:
    """Positive numbers as bars, on a scale of powers; of more than fit the largest of neighbours."""
    n = min(width, len(values))
    parts = [max(values[i * len(values) // n : (i + 1) * len(values) // n]) for i in range(n)]
    logs = [math.log(x) for x in parts if x > 0]
    if not logs:
        return " " * n
    low, span = min(logs), max(max(logs) - min(logs), math.log(2))
    return "".join(BARS[min(7, int(7 * (math.log(x) - low) / span + 0.5))] if x > 0 else " " for x in parts)


def _share(worst: Mapping[str, Any]) -> str:
    return "0" if not worst["share"] else f"{worst['share']:.2%} ({worst['step']:,}, {worst['layer']})"
