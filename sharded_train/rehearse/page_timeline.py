"""The timeline of the streams, drawn true to scale as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse.page_bars import block, rectangle, svg, text
from sharded_train.rehearse.page_style import WIDTH, colour_of_axes
from sharded_train.rehearse.timeline import KINDS, kernel_words, seconds_in_words

LEFT = 84  # for the names of the streams
LANES = {"compute": (0, 40), "NVLink": (48, 26), "network": (80, 26)}  # top and height
LOOP_HEIGHT = 22
CHARACTER = 6.2  # how wide one is, about


def timeline(section: Mapping[str, Any], start: float, end: float, *, loops: bool) -> str:
    """The streams from `start` to `end`, with the loops above or with names in the blocks.

    Turns of a loop that are not drawn one by one are one block, in which heights are the shares of what it does.
    """
    events = [each for each in section["events"] if each["start"] < end and each["start"] + each["seconds"] > start]
    scale = _Scale(start, end)
    frames = list(_loops(section, scale)) if loops else []
    top = 4 + LOOP_HEIGHT * (1 + max((level for level, _ in frames), default=-1))
    drawn = [frame for _, frame in frames]
    bottom: float = top
    for lane, (y, height) in LANES.items():
        if inside := [each for each in events if each["lane"] == lane]:
            drawn.append(rectangle(LEFT, WIDTH - LEFT, top + y, height, "var(--card)"))
            drawn.append(text(LEFT - 10, top + y + height / 2 + 4, lane, "end"))
            drawn += _lane(inside, scale, top + y, height, named=not loops)
            bottom = top + y + height
    drawn += _ticks(scale, bottom)
    return svg(bottom + 24, drawn)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Where a moment stands in the picture."""

    start: float
    end: float

    def __call__(self, time: float) -> float:
        part = (time - self.start) / (self.end - self.start) if self.end > self.start else 0.0
        return LEFT + min(max(part, 0.0), 1.0) * (WIDTH - LEFT)


@dataclasses.dataclass
class _Drawn:
    """Neighbours that look alike and are too thin to be told apart, drawn as one."""

    event: Mapping[str, Any]
    x0: float
    x1: float
    seconds: float
    count: int = 1

    def takes(self, event: Mapping[str, Any], x0: float, x1: float) -> bool:
        """Whether another event goes into this one."""
        alike = event["what"] == self.event["what"] and (
            event["what"] != "wait" or event["place"] == self.event["place"]
        )
        return alike and event["what"] != "more" and x0 - self.x1 < 0.4 and min(x1 - x0, self.x1 - self.x0) < 1.5


def _lane(events: Sequence[Mapping[str, Any]], scale: _Scale, y: float, height: float, named: bool) -> Iterator[str]:
    last: _Drawn | None = None
    for event in sorted(events, key=lambda event: event["start"]):
        x0, x1 = scale(event["start"]), scale(event["start"] + event["seconds"])
        if last is not None and last.takes(event, x0, x1):
            last.x1, last.seconds, last.count = max(x1, last.x1), last.seconds + event["seconds"], last.count + 1
            continue
        if last is not None:
            yield from _one(last, y, height, named)
        last = _Drawn(event, x0, x1, event["seconds"])
    if last is not None:
        yield from _one(last, y, height, named)


def _one(drawn: _Drawn, y: float, height: float, named: bool) -> Iterator[str]:
    width, event = drawn.x1 - drawn.x0, drawn.event
    if width < 0.05:
        return
    if event["what"] == "more":
        yield from _shares(drawn, y, height)
        return
    colour, waiting = _colour(event)
    yield block(drawn.x0, width, y, height, colour, _hint(drawn), waiting)
    if named and width > 3:
        yield rectangle(drawn.x0, 1, y, height, "var(--paper)", 'opacity="0.5"')
    if named and not waiting and (words := _fitting(_names(event), width)):
        css = "middle small" if event["what"] == "other" else "on middle small"
        yield text(drawn.x0 + width / 2, y + height / 2 + 4, words, css)


def _colour(event: Mapping[str, Any]) -> tuple[str, bool]:
    """The CSS colour of an event, and whether it is striped as waiting."""
    if event["what"] == "wait":
        return colour_of_axes(event["place"].partition(" over ")[0]), True
    return (f"var(--{event['what']})" if event["what"] in KINDS else colour_of_axes(event["what"])), False


