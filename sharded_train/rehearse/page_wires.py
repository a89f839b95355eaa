"""The page's section about communication: bytes and seconds of each axis over its link, and every collective."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse.page_parts import heading, link_title, paragraph, table
from sharded_train.rehearse.page_style import colour_of_axes
from sharded_train.rehearse.timeline import seconds_in_words
from sharded_train.rehearse.wires_tables import CONVENTION, arrays_in_words, once_each, spans_in_words
from sharded_train.rehearse.wires_totals import axes_in_words, number_in_words
from sharded_train.tables import bytes_in_words

ROWS = 14  # collectives in the table at first, alike ones being one; the others unfold

COLUMNS = ("over", "operation", "where", "array, whole", "times", "once each", "sent", "spans")


def section(wires: Mapping[str, Any], time: Mapping[str, Any]) -> Iterator[str]:
    """The section's HTML, from the sections "wires" and "time" of the facts."""
    yield heading("What crosses which wire?")
    if not wires["collectives"]:
        yield paragraph("Nothing: no collective stands in the program.")
        return
    links = _by_link(wires["totals"])
    yield paragraph(
        "Every collective of one step, by the mesh axes that it joins and the link that it rides on. NVLink joins the "
        "devices of one host, the network the hosts."
    )
    yield "<h3>Sent by each device in a step</h3>"
    most = max(row["sent"] for row in links) or 1.0
    yield _bars(
        (
            link_title(row["axes"], row["link"]),
            [(row["sent"] / most, f"background:{colour_of_axes(row['axes'])}")],
            bytes_in_words(round(row["sent"])),
        )
        for row in links
    )
    yield "<h3>Time on the link, and how much of it computing waits for</h3>"
    yield _bars(_waits(time))
    striped = " Striped red: computing stands still until it arrives." if any(map(_waited, time["exposed"])) else ""
    yield paragraph(f"Solid: carried while kernels run.{striped}", css="soft")
    yield "<h3>The collectives</h3>"
    rows = list(_rows(wires["collectives"]))
    yield table(COLUMNS, rows[:ROWS], right=(4, 6))
    if rows[ROWS:]:
        ones = f"{len(rows) - ROWS} smaller ones" if len(rows) > ROWS + 1 else "A smaller one"
        yield f"<details><summary>{ones}</summary>{table(COLUMNS, rows[ROWS:], right=(4, 6))}"
        yield "</details>"
    yield paragraph(CONVENTION, css="soft")
    if wires["not_understood"]:
        yield "<h3>Not understood, and in no sum</h3>"
        rows = [
            (f"{each['opcode']} {each['name']}", each["why"], f"{each['times']:,}") for each in wires["not_understood"]
        ]
        yield table(("instruction", "why", "times"), rows, right=(2,))


def _by_link(totals: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for each in totals:
        key = axes_in_words(each["axes"]), each["link"]
        row = rows.setdefault(key, {"axes": key[0], "link": key[1], "sent": 0.0})
        row["sent"] += each["wire_bytes"]
    return sorted(rows.values(), key=lambda row: -row["sent"])


def _waits(time: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[float, str]], str]]:
    rows = sorted(time["exposed"], key=lambda row: -row["seconds"])
    most = max((row["seconds"] for row in rows), default=0.0) or 1.0
    for row in rows:
        colour = colour_of_axes(row["axes"])
        hidden = max(0.0, row["seconds"] - row["exposed"])
        stripes = f"repeating-linear-gradient(45deg,var(--wait) 0 4px,{colour} 4px 8px)"
        parts = [(hidden / most, f"background:{colour}"), (row["exposed"] / most, f"background:{stripes}")]
        words = f"{seconds_in_words(row['seconds'])}, {seconds_in_words(row['exposed'])} of it waited for"
        yield link_title(row["axes"], row["link"]), parts, words


def _bars(rows: Iterator[tuple[str, list[tuple[float, str]], str]]) -> str:
    """A row for each name: a bar of parts (share of the widest bar, look), and words behind it."""
    drawn = []
    for name, parts, words in rows:
        spans = "".join(f'<span style="width:{100 * share:.2f}%;{look}"></span>' for share, look in parts)
        drawn.append(f'<div>{html.escape(name)}</div><div class="track">{spans}</div><div>{html.escape(words)}</div>')
    return f'<div class="bars">{"".join(drawn)}</div>'


def _rows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for alike collectives, the largest first."""
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in found:
        key = (each["op"], *each["axes"], each["link"], each["place"], *sorted(each["members"]), *each["branches"])
        kinds.setdefault(key, []).append(each)
    ordered = sorted(kinds.values(), key=lambda those: -sum(map(_sent, those)))
    for those in ordered:
        first = those[0]
        yield (
            link_title(axes_in_words(first["axes"]), first["link"]),
            first["op"],
            first["place"],
            arrays_in_words(first),
            number_in_words(sum(each["times"] for each in those)),
            once_each(those),
            bytes_in_words(round(sum(map(_sent, those)))),
            spans_in_words(those),
        )


def _waited(row: Mapping[str, Any]) -> bool:
    return bool(row["exposed"] > 0)


def _sent(each: Mapping[str, Any]) -> float:
    return float(each["wire_bytes"] * each["times"])
