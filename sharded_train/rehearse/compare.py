"""Several rehearsals side by side: a column for each, a row for each of the numbers that decide, the best marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sharded_train.rehearse import computed
from sharded_train.rehearse.timeline import exposed_seconds, seconds_in_words
from sharded_train.rehearse.verdict import UNLIKE
from sharded_train.tables import bytes_in_words, flops_in_words, new_table

BEST = "◀"
NAMES, LEAST = 26, 18  # characters of the rows' names, and of a column at least: "shortest that fits"


@dataclasses.dataclass(frozen=True)
class Row:
    """A number of a rehearsal; the smallest is the best, or the largest, or neither (`better` 0)."""

    name: str
    value: Callable[[Mapping[str, Any]], float]
    words: Callable[[float], str]
    better: int = -1


ROWS = (
    Row("step, at least", lambda facts: facts["time"]["step_seconds"], seconds_in_words),
    Row("MFU, at most", lambda facts: facts["time"]["mfu"], lambda x: f"{100 * x:.1f} %", +1),
    Row(
        "tokens/s on each device",
        lambda facts: facts["time"]["tokens_per_second_per_device"],
        lambda x: f"{x:,.0f}",
        +1,
    ),
    Row("memory of each device", lambda facts: facts["memory"]["total_bytes"], lambda x: bytes_in_words(round(x))),
    Row("waiting for communication", lambda facts: exposed_seconds(facts["time"]), seconds_in_words),
    Row("sent over NVLink", lambda facts: sent_over(facts, "NVLink"), lambda x: bytes_in_words(round(x)), 0),
    Row("sent over the network", lambda facts: sent_over(facts, "network"), lambda x: bytes_in_words(round(x)), 0),
    Row("sent over both", lambda facts: sent_over(facts, "both"), lambda x: bytes_in_words(round(x)), 0),
    Row("FLOPs of a device, compiled", lambda facts: facts["computed"]["products"], flops_in_words),
    Row(
        "of these rematerialised",
        lambda facts: facts["computed"]["explained"][computed.REMATERIALISED],
        flops_in_words,
    ),
)


def sent_over(facts: Mapping[str, Any], link: str) -> float:
    """Bytes that each device sends in a step over a link."""
    return sum(row["wire_bytes"] for row in facts["wires"]["totals"] if row["link"] == link)


def describe(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of each variant by row, and which is the best: of those that fit, the one with the shortest step."""
    values = {row.name: {name: row.value(facts) for name, facts in variants.items()} for row in ROWS}
    return {
        "variants": list(variants),
        "fits": {name: facts["memory"]["verdict"] for name, facts in variants.items()},
        "rows": values,
        "best": best(variants),
    }


def best(variants: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The variant with the shortest step among those that fit; None where none does."""
    fit = {name: facts for name, facts in variants.items() if facts["memory"]["verdict"] == "fits"}
    return min(fit, key=lambda name: fit[name]["time"]["step_seconds"], default=None)


def tables(section: Mapping[str, Any], width: int) -> list[Any]:
    """The comparison for a terminal; variants with long names are letters, which are told before."""
    names = section["variants"]
    too_big = [name for name in names if section["fits"][name] == "does not fit"]
    notes = [f"{', '.join(too_big)}: {UNLIKE}"] if too_big else []
    if NAMES + sum(2 + max(LEAST, *map(len, name.split(" "))) for name in names) <= width:
        return [table(section, ["\n".join(name.split(" ")) for name in names]), *notes]
    letters = [f"({chr(ord('a') + i)})" for i in range(len(names))]
    return [
        *(f"{letter} {name}" for letter, name in zip(letters, names, strict=True)),
        "",
        table(section, letters),
        *notes,
    ]


def table(section: Mapping[str, Any], headings: Sequence[str]) -> Table:
    """A column for each variant, under its heading."""
    names = section["variants"]
    built = new_table("", *headings, right=headings)
    built.add_row("fits", *(section["fits"][name] for name in names))
    for row in ROWS:
        values = [section["rows"][row.name][name] for name in names]
        if any(values):
            built.add_row(row.name, *marked(row, values))
    built.add_row("", *("shortest that fits" if name == section["best"] else "" for name in names), style="bold")
    return built


def marked(row: Row, values: Sequence[float]) -> list[str]:
    """The values in words, the best with a mark where they differ."""
    words = [row.words(value) for value in values]
    if not row.better or len(set(words)) == 1:
        return words
    top = row.words(max(values, key=lambda value: row.better * value))
    return [f"{text} {BEST}" if text == top else text for text in words]
