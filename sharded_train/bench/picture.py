"""Bus bandwidth over size, one line for each operation, as SVG for light and dark surroundings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from sharded_train.bench.measure import Point
from sharded_train.tables import bytes_in_words

COLOURS = ("#4c78c8", "#d9a441", "#3d9a5f", "#c4574f", "#8b6bc7", "#3a9fb0", "#a0764a", "#c76b9a")
STYLE = """<style>.paper { fill: #fff } .ink { fill: #1c2430 } .line { stroke: #d9dee5 }
@media (prefers-color-scheme: dark) {
.paper { fill: #12161c } .ink { fill: #e6eaf0 } .line { stroke: #303947 } }</style>"""
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 640, 260, 76, 44, 150


def svg(points: Sequence[Point], words: Mapping[str, str]) -> str:
    """A chart for each axis, below one another; `words` says what each axis rides on."""
    axes = list(dict.fromkeys(each.axis for each in points))
    tall = TOP + HEIGHT + 56
    charts = "".join(
        f'<g transform="translate(0 {i * tall})">'
        f"{_chart([each for each in points if each.axis == axis], f'{axis}, {words[axis]}')}</g>"
        for i, axis in enumerate(axes)
    )
    wide, high = LEFT + WIDTH + RIGHT, tall * len(axes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'font-family="sans-serif" font-size="12">{STYLE}<rect class="paper" width="100%" height="100%"/>'
        f"{charts}</svg>\n"
    )


def _chart(points: Sequence[Point], title: str) -> str:
    names = list(dict.fromkeys(each.operation for each in points))
    all_sizes = sorted({each.bytes for each in points})
    fastest, slowest = (f(each.bus_bandwidth for each in points) for f in (max, min))
    low, high = math.floor(math.log10(slowest)), math.ceil(math.log10(fastest))
    high = max(high, low + 1)
    first, last = math.log(all_sizes[0]), math.log(all_sizes[-1])

    def x(size: int) -> float:
        return LEFT + WIDTH * ((math.log(size) - first) / (last - first) if last > first else 0.5)

    def y(rate: float) -> float:
        return TOP + HEIGHT * (high - math.log10(rate)) / (high - low)

    out = [f'<text class="ink" x="{LEFT}" y="22" font-size="14">{escape(title)}: bus bandwidth</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<line class="line" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="ink" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_rate(10.0**power)}</text>')
    every = -(-len(all_sizes) // 8)
    for size in all_sizes[::every]:
        place = f'x="{x(size):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle"'
        out.append(f'<text class="ink" {place}>{bytes_in_words(size)}</text>')
    middle = f'x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 40}" text-anchor="middle"'
    out.append(f'<text class="ink" {middle}>size of the whole buffer</text>')
    for i, name in enumerate(names):
        those = sorted((each for each in points if each.operation == name), key=lambda each: each.bytes)
        corners = " ".join(f"{x(each.bytes):.1f},{y(each.bus_bandwidth):.1f}" for each in those)
        colour = COLOURS[i % len(COLOURS)]
        out.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for each in those:
            hint = f"<title>{name}, {bytes_in_words(each.bytes)}: {_rate(each.bus_bandwidth, 3)}</title>"
            centre = f'cx="{x(each.bytes):.1f}" cy="{y(each.bus_bandwidth):.1f}"'
            out.append(f'<circle {centre} r="3" fill="{colour}">{hint}</circle>')
        left, top = LEFT + WIDTH + 18, TOP + 10 + 20 * i
        out.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text class="ink" x="{left + 18}" y="{top + 11}">{name}</text>')
    return "".join(out)


def _rate(bytes_per_second: float, digits: int = 1) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_second >= 0.9995 * size:
            return f"{float(f'{bytes_per_second / size:.{digits}g}'):g} {unit}"
    return f"{bytes_per_second:.{digits}g} B/s"
