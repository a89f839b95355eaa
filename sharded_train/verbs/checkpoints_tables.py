"""What `sharded-train checkpoints` has found, for people. Text of a checkpoint may be anybody's: it is printed bare."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharded_train.report import printable
from sharded_train.tables import WIDTH, bytes_in_words


def print_list(found: dict[str, Any]) -> None:
    table = _table("step", "size", "saved", "tokens", "devices", "commit", "", right=4)
    for row in found["checkpoints"]:
        if not row["verified"]:
            table.add_row(f"{row['step']:,}", *[""] * 5, _cell(f"no checkpoint: {row['problem']}"), style="red")
            continue
        mesh = row["mesh"] if isinstance(row["mesh"], dict) else {}
        split = " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
        many = "" if row["num_processes"] in (1, None) else f" in {row['num_processes']} processes"
        table.add_row(
            f"{row['step']:,}",
            bytes_in_words(row["num_bytes"]),
            _when(row["time"]),
            f"{row['tokens_seen']:,}" if isinstance(row["tokens_seen"], int) else "",
            _cell(f"{split or 1}{many}"),
            _cell(str(row["commit"] or "")[:7]),
            "verified",
        )
    console = _console()
    console.print(table)
    for path in found["set_aside"]:
        console.print(f"set aside: {path}", markup=False, style="dim", soft_wrap=True)


def print_show(found: dict[str, Any]) -> None:
    console = _console()
    size, when = bytes_in_words(found["num_bytes"]), _when(found["time"])
    console.print(f"{found['path']}: step {found['step']:,}, {size}, saved {when}", markup=False, soft_wrap=True)
    for key, value in found["run"].items():
        if key != "config":
            for line in _lines(key, value):
                console.print(line, markup=False, soft_wrap=True)
    table = _table("array", "dtype and shape", "size", "placed when saved", "digest", right=0)
    for name, leaf in found["leaves"].items():
        size = bytes_in_words(leaf["num_bytes"])
        table.add_row(_cell(name), _cell(leaf["array"]), size, _cell(leaf["sharding"] or ""), _cell(leaf["digest"]))
    console.print(table)
    console.print("The run's config is in --json.", style="dim")


def _lines(key: str, value: Any, indent: str = "") -> Iterator[str]:
    """A value of the record as JSON: one line where that fits the page, else one for each of its items."""
    whole = f"{indent}{_bare(key)}: {_bare(json.dumps(value))}"
    if len(whole) <= WIDTH or not isinstance(value, dict):
        yield whole
        return
    yield f"{indent}{_bare(key)}:"
    for name, item in value.items():
        yield from _lines(name, item, f"{indent}  ")


def print_verify(found: list[dict[str, Any]]) -> None:
    console = _console()
    for one in found:
        words = "every file and every array is what was saved" if one["problem"] is None else _bare(one["problem"])
        style = "red" if one["problem"] else "green"
        console.print(f"{one['path']}: {words}", markup=False, style=style, soft_wrap=True)


def print_diff(found: dict[str, Any]) -> None:
    console = _console()
    for path, only in found["only"].items():
        for line in only:
            console.print(f"only in {path}: {_bare(line)}", markup=False, style="red", soft_wrap=True)
    for line in found["config"]:
        console.print(_bare(line), markup=False, soft_wrap=True)
    table = _table("array", "elements that differ", "of", "largest difference", "relative", right=5)
    for name, one in found["leaves"].items():
        if one is not None:
            numbers = f"{one['differing']:,}", f"{one['of']:,}", f"{one['largest']:.3e}", f"{one['relative']:.3e}"
            table.add_row(_cell(name), *numbers)
    if table.row_count:
        console.print(table)
    equal = sum(one is None for one in found["leaves"].values())
    console.print(f"{equal} of {len(found['leaves'])} arrays are equal, bit for bit.")


def print_rollback(found: dict[str, Any]) -> None:
    console = _console()
    for path in found["set_aside"]:
        console.print(f"set aside: {path}", markup=False, soft_wrap=True)
    console.print(f"The run goes on from step {found['step']:,}.")


def print_prune(found: dict[str, Any]) -> None:
    console = _console()
    for path in found["deleted"]:
        console.print(f"deleted: {path}", markup=False, soft_wrap=True)
    count = len(found["deleted"])
    console.print(f"{count} checkpoint{'s' * (count != 1)} deleted, {bytes_in_words(found['num_bytes'])} freed.")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else max(WIDTH, 140), highlight=False)


def _table(*names: str, right: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(names):
        whole = name in ("step", "size", "saved", "tokens", "commit")
        table.add_column(name, justify="right" if i < right else "left", overflow="fold", no_wrap=whole)
    return table


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


def _bare(text: Any) -> str:
    """No control characters, which could do anything to a terminal; to be printed without markup."""
    return printable(str(text))


def _cell(text: Any) -> Text:
    return Text(_bare(text))
