"""How much of what a step sends hides behind matrix products, and what that costs in memory, in the compiled program.

    python benchmarks/overlap.py [--config FILE] [--cluster h100:8x8] [--cases zero3 ...] [--json OUT]
        [--config.KEY=VALUE ...]

Nothing runs: the step is compiled for the cluster (the CUDA plugin of jax's version is needed, a GPU is not), once as
it is and once with `train.overlap` off, for its temporaries. Counted are the bytes that each device sends whose
collective has a matrix product between its start and its done, over all of that operation and axes; sums of a few
numbers are in neither. Whether a product is long enough to hide them is another question: see `rehearse`.

Compiler options of sharded_train/gpu_flags.py are replaced by those in XLA_FLAGS.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sharded_train import launch
from sharded_train.recipe import load
from sharded_train.rehearse import clusters, hlo
from sharded_train.rehearse.compile import Compiled, compile_for
from sharded_train.rehearse.wires import collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.rehearse.wires_tables import percent
from sharded_train.rehearse.wires_totals import axes_in_words
from sharded_train.tables import bytes_in_words, new_table

ROOT = Path(__file__).parent.parent
TENSOR = {"mesh.tensor": 8, "zero.stage": 1, "train.num_microbatches": 4}
CASES: Mapping[str, Mapping[str, Any]] = {
    "zero3": {"zero.stage": 3, "train.num_microbatches": 4, "train.global_batch_size": 256, "train.remat": "full"},
    "zero1-full": {**TENSOR, "train.remat": "full"},
    "zero1-selective": {**TENSOR, "train.remat": "selective"},
}
FEW = 64  # bytes of a member that is no array of the model


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What each device sends by one operation over some axes in a step, and how much of it spans a product."""

    axes: str
    op: str
    sent: float
    spanning: float

    @property
    def share(self) -> float:
        return self.spanning / self.sent


def hidden(compiled: Compiled) -> list[Hidden]:
    """By axes and operation, the most bytes first."""
    found, unknown = collectives(hlo.parse(compiled.text), Places.of(compiled.program.mesh))
    assert not unknown, unknown
    rows: dict[tuple[str, str], list[float]] = {}
    for each in found:
        if max(member.bytes for member in each.members) > FEW:
            row = rows.setdefault((axes_in_words(each.axes), each.op), [0.0, 0.0])
            sent = each.wire_bytes * each.times
            row[0] += sent
            row[1] += sent * bool(each.spans)
    return sorted((Hidden(*key, *row) for key, row in rows.items()), key=lambda row: -row.sent)


def case(config: Path, overrides: Sequence[str], cluster: str, name: str) -> dict[str, Any]:
    """One case as JSON values."""
    settings = [*(f"--config.{key}={value}" for key, value in CASES[name].items()), *overrides]
    on, off = (
        compile_for(load(config, [*settings, *more]), clusters.parse(cluster))
        for more in ([], ["--config.train.overlap=False"])
    )
    return {
        "case": name,
        "mesh": dict(on.program.plan.sizes),
        "options": on.options,
        "temporaries": on.memory.temp_size_in_bytes,
        "temporaries_without": off.memory.temp_size_in_bytes,
        "rows": [{**dataclasses.asdict(row), "share": row.share} for row in hidden(on)],
        "rows_without": [{**dataclasses.asdict(row), "share": row.share} for row in hidden(off)],
    }


def print_case(found: Mapping[str, Any], console: Console) -> None:
    sizes = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    on, off = found["temporaries"], found["temporaries_without"]
    console.print(
        f"[bold]{found['case']}[/bold], {sizes}: temporaries {bytes_in_words(on)}, {on / off:.2f} times the "
        f"{bytes_in_words(off)} without overlap"
    )
    table = new_table("over", "operation", "sent", "spans products", right=("sent", "spans products"))
    for row in found["rows"]:
        sent = bytes_in_words(round(row["sent"]))
        table.add_row(row["axes"], row["op"], sent, percent(row["spanning"], row["sent"]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "llama3_8b.py")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args, overrides = parser.parse_known_args()
    launch.without_gpu()
    console = Console(width=120, highlight=False)
    found = []
    for name in args.cases:
        found.append(case(args.config, overrides, args.cluster, name))
        print_case(found[-1], console)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
