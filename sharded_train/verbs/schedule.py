"""`sharded-train schedule`: a pipeline schedule drawn, timed and weighed, from numbers alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharded_train.errors import ConfigError
from sharded_train.rehearse.outputs import problems_of
from sharded_train.schedule_report.bounds import asynchronous, useful_sends
from sharded_train.schedule_report.picture import draw, legend, png, svg
from sharded_train.schedule_report.remarks import count, remarks
from sharded_train.schedules.build import default_chunks, make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours
from sharded_train.schedules.slots import slots
from sharded_train.schedules.table import Schedule
from sharded_train.tables import WIDTH, bytes_in_words, new_table

MOST = 16  # stages that are listed one by one


def schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Sequence[float] = (1.0, 1.0, 1.0),
    activation_bytes: int | None = None,
    pictures: Mapping[str, Path] | None = None,
    json: bool = False,
) -> int:
    """Print a schedule's picture and numbers, or its tables as JSON; write `pictures`: "svg", "html", "png" to paths.

    `costs` are F, B, W and perhaps B and W together of a whole stage, in any unit of time; `activation_bytes` what one
    send carries.
    """
    pictures = pictures or {}
    if problems := problems_of(pictures):
        raise ConfigError(problems)
    chunks = chunks or default_chunks(name)
    each = Costs.even(stages, chunks, *costs)
    made = make(name, stages, microbatches, chunks, each)
    facts = describe(made, each, activation_bytes)
    _write(made, each, facts, pictures)
    if json:
        print(dumps({**facts, **tables(made)}))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        print_schedule(made, each, facts, console)
    return 0


def describe(
    schedule: Schedule, costs: Costs, activation_bytes: int | None = None, one_chunk: Costs | None = None
) -> dict[str, Any]:
    """What a schedule costs, in values that JSON can hold. Times are in the unit of the costs, `sends` are of a step.

    `in_flight` (forward to backward) and `kept` (backward to weights) are, per stage, in whole stages' worth of a
    microbatch. `buffers` are slots per stage; one holds an activation, one of `kept` at least two, the chunk's input
    and its output's cotangent. `one_chunk` are the costs of 1F1B, where its layers are split otherwise.
    """
    one_chunk = one_chunk or costs.whole_stages()
    timing, held, needed = neighbours(schedule, costs), in_flight(schedule) / schedule.num_chunks, slots(schedule)
    one = neighbours(make("1f1b", schedule.num_stages, schedule.num_microbatches), one_chunk)
    sends = 2 * schedule.num_ticks * schedule.num_stages
    facts: dict[str, Any] = {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "num_ticks": schedule.num_ticks,
        "costs": {kind: getattr(costs, kind).tolist() for kind in vars(costs)},
        "time": timing.time,
        "time_asynchronous": asynchronous(schedule, costs),
        "time_1f1b": one.time,
        "bubble": timing.bubble,
        "bubble_1f1b": one.bubble,
        "in_flight": held[0].tolist(),
        "kept": held[1].tolist(),
        "buffers": {
            "inputs": needed.num_inputs,
            "cotangents": needed.num_cotangents,
            "kept": needed.num_kept,
        },
        "sends": sends,
        "sends_useful": useful_sends(schedule),
        "remarks": remarks(schedule, costs, one_chunk),
    }
    if activation_bytes is not None:
        facts["bytes_per_send"] = activation_bytes
        facts["bytes_per_tick"] = 2 * activation_bytes
        facts["bytes_per_step"] = 2 * schedule.num_ticks * activation_bytes
        num_held = needed.num_inputs + needed.num_cotangents + 2 * needed.num_kept
        facts["buffer_bytes"] = num_held * activation_bytes
    return facts


def tables(schedule: Schedule) -> dict[str, Any]:
    """The tables in values that JSON can hold, `[tick][stage]`: items (microbatch x chunks + chunk), slots, or -1."""
    kinds = {kind: getattr(schedule, kind) for kind in ("forward", "backward", "weights")}
    items = {kind: items.tolist() for kind, items in kinds.items() if items is not None}
    found = vars(slots(schedule))
    return {"items": items, "slots": {name: at.tolist() for name, at in found.items() if isinstance(at, np.ndarray)}}


def print_schedule(schedule: Schedule, costs: Costs, facts: Mapping[str, Any], console: Console) -> None:
    """The picture over simulated time, and below it what `describe` found, beside 1F1B."""
    console.print(Text(title(facts), style="bold"))
    console.print(draw(schedule, costs, neighbours(schedule, costs), console.width))
    console.print(Text(legend(schedule), style="dim"))
    console.print()
    console.print(_table(_numbers(facts)))
    console.print()
    console.print(_table(_stages(facts)))
    for remark in facts["remarks"]:
        console.print(Text(f"note: {remark}"))


def title(facts: Mapping[str, Any]) -> str:
    """One line that says what it is."""
    chunks = f" × {facts['num_chunks']} chunks" if facts["num_chunks"] > 1 else ""
    stages, microbatches = (count(facts[f"num_{what}"], what) for what in ("stages", "microbatches"))
    return f"{facts['schedule']}: {stages}{chunks}, {microbatches}; bubble {facts['bubble']:.1%}"


def _numbers(facts: Mapping[str, Any]) -> list[list[str]]:
    """Rows of what it costs, the head first, beside 1F1B where it is another."""
    name, num_ticks = facts["schedule"], facts["num_ticks"]
    rows = [
        ["", name, "1f1b", ""],
        ["simulated time", f"{facts['time']:.4g}", f"{facts['time_1f1b']:.4g}", "in the unit of the costs"],
        ["bubble", f"{facts['bubble']:.1%}", f"{facts['bubble_1f1b']:.1%}", "of the stages' time is idle"],
    ]
    if facts["time_asynchronous"] < facts["time"] * (1 - 1e-9):
        asynchronous = f"{facts['time_asynchronous']:.4g}"
        rows.append(["time without waiting", asynchronous, "", "if stages waited for data only, not for sends"])
    rows.append(["ticks", str(num_ticks), str(facts["num_microbatches"] + 2 * facts["num_stages"] - 2), ""])
    useful = f"{facts['sends_useful']} of {facts['sends']} are used"
    rows.append(["sends of a stage", str(2 * num_ticks), "", f"two a tick; of all stages' {useful}"])
    buffers = facts["buffers"]
    words = ", ".join(f"{kind} {n}" for kind, n in buffers.items() if n)
    rows.append(["slots of a stage", str(sum(buffers.values())), "", words])
    if "bytes_per_send" in facts:
        for what, key, words in (
            ("bytes sent a tick", "bytes_per_tick", "by a stage, both ways"),
            ("bytes sent a step", "bytes_per_step", "by a stage, both ways"),
            ("bytes of the slots", "buffer_bytes", "kept counts twice: input and cotangent"),
        ):
            rows.append([what, bytes_in_words(facts[key]), "", words])
    return [[*row[:2], *row[3:]] for row in rows] if name == "1f1b" else rows


def _stages(facts: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the peaks of what each stage holds, the head first; the first and the last of many stages."""
    p, weights = facts["num_stages"], any(facts["kept"])
    rows = [["stage", "in flight", *["kept for weights"] * weights, ""]]
    listed = list(range(p)) if p <= MOST else [*range(MOST // 2), *range(p - MOST // 2, p)]
    for stage in listed:
        if p > MOST and stage == p - MOST // 2:
            rows.append(["…", *[""] * (2 + weights)])
        kept = [f"{facts['kept'][stage]:.4g}"] if weights else []
        words = "microbatches' worth of the whole stage, at most" if stage == 0 else ""
        rows.append([str(stage), f"{facts['in_flight'][stage]:.4g}", *kept, words])
    return rows


def _table(rows: Sequence[Sequence[str]], left: Sequence[str] = ("",)) -> Table:
    table = new_table(*rows[0], right=[name for name in rows[0] if name not in left])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _write(schedule: Schedule, costs: Costs, facts: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
    timing = neighbours(schedule, costs)
    for kind, path in pictures.items():
        try:
            if kind == "png":
                png(schedule, costs, timing, title(facts), path)
            else:
                image = svg(schedule, costs, timing, title(facts))
                path.write_text(image if kind == "svg" else _page(facts, image), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        print(f"wrote {path}", file=sys.stderr)


def _page(facts: Mapping[str, Any], image: str) -> str:
    """The picture and the numbers as one HTML file that needs no other."""
    from sharded_train.schedule_report.page import page  # its looks are those of `rehearse`, which brings jax

    return page(title(facts), image, _numbers(facts), _stages(facts), facts)
