"""The section about collectives for a terminal, alike ones in one row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from sharded_train.rehearse.wires_totals import axes_in_words, number_in_words
from sharded_train.tables import bytes_in_words, new_table

ROWS = 24  # of collectives; the smallest beyond that share a row
CONVENTION = "Bytes are those that each device sends in a step, as nccl-tests counts them."
OVERLAPPED = "Overlapped: the share of them whose start and done have a matrix product between."


def tables(section: Mapping[str, Any]) -> list[Any]:
    """Totals, then every collective, the largest first, then what is not understood."""
    return list(_tables(section))


def _tables(section: Mapping[str, Any]) -> Iterator[Any]:
    if not section["collectives"] and not section["not_understood"]:
        yield "Nothing: no collective stands in the program."
        return
    yield _totals(section["totals"])
    yield f"{CONVENTION} {OVERLAPPED}"
    yield from _collectives(section["collectives"])
    if section["not_understood"]:
        yield _not_understood(section["not_understood"])


def _totals(totals: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("over", "rides on", "operation", "dtype", "runs", "sent", "overlapped", right=RIGHT)
    for row in totals:
        table.add_row(
            axes_in_words(row["axes"]),
            row["link"],
            row["op"],
            row["dtype"],
            number_in_words(row["runs"]),
            f"{'' if row['certain'] else 'at most '}{bytes_in_words(round(row['wire_bytes']))}",
            percent(row["spanning_bytes"], row["wire_bytes"]),
        )
    return table


RIGHT = ("runs", "sent", "overlapped", "bytes", "times")


def _collectives(found: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """For each axes and link a table, one row for each kind; beyond ROWS of them a sentence about the small ones."""
    kinds = sorted(_kinds(found), key=lambda those: -sum(map(_sent, those)))
    over: dict[tuple[Any, ...], list[list[Mapping[str, Any]]]] = {}
    for those in kinds[:ROWS]:
        over.setdefault((tuple(those[0]["axes"]), those[0]["link"]), []).append(those)
    for (axes, link), rows in over.items():
        yield f"Over {axes_in_words(axes)}, {link}:"
        table = new_table("operation", "where", "arrays, whole", "times", "each", "sent", "spans", right=RIGHT)
        table.columns[2].no_wrap = True
        for those in rows:
            table.add_row(*_row(those))
        yield table
    if rest := [each for those in kinds[ROWS:] for each in those]:
        runs = number_in_words(sum(each["times"] for each in rest))
        sent = bytes_in_words(round(sum(map(_sent, rest))))
        ones = f"{len(rest)} smaller ones" if len(rest) > 1 else "a smaller one"
        yield f"And {ones}, {runs} run{'' if runs == '1' else 's'}, together {sent}."


def _kinds(found: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in found:
        key = (each["op"], *each["axes"], each["link"], each["place"], *sorted(each["members"]), *each["branches"])
        kinds.setdefault(key, []).append(each)
    return list(kinds.values())


def _row(those: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    first, total = those[0], number_in_words(sum(each["times"] for each in those))
    return (
        first["op"],
        first["place"] + (", in a branch" if first["branches"] and not first["certain"] else ""),
        arrays_in_words(first),
        total,
        once_each(those),
        bytes_in_words(round(sum(map(_sent, those)))),
        spans_in_words(those),
    )


def _sent(each: Mapping[str, Any]) -> float:
    return float(each["wire_bytes"] * each["times"])


def once_each(those: Sequence[Mapping[str, Any]]) -> str:
    """What alike collectives run once or more in: "layer", "microbatch", "step"; the innermost loop of any of them."""
    loops = max((each["loops"] for each in those), key=len)
    if not loops:
        return "step"
    unknown = any(loop["turns"] is None for loop in loops)
    return f"{loops[-1]['turn']}{', how many unknown' if unknown else ''}"


def arrays_in_words(collective: Mapping[str, Any]) -> str:
    """The whole array, or how many there are and the largest: "9: bf16[4096,1792] ..."."""
    end = -1 if collective["op"] == "all-gather" else 0
    whole = [member.split(" -> ")[end].split()[-1] for member in collective["members"]]
    return whole[0] if len(whole) == 1 else f"{len(whole)}: {max(whole, key=_size)} ..."


def _size(shape: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", shape.partition("[")[2]))


def spans_in_words(those: Sequence[Mapping[str, Any]]) -> str:
    """How many products they span, from the fewest to the most."""
    if not any(each["asynchronous"] for each in those):
        return "waits"
    counts = sorted({len(each["spans"]) for each in those})
    if counts == [0]:
        return "nothing"
    words = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return f"{words} product{'' if counts == [1] else 's'}"


def percent(part: float, whole: float) -> str:
    """ "97 %", empty of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else ""


def _not_understood(unknown: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("not understood", "why", "times", "bytes", right=RIGHT)
    for each in unknown:
        table.add_row(f"{each['opcode']} {each['name']}", each["why"], f"{each['times']:,}", f"{each['bytes']:,}")
    return table
