"""The page's section about time: what a step is made of, its timeline, and one turn of each loop close up."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse.page_bars import Part, bar, legend
from sharded_train.rehearse.page_parts import figure, heading, link_title, paragraph, table
from sharded_train.rehearse.page_style import colour_of_axes
from sharded_train.rehearse.page_timeline import loop_words, timeline
from sharded_train.rehearse.timeline import IDLE, KINDS, seconds_in_words

CLOSE_UPS = 4  # loops of which one turn is drawn
KERNELS = 20  # rows in the table of kernels


def section(time: Mapping[str, Any]) -> Iterator[str]:
    """The section's HTML, from the section "time" of the facts."""
    step = time["step_seconds"]
    yield heading("How long, at best?")
    mfu = "" if time["mfu"] is None else f", so an MFU of at most {100 * time['mfu']:.1f} % of {time['peak_words']}"
    yield paragraph(f"At least {seconds_in_words(step)}{mfu}.")
    for note in time["notes"]:
        yield f'<div class="warning">{html.escape(note)}</div>'
    yield from pictures(time)
    yield "<h3>Kernels, the longest first</h3>"
    rows = [
        (
            row["part"],
            row["what"],
            row["bound"],
            f"{row['runs']:,}",
            seconds_in_words(row["seconds"]),
            f"{100 * row['seconds'] / step:.1f} %",
        )
        for row in time["kernels"][:KERNELS]
    ]
    yield table(("of", "what", "bound by", "runs", "time a step", "share"), rows, right=(3, 4, 5))
    yield paragraph(time["bound"], css="soft")


def pictures(time: Mapping[str, Any]) -> Iterator[str]:
    """What one step is made of, its timeline, and one turn of each loop close up."""
    step = time["step_seconds"]
    parts = list(_parts(time))
    yield figure(bar(parts, step) + legend(with_shares(parts, step)), "What one step is made of.")
    if time["idle"]:
        yield paragraph(f"{IDLE}: {seconds_in_words(time['idle'])}, {100 * time['idle'] / step:.0f} % of the step.")
    yield "<h3>The step from its first kernel to its last</h3>"
    yield figure(timeline(time, 0.0, step, loops=True) + legend_of(time), _overview(time))
    for loop in _innermost(time)[:CLOSE_UPS]:
        axes = " and ".join(_sent_in(time, loop)) or "nothing is sent"
        yield f"<h3>Close up: one {html.escape(loop_words(time, loop))} ({html.escape(axes)})</h3>"
        share = 100 * loop["step_seconds"] / step
        caption = f"{seconds_in_words(loop['steady'])}, {loop['step_turns']:,} times a step: {share:.0f} % of it."
        start = loop["steady_start"]
        picture = timeline(time, start, start + loop["steady"], loops=False)
        yield figure(picture, f"{caption} Hover over a block for its name.")


def _overview(time: Mapping[str, Any]) -> str:
    """What is drawn, of what is there to be drawn."""
    drawn = {event["what"] for event in time["events"]}
    words = ["Hover over a block for its name."]
    if time["loops"]:
        words.append("Above, the loops.")
    if "more" in drawn:
        words.append(
            "Of each the first turns are drawn one by one, the others as one block in which heights are shares of time."
        )
    if _waits(time):
        words.append("Striped red: the device computes nothing and waits, for a link in the colour of its axis.")
    return " ".join(words)


def _waits(time: Mapping[str, Any]) -> bool:
    return any(row["exposed"] > 0 for row in time["exposed"])


def _parts(time: Mapping[str, Any]) -> Iterator[Part]:
    for kind, seconds in time["compute"].items():
        yield Part(KINDS[kind], seconds, seconds_in_words(seconds), f"var(--{kind})")
    for row in time["exposed"]:
        if row["exposed"] > 0.001 * time["step_seconds"]:
            name = f"waiting for {link_title(row['axes'], row['link'])}"
            colour = colour_of_axes(row["axes"])
            yield Part(name, row["exposed"], seconds_in_words(row["exposed"]), colour, waiting=True)


def with_shares(parts: Sequence[Part], whole: float) -> list[Part]:
    """The parts with their amounts in their names, for a legend."""
    return [
        dataclasses.replace(part, name=f"{part.name}: {part.words}, {100 * part.amount / whole:.0f} %")
        for part in parts
    ]


def legend_of(time: Mapping[str, Any]) -> str:
    """What the colours of a timeline mean."""
    kinds = [Part(words, 0, "", f"var(--{kind})") for kind, words in KINDS.items()]
    axes = [
        Part(axes, 0, "", colour_of_axes(axes)) for axes in sorted({row["axes"] for row in time["exposed"]}) if axes
    ]
    waiting = [Part("waiting", 0, "", "var(--free)", waiting=True)] if _waits(time) else []
    return legend([*kinds, *axes, *waiting])


def _innermost(time: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of each loop that holds no other the longest turns drawn, those that take longest in the step first.

    Loops whose turns are alike, as of a first and of other microbatches, are one.
    """
    loops = sorted(time["loops"], key=lambda loop: loop["steady"])
    last = {loop["name"]: loop for loop in loops if not any(_within(other, loop) for other in loops)}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for loop in last.values():
        alike = loop_words(time, loop), _sent_in(time, loop), f"{loop['steady']:.2g}"
        if before := found.get(alike):
            before["step_turns"] += loop["step_turns"]
            before["step_seconds"] += loop["step_seconds"]
        else:
            found[alike] = dict(loop)
    return sorted(found.values(), key=lambda loop: -loop["step_seconds"])


def _sent_in(time: Mapping[str, Any], loop: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes whose collectives are on the links in one turn of a loop."""
    start, end = loop["steady_start"], loop["steady_start"] + loop["steady"]
    inside = [event for event in time["events"] if start <= event["start"] < end and event["lane"] != "compute"]
    return tuple(sorted({event["what"] for event in inside} - {"more", ""}))


def _within(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    """Whether a run of a loop lies in a run of another."""
    return bool(outer["level"] < inner["level"] and outer["start"] <= inner["start"] and inner["end"] <= outer["end"])
