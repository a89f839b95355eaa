"""A schedule over simulated time as a Gantt chart: in text, as SVG and, with matplotlib, as PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from sharded_train.errors import ConfigError
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import Timing, work
from sharded_train.schedules.table import NONE, Schedule

KINDS = "FBW"
WORDS = ("forward", "backward", "backward of weights")
STYLES = {"F": "blue", "B": "green", "W": "yellow", "#": "cyan", "·": "dim"}
COLOURS = ("#4c78c8", "#3d9a5f", "#d9a441")
DARK = """@media (prefers-color-scheme: dark) {
.gantt-paper { fill: #12161c } .gantt-ink { fill: #e6eaf0 } .gantt-idle { fill: #262e39 } }"""


class Bar(NamedTuple):
    """One piece of work: kind 0, 1, 2 for F, B, W."""

    kind: int
    stage: int
    microbatch: int
    chunk: int
    begin: float
    end: float


def bars(schedule: Schedule, costs: Costs, timing: Timing) -> Iterator[Bar]:
    """All work of a step that takes time, tick by tick; within a tick a stage does F, B and W without a pause."""
    spent = work(schedule, costs)
    begins = timing.begins + np.cumsum(spent, axis=0) - spent
    tables = [schedule.forward, schedule.backward, schedule.weights]
    for kind, items in enumerate(tables):
        if items is None:
            continue
        for tick, stage in np.argwhere((items != NONE) & (spent[kind] > 0)).tolist():
            item, begin = items[tick, stage], float(begins[kind, tick, stage])
            microbatch, chunk = int(schedule.microbatch(item)), int(schedule.chunk(item))
            yield Bar(kind, stage, microbatch, chunk, begin, begin + float(spent[kind, tick, stage]))


def legend(schedule: Schedule) -> str:
    """What the picture's letters mean."""
    kinds = "F forward, B backward" + (", W backward of weights" if schedule.weights is not None else "")
    return f"{kinds}, # several of them, · idle; small letters (and +): idle for more than a quarter of the time"


def draw(schedule: Schedule, costs: Costs, timing: Timing, width: int) -> Text:
    """A line for each stage, time going right over the whole width; a letter in colour for what is done most.

    Where there is room, every piece of work stands there with its microbatch's number: `F0 F1 B0`.
    """
    label = len(f"stage {schedule.num_stages - 1} ")
    columns = width - label
    shortest = min((bar.end - bar.begin for bar in bars(schedule, costs, timing)), default=1.0)
    digits = len(str(schedule.num_microbatches - 1))
    roomy = columns / timing.time * shortest >= digits + 1.5
    lines = _numbered(schedule, costs, timing, columns) if roomy else _lettered(schedule, costs, timing, columns)
    text = Text(no_wrap=True, overflow="crop")
    for stage, line in enumerate(lines):
        text.append(f"stage {stage:<{label - 7}} ")
        for character, style in line:
            text.append(character, style)
        text.append("\n" if stage + 1 < schedule.num_stages else "")
    return text


def _numbered(schedule: Schedule, costs: Costs, timing: Timing, columns: int) -> list[list[tuple[str, str]]]:
    lines = [[("·", STYLES["·"])] * columns for _ in range(schedule.num_stages)]
    scale = columns / timing.time
    for bar in bars(schedule, costs, timing):
        begin, end = round(bar.begin * scale), round(bar.end * scale)
        letter = KINDS[bar.kind]
        cell = f"{letter}{bar.microbatch}".ljust(end - begin)[: end - begin]
        style = f"{STYLES[letter]} {'reverse' if bar.chunk % 2 else ''}"
        lines[bar.stage][begin:end] = [(character, style) for character in cell]
    return lines


def _lettered(schedule: Schedule, costs: Costs, timing: Timing, columns: int) -> list[list[tuple[str, str]]]:
    share = _shares(schedule, costs, timing, columns)
    busy = share.sum(0)
    several = (share >= busy / 4).sum(0) > 1
    lines = []
    for stage in range(schedule.num_stages):
        line = []
        for column in range(columns):
            letter = "#" if several[stage, column] else KINDS[int(share[:, stage, column].argmax())]
            if busy[stage, column] < 0.25:
                letter = "·"
            style = STYLES[letter]
            if busy[stage, column] < 0.75:
                letter = "+" if letter == "#" else letter.lower()
            line.append((letter, style))
        lines.append(line)
    return lines


def _shares(schedule: Schedule, costs: Costs, timing: Timing, columns: int) -> np.ndarray:
    """How much of each column's time each kind takes, `[kind, stage, column]`."""
    spent = work(schedule, costs)
    begins = timing.begins + np.cumsum(spent, axis=0) - spent
    edges = np.linspace(0, timing.time, columns + 1)
    found = np.zeros((len(KINDS), schedule.num_stages, columns))
    for kind, stage in np.ndindex(found.shape[:2]):
        at, lasts = begins[kind, :, stage], spent[kind, :, stage]
        moments = np.stack([at, at + lasts], axis=1).ravel()
        before = np.concatenate([[0.0], np.cumsum(lasts)])
        done = np.stack([before[:-1], before[1:]], axis=1).ravel()  # of this kind, up to each moment
        found[kind, stage] = np.diff(np.interp(edges, moments, done)) / (edges[1] or 1)
    return found


def svg(schedule: Schedule, costs: Costs, timing: Timing, title: str) -> str:
    """The chart as an SVG image, light or dark as the viewer's surroundings, over an axis of time.

    Bars say what they are when pointed at, darker ones are of later chunks.
    """
    row, left, top, wide = 24, 64, 34, max(960.0, min(3000.0, 7.0 * 3 * schedule.num_items))
    scale, bottom = wide / timing.time, top + row * schedule.num_stages
    size = (left + wide + 24, bottom + 60)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" '
        f'width="{size[0]:.0f}" height="{size[1]}" font-family="sans-serif" font-size="12">',
        f"<style>{DARK}</style>",
        '<rect class="gantt-paper" width="100%" height="100%" fill="white"/>',
        f'<text class="gantt-ink" x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for stage in range(schedule.num_stages):
        y = top + row * stage
        out.append(f'<text class="gantt-ink" x="8" y="{y + 16}">stage {stage}</text>')
        idle = f'class="gantt-idle" x="{left}" y="{y + 2}" width="{wide:.1f}" height="{row - 4}"'
        out.append(f'<rect {idle} fill="#eeeeee"/>')
    for moment in moments(timing.time):
        x = left + moment * scale
        line = f'x1="{x:.2f}" x2="{x:.2f}" y1="{top}" y2="{bottom + 5}" stroke="#999999" stroke-width="0.7"'
        place = f'x="{x:.2f}" y="{bottom + 18}" text-anchor="middle"'
        out.append(f'<line {line}/><text class="gantt-ink" {place}>{moment:.4g}</text>')
    out += [_bar(bar, schedule, left, top, row, scale) for bar in bars(schedule, costs, timing)]
    y = bottom + 46
    for kind in range(2 if schedule.weights is None else 3):
        x = left + 170 * kind
        out.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(f'<text class="gantt-ink" x="{x + 18}" y="{y}">{KINDS[kind]} {WORDS[kind]}</text>')
    ends = f'x="{left + wide:.0f}" y="{y}" text-anchor="end"'
    out.append(f'<text class="gantt-ink" {ends}>time, in the unit of the costs: {timing.time:.4g}</text></svg>')
    return "\n".join(out) + "\n"


def moments(time: float) -> list[float]:
    """Round numbers from 0 to a time, 4 to 10 steps of 1, 2 or 5 times a power of ten."""
    rough = time / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(time / step * (1 + 1e-9)) + 1)]


