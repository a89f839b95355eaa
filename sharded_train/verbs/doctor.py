"""`sharded-train doctor`: what is there, what is wrong, and how to mend it, on all processes of a run."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharded_train import compat
from sharded_train.doctor import between, machine, software
from sharded_train.doctor.finding import Finding
from sharded_train.exits import Exit
from sharded_train.links import hosts_of
from sharded_train.recipe import Recipe
from sharded_train.show import FP32, describe
from sharded_train.tables import WIDTH

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
WAIT = 300.0  # seconds for the slowest process to have looked


def doctor(recipe: Recipe | None, workdir: Path | None, *, json: bool = False) -> int:
    """Look, and print a line for each thing, ok, warning or failed, the last two with the fix; alike ones together.

    With a `recipe` the disk is asked whether its checkpoints have room. Returns FAILED where anything has failed.
    """
    index, count = jax.process_index(), jax.process_count()
    found = [*_here(recipe, workdir)]
    if count > 1:
        found += between.all_processes(compat.coordination(), index, count)
        found.append(between.collective(lambda: len(multihost_utils.process_allgather(np.int32(index))), count))
    every = _told_by_all(found, index, count)
    if index == 0:
        rows = list(together(every))
        if json:
            print(dumps(rows, indent=2))
        else:
            print_rows(rows, count, Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False))
    return Exit.FAILED if any(each.status == "failed" for those in every.values() for each in those) else Exit.DONE


def _here(recipe: Recipe | None, workdir: Path | None) -> Iterator[Finding]:
    local, every = jax.local_devices(), jax.devices()
    on_gpu = local[0].platform != "cpu"
    array = np.empty(len(every), dtype=object)
    array[:] = every
    yield from software.versions()
    yield from software.devices(local, every)
    yield from software.links(len(set(hosts_of(array).tolist())), on_gpu)
    yield from software.environment()
    yield from machine.limits(on_gpu, software.INFINIBAND.is_dir())
    if workdir is not None:
        needed = None
        if recipe is not None:
            needed = _bytes_of_checkpoints(recipe, describe(recipe, every))
        yield from machine.disk(workdir, needed)


def _bytes_of_checkpoints(recipe: Recipe, shown: Mapping[str, Any]) -> int:
    """Of all that are kept at once, one more being written meanwhile; `shown` is what `show` says of the recipe."""
    of_master = shown["state_bytes_total"] / shown["state_bytes"]["master_weights"]  # alike on a device and in all
    return round((recipe.checkpoint.keep + 1) * of_master * FP32 * shown["num_parameters"])


def _told_by_all(found: Sequence[Finding], index: int, count: int) -> dict[str, list[Finding]]:
    """Of each process, by its name, what it found; on process 0 all of them, elsewhere its own.

    They go through the coordination service: a collective may be what does not work.
    """
    name = f"process {index} on {socket.gethostname()}"
    if count == 1:
        return {name: list(found)}
    client = compat.coordination()
    client.key_value_set(f"doctor/found/{index}", dumps([name, [dataclasses.asdict(each) for each in found]]))
    every = {name: list(found)}
    for other in range(1, count) if index == 0 else ():
        try:
            told, those = loads(client.blocking_key_value_get(f"doctor/found/{other}", int(1000 * WAIT)))
            every[told] = [Finding(**each) for each in those]
        except Exception as error:  # jaxlib raises its own kinds
            words = f"said nothing within {WAIT:.0f} s ({str(error).partition(':')[0]})"
            every[f"process {other}"] = [Finding("process", "failed", words, "look at its own output")]
    return every


def together(every: Mapping[str, Sequence[Finding]]) -> Iterator[dict[str, Any]]:
    """A row for each thing and what was found of it, with the processes that found the same."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for process, found in every.items():
        for each in found:
            row = rows.setdefault(dataclasses.astuple(each), {**dataclasses.asdict(each), "processes": []})
            row["processes"].append(process)
    order = list(dict.fromkeys(each.what for found in every.values() for each in found))
    yield from sorted(rows.values(), key=lambda row: order.index(row["what"]))


def print_rows(rows: Sequence[Mapping[str, Any]], count: int, console: Console) -> None:
    """A line for each row; those that not all processes share say whose they are."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        whose = "" if len(row["processes"]) == count else f" [{', '.join(row['processes'])}]"
        fix = f"\n→ {row['fix']}" if row["fix"] else ""
        table.add_row(
            Text(row["status"], style=STYLES[row["status"]]), row["what"], Text(f"{row['words']}{whose}{fix}")
        )
    console.print(table)
    bad = [row for row in rows if row["status"] != "ok"]
    kinds = {status: sum(row["status"] == status for row in bad) for status in ("failed", "warning")}
    summary = ", ".join(f"{n} {status}" for status, n in kinds.items() if n) or "all is well"
    console.print(Text(f"\n{summary}", style="bold"))
