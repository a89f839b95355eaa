"""The timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

The format is Chrome's trace event format, complete events "X" with times in microseconds. A row for the loops, one for
each stream. Of a loop the first iterations are drawn, and the others as one block that takes as long as they do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sharded_train.rehearse.costs import LANES
from sharded_train.rehearse.scopes import words_of
from sharded_train.rehearse.streams_state import COMPUTE

ROWS = {"loops": 0, COMPUTE: 1, **{lane: i for i, lane in enumerate(LANES, 2)}}
MICROSECONDS = 1e6
# Names of colours that the format knows.
COLOURS = {
    "products": "thread_state_running",
    "attention": "rail_response",
    "other": "generic_work",
    "wait": "terrible",
    "more": "grey",
}


def write(section: Mapping[str, Any], path: Path) -> None:
    """Write the trace of a "time" section. Raises OSError."""
    path.write_text(json.dumps(trace(section)), encoding="utf-8")


def trace(section: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of a "time" section as JSON values."""
    return {"traceEvents": list(_events(section)), "displayTimeUnit": "ms", "otherData": {"note": section["bound"]}}


def _events(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one device, at best"}}
    for name, row in ROWS.items():
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}
    drawn = [
        _event(
            "loops", loop["start"], loop["end"] - loop["start"], f"{words_of(loop['scope'])}: {loop['trips']:,} times"
        )
        | {"args": {"loop": loop["name"], "turn_ms": 1e3 * loop["steady"]}}
        for loop in section["loops"]
    ]
    for event in section["events"]:
        name = f"wait for {event['place']}" if event["what"] == "wait" else event["name"]
        extra: dict[str, Any] = {"cat": event["what"], "args": {"place": event["place"]}}
        if colour := COLOURS.get(event["what"]):
            extra["cname"] = colour
        drawn.append(_event(event["lane"], event["start"], event["seconds"], name) | extra)
    yield from sorted(drawn, key=lambda event: (event["ts"], -event["dur"]))


def _event(row: str, start: float, seconds: float, name: str) -> dict[str, Any]:
    ts, dur = start * MICROSECONDS, seconds * MICROSECONDS
    return {"ph": "X", "pid": 0, "tid": ROWS[row], "ts": ts, "dur": dur, "name": name}