def _bar(bar: Bar, schedule: Schedule, left: float, top: float, row: int, scale: float) -> str:
    x, span, y = left + bar.begin * scale, (bar.end - bar.begin) * scale, top + row * bar.stage + 2
    of_chunk = f", chunk {bar.chunk}" if schedule.num_chunks > 1 else ""
    what = f"{WORDS[bar.kind]} of microbatch {bar.microbatch}{of_chunk} on stage {bar.stage}"
    out = (
        f'<rect x="{x:.2f}" y="{y}" width="{span:.2f}" height="{row - 4}" '
        f'fill="{_shade(COLOURS[bar.kind], (bar.chunk + 1) / schedule.num_chunks)}" stroke="white" '
        f'stroke-width="0.5"><title>{what}: {bar.begin:.4g} to {bar.end:.4g}</title></rect>'
    )
    if span < 7 * len(f"{KINDS[bar.kind]}{bar.microbatch}") + 2:
        return out
    middle = f'x="{x + span / 2:.2f}" y="{y + 15}" text-anchor="middle"'
    return f'{out}<text {middle} pointer-events="none" style="fill: #111">{KINDS[bar.kind]}{bar.microbatch}</text>'


def _shade(colour: str, share: float) -> str:
    """A colour mixed with white, the more the smaller the share of chunks that are done."""
    mixed = (round(255 - (255 - int(colour[i : i + 2], 16)) * (0.4 + 0.6 * share)) for i in (1, 3, 5))
    return f"#{''.join(f'{part:02x}' for part in mixed)}"


def png(schedule: Schedule, costs: Costs, timing: Timing, title: str, path: Path) -> None:
    """The chart as a PNG image; ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib, which the extra `notebooks` brings (pip install 'sharded-train[notebooks]'); "
            "--svg and --html need nothing"
        ) from error
    figure = Figure(figsize=(14, 1 + 0.35 * schedule.num_stages), layout="constrained")
    axes = figure.subplots()
    for bar in bars(schedule, costs, timing):
        fade = 1 - 0.6 * (1 - (bar.chunk + 1) / schedule.num_chunks)
        look: dict[str, Any] = {"color": COLOURS[bar.kind], "alpha": fade, "edgecolor": "white", "linewidth": 0.3}
        axes.barh(bar.stage, bar.end - bar.begin, left=bar.begin, height=0.85, **look)
    axes.set(title=title, xlabel="time", ylabel="stage", xlim=(0, timing.time))
    kinds = range(2 if schedule.weights is None else 3)
    handles = [Patch(color=COLOURS[kind], label=f"{KINDS[kind]} {WORDS[kind]}") for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    axes.set_yticks(range(schedule.num_stages))
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
