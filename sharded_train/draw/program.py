"""A compiled program drawn, from an audit or a rehearsal; and pipeline schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sharded_train.draw.display import Html
from sharded_train.errors import ConfigError
from sharded_train.rehearse import compare, page, page_time, page_wires
from sharded_train.rehearse.page_parts import figure, table
from sharded_train.rehearse.page_timeline import timeline as timeline_svg
from sharded_train.rehearse.timeline import seconds_in_words
from sharded_train.schedule_report.picture import svg
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours
from sharded_train.schedules.table import Schedule
from sharded_train.tables import bytes_in_words


class Found(Protocol):
    """An `Audit` or a `Rehearsal`."""

    @property
    def facts(self) -> dict[str, Any]: ...


def collectives(found: Found) -> Html:
    """Every collective: over which axes and link, how many bytes, how often, what is computed meanwhile."""
    wires = found.facts["wires"]
    totals = "\n".join(
        f"{' x '.join(row['axes'])} over {row['link']}: {row['op']} {row['dtype']}, {row['runs']} times, "
        f"{bytes_in_words(round(row['wire_bytes']))}"
        for row in wires["totals"]
    )
    return Html("".join(page_wires.section(wires, found.facts["time"])), totals or "no collectives")


def memory(found: Found) -> Html:
    """What a device holds at the fullest moment."""
    section = found.facts["memory"]
    return Html("".join(page.memory_section(section)), section["words"])


def timeline(found: Found, start: float = 0.0, end: float | None = None) -> Html:
    """The streams that compute and send, from `start` to `end` in seconds; by default the whole step and its loops.

    Raises ConfigError: nothing lies between start and end.
    """
    time = found.facts["time"]
    step = time["step_seconds"]
    stop = step if end is None else min(end, step)
    if not 0 <= start < stop:
        raise ConfigError(f"draw.timeline: from {start} to {stop} s; the step has {seconds_in_words(step)}")
    words = f"{seconds_in_words(step)} a step, at least"
    if start == 0 and stop == step:
        return Html("".join(page_time.pictures(time)), words)
    caption = f"From {seconds_in_words(start)} to {seconds_in_words(stop)} of {words}."
    drawn = timeline_svg(time, start, stop, loops=False) + page_time.legend_of(time)
    return Html(figure(drawn, caption), caption)


def schedule(schedule: Schedule, costs: Costs | None = None) -> Html:
    """A pipeline schedule over simulated time; `costs` by default 1 for a stage's forward, 2 for its backward."""
    each = costs or Costs.even(schedule.num_stages, schedule.num_chunks, 1.0, 1.0, 1.0)
    timing = neighbours(schedule, each)
    title = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"bubble {100 * timing.bubble:.1f} %"
    )
    return Html(figure(svg(schedule, each, timing, title), "Time goes right. Hover over a block."), title)


def comparison(found: Mapping[str, Found]) -> Html:
    """Several rehearsals of our train step side by side, the best of each number marked."""
    section = compare.describe({name: each.facts for name, each in found.items()})
    rows = [("fits", *section["fits"].values())]
    for row in compare.ROWS:
        values = list(section["rows"][row.name].values())
        if any(values):
            rows.append((row.name, *compare.marked(row, values)))
    names = list(found)
    return Html(table(("", *names), rows, right=range(1, len(names) + 1)), "\n".join("  ".join(row) for row in rows))
