"""Bars of parts and legends for the page, as SVG and HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence

from sharded_train.rehearse.page_style import PATTERNS, WIDTH

TOP, HEIGHT = 22, 44


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a bar: its name, how much, the same in words, its CSS colour; `waiting` is striped in red."""

    name: str
    amount: float
    words: str
    colour: str
    waiting: bool = False


def bar(parts: Sequence[Part], whole: float, *, reserve: float = 0, marks: Mapping[str, float] | None = None) -> str:
    """Parts of `whole` side by side; the last `reserve` of it is hatched; `marks` are lines with a name at an amount.

    Parts may go beyond the whole, which then shows how far.
    """
    total = max(whole, sum(part.amount for part in parts))
    scale = WIDTH / total if total else 0
    drawn = [rectangle(0, whole * scale, TOP, HEIGHT, "var(--free)")]
    if reserve:
        drawn.append(rectangle((whole - reserve) * scale, reserve * scale, TOP, HEIGHT, "url(#reserve)"))
    x = 0.0
    for part in parts:
        width = part.amount * scale
        drawn.append(block(x, width, TOP, HEIGHT, part.colour, f"{part.name}: {part.words}", part.waiting))
        if width > 7 * len(part.words) + 8:
            css = "middle edged" if part.waiting else "on middle"
            drawn.append(text(x + width / 2, TOP + HEIGHT / 2 + 4, part.words, css))
        x += width
    for name, amount in (marks or {}).items():
        at = min(amount * scale, WIDTH - 1)
        drawn.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{TOP + HEIGHT + 6}"/>')
        drawn.append(text(at, TOP - 10, name, "end" if at > WIDTH / 2 else ""))
    return svg(TOP + HEIGHT + 10, drawn)


def svg(height: float, drawn: Sequence[str]) -> str:
    """A picture of the page's width."""
    inside = "\n".join(drawn)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{PATTERNS}\n{inside}\n</svg>'


def block(x: float, width: float, y: float, height: float, colour: str, hint: str, waiting: bool = False) -> str:
    """A rectangle with a hint for the mouse."""
    title = f"<title>{html.escape(hint)}</title>"
    if waiting:
        pale = rectangle(x, width, y, height, colour, 'opacity="0.4"')
        return pale + rectangle(x, width, y, height, "url(#waiting)", inside=title)
    return rectangle(x, width, y, height, colour, inside=title)


def rectangle(x: float, width: float, y: float, height: float, fill: str, more: str = "", inside: str = "") -> str:
    """A rectangle as SVG."""
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}"'
    return f'<rect {box} fill="{fill}" {more}>{inside}</rect>'


def text(x: float, y: float, words: str, css: str = "") -> str:
    """A line of text as SVG."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>'


def legend(parts: Sequence[Part]) -> str:
    """The parts' names and looks, in a line."""
    items = (f'<span><i style="background:{look(part)}"></i>{html.escape(part.name)}</span>' for part in parts)
    return f'<div class="legend">{"".join(items)}</div>'


def look(part: Part) -> str:
    """A part's background, as a CSS value."""
    if part.waiting:
        return f"repeating-linear-gradient(45deg,var(--wait) 0 3px,{part.colour} 3px 6px)"
    return part.colour
