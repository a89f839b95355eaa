"""Rows of up to a million tokens in the whole train step, compiled for a GPU cluster: memory, wires and work.

    python benchmarks/context_steps.py [--cluster h100:8x8] [--tokens 1048576] [--sequence 64] [--strategies ring ...]
        [--json OUT] [--config.KEY=VALUE ...]

Llama 3 8B, a row on each group of the sequence axis, data taking the other devices, ZeRO 3, everything rematerialised.
Sent: by attention over the sequence axis in a step, beside the formula of `ops.context_cost` (each layer forward twice,
as it is rematerialised, and backward once). Work: FLOPs of attention that a device does, of an equal share of what the
model needs for two forward passes and a backward pass that computes the scores again; all devices run one program.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from sharded_train import launch
from sharded_train.errors import ConfigError
from sharded_train.flops import flops_of
from sharded_train.ops.context_cost import Shape, wire_bytes
from sharded_train.recipe import load
from sharded_train.rehearse import clusters, hlo, memory
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.compile import Compiled, compile_for
from sharded_train.rehearse.computed import count
from sharded_train.rehearse.scopes import part_of
from sharded_train.rehearse.wires import collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.tables import bytes_in_words, new_table

ROOT = Path(__file__).parent.parent
GIB = 2**30
MODEL, PROGRAM = 2 + 4, 2 + 2 + 5  # products of queries and keys, or alike: as flops counts them, and as they are run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--sequence", type=int, nargs="+", default=[64])
    parser.add_argument("--strategies", nargs="+", default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    launch.without_gpu()
    cluster = clusters.parse(args.cluster)
    rows = [
        measured(strategy, size, args.tokens, cluster, overrides)
        for size in args.sequence
        for strategy in args.strategies
    ]
    show(rows, Console(width=140, highlight=False))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def measured(strategy: str, size: int, tokens: int, cluster: Cluster, overrides: list[str]) -> dict[str, Any]:
    """One compiled step, or why there is none."""
    data = cluster.num_devices // size
    changes = {
        "mesh.data": data,
        "mesh.sequence": size,
        "attention.context": strategy,
        "train.sequence_length": tokens,
        "train.global_batch_size": data,
        "train.num_microbatches": 1,
        "train.remat": "full",
    }
    given = [f"--config.{key}={value}" for key, value in changes.items()]
    row = {"strategy": strategy, "sequence": size, "tokens": tokens}
    try:
        compiled = compile_for(load(ROOT / "configs" / "llama3_8b.py", [*given, *overrides]), cluster)
    except ConfigError as error:
        return {**row, "refused": str(error)}
    return {**row, **facts(compiled, strategy)}


def facts(compiled: Compiled, strategy: Any) -> dict[str, Any]:
    module, program = hlo.parse(compiled.text), compiled.program
    model, sizes = program.model, program.plan.sizes
    found, unknown = collectives(module, Places.of(program.mesh))
    assert not unknown, unknown
    ours = [
        one
        for one in found
        if part_of(one.scope) in ("attention", "scores") and "sequence" in one.axes and "s32" not in one.dtype
        if "weights" not in one.scope and "gradients" not in one.scope
    ]
    tensor = sizes["tensor"]
    heads, kv_heads = model.num_heads // tensor, max(1, model.kv_heads // tensor)
    shape = Shape(sizes["sequence"], program.train.sequence_length, heads, kv_heads, model.dim_per_head, 2)
    passes = [wire_bytes(strategy, shape, window) for window in model.layer_windows]
    needed = flops_of(program).by_kind["attention scores"] / module.num_devices / MODEL * PROGRAM
    done = sum(
        (product.flops - product.hidden) * each.times
        for each in count(module)
        for product in each.work.products
        if product.attention
    )
    held = memory.describe(compiled, module, found)
    return {
        "temporaries": compiled.memory.temp_size_in_bytes,
        "total": held["total_bytes"],
        "fits": held["verdict"] == "fits",
        "sent": float(sum(one.wire_bytes * one.times for one in ours)),
        "formula": sum(2 * forward + backward for forward, backward in passes),
        "work": float(done) / needed,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("tokens", "S", "temporaries", "of 72.8 GiB", "sent", "of the formula", "work")
    table = new_table("attention", *columns, "", right=columns)
    for row in rows:
        name = (row["strategy"], f"{row['tokens']:,}", str(row["sequence"]))
        if "refused" in row:
            table.add_row(*name, *[""] * 5, row["refused"])
            continue
        sent = (bytes_in_words(round(row["sent"])), f"{row['sent'] / row['formula']:.3f}")
        held = (f"{row['temporaries'] / GIB:.2f} GiB", f"{row['total'] / GIB:.1f} GiB")
        table.add_row(*name, *held, *sent, f"{row['work']:.3f}", "fits" if row["fits"] else "does not fit")
    console.print(table)


if __name__ == "__main__":
    main()