def _shares(drawn: _Drawn, y: float, height: float) -> Iterator[str]:
    """A block of many turns: bands as high as the shares of what they do, what waits at the bottom."""
    event = drawn.event
    at = y + height * max(0.0, 1 - sum(event["shares"].values()) / event["seconds"])  # of a link, the rest is idle
    for what, seconds in sorted(event["shares"].items(), key=lambda item: item[0].startswith("wait")):
        kind, _, axes = what.partition(" ")
        colour, waiting = _colour({"what": kind, "place": f"{axes} over "})
        high = height * min(1.0, seconds / event["seconds"])
        name = f"waiting for {axes}" if waiting else KINDS.get(what, what)
        hint = f"{event['name']}: {name}, {seconds_in_words(seconds)}"
        yield block(drawn.x0, drawn.x1 - drawn.x0, at, high, colour, hint, waiting)
        at += high


def _names(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Words for a block, the longest first: of a kernel what it is or is part of, of a collective its operation."""
    if event["lane"] != "compute":
        operation = str(event["name"].partition("-start")[0].rstrip("0123456789."))
        return operation, operation.rpartition("-")[2]
    if event["what"] == "products":
        return (str(event["place"].partition(",")[0]),)
    return ("attention",) if event["what"] == "attention" else (kernel_words(event["name"]),)


def _fitting(words: Sequence[str], width: float) -> str:
    """The first that fits into a block so wide, or nothing."""
    return next((each for each in words if CHARACTER * len(each) + 6 < width), "")


def _hint(drawn: _Drawn) -> str:
    event, took = drawn.event, seconds_in_words(drawn.seconds)
    if event["what"] == "wait":
        return f"waiting for {event['place']}: {took}"
    if drawn.count > 1:
        return f"{drawn.count} times {KINDS.get(event['what'], event['what'])}: {took}"
    return f"{event['name']}: {took}" + (f" ({event['place']})" if event["place"] else "")


def _loops(section: Mapping[str, Any], scale: _Scale) -> Iterator[tuple[int, str]]:
    """Level and drawing of each run of a loop that is wide enough."""
    for loop in section["loops"]:
        x0, x1 = scale(loop["start"]), scale(loop["end"])
        if x1 - x0 < 4 or loop["trips"] < 2:
            continue
        name = loop_words(section, loop)
        label = f"{loop['trips']:,} × {name}"
        longer = f"{label}, {seconds_in_words(loop['steady'])} each"
        y = 2 + LOOP_HEIGHT * loop["level"]
        yield loop["level"], block(x0, x1 - x0 - 1, y, LOOP_HEIGHT - 4, "var(--free)", longer)
        if words := _fitting((longer, label, f"{loop['trips']:,} × {name.rpartition(' ')[2]}"), x1 - x0):
            yield loop["level"], text((x0 + x1) / 2, y + 13, words, "small middle")


def loop_words(section: Mapping[str, Any], loop: Mapping[str, Any]) -> str:
    """What one turn of a loop is, told by what it computes: "layer, backward", "microbatch", "chunk of the head"."""
    if loop["turn"]:
        return str(loop["turn"])
    start, end = loop["steady_start"], loop["steady_start"] + loop["steady"]
    places = [each["place"] for each in section["events"] if start <= each["start"] < end and each["lane"] == "compute"]
    parts = {place.partition(",")[0] for place in places}
    if parts & {"attention", "mlp", "moe"}:
        if "head" in parts:
            return "microbatch"
        backward = any(place.endswith("backward") for place in places)
        return "layer, backward" if backward else "layer, forward"
    return "chunk of the head" if "head" in parts else "turn of a loop"


def _ticks(scale: _Scale, y: float) -> Iterator[str]:
    """A line of times below."""
    length = scale.end - scale.start
    step = next((s for s in _round_steps() if length / s <= 10), length or 1.0)
    for i in range(int(length / step + 1e-9) + 1):
        x = scale(scale.start + i * step)
        yield f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2:.1f}" y2="{y + 7:.1f}"/>'
        words = f"{seconds_in_words(i * step, digits=2)}" if i else "0"
        yield text(x, y + 18, words, f"soft small {'middle' if x < WIDTH - 20 else 'end'}")


def _round_steps() -> Iterator[float]:
    for power in range(-7, 4):
        for digit in (1, 2, 5):
            yield digit * 10.0**power
