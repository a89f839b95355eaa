"""The log of FP8 products as one HTML page that needs nothing else: heat maps by layer and step."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse.page import document
from sharded_train.rehearse.page_parts import figure, heading, paragraph

CELLS, MOST = 96, 3072  # columns of a heat map at most, and cells: of more steps the largest of neighbours
LEFT, WIDTH, ROW = 30, 470, 9  # of a map, in the units of its drawing

SECTIONS = (
    ("lost", "Share that became zero", "Darker is more, black a half or more.", 0.5),
    ("saturated", "Share that was clipped", "Darker is more, black a hundredth or more.", 0.01),
    ("amax", "Largest magnitude", "Logarithmic, each map from its own least to its own largest.", None),
    ("scale", "Scale", "What numbers were multiplied by before the cast; drawn as the largest magnitude is.", None),
)


def page(found: Mapping[str, Any], title: str) -> str:
    """The page, from the facts of `verbs.precision.facts`."""
    return document(f"Precision: {title}", "\n".join(_body(found, title)))


def _body(found: Mapping[str, Any], title: str) -> Iterator[str]:
    steps = found["steps"]
    yield f"<h1>Precision: {html.escape(title)}</h1>"
    yield paragraph(
        f"What the FP8 products of a run saw, at {len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}. A map has a "
        "row for each layer, the first on top; time goes right. x is a product's input, w its weight, g the gradient "
        "of its output. Point at a cell to read it; where there is none the layer was in bf16, or a number not finite.",
        css="lede",
    )
    for remark in found["remarks"]:
        yield paragraph(remark)
    for what, name, caption, most in SECTIONS:
        if not any(x is not None for of in found["tensors"].values() for row in of[what] for x in row):
            continue  # blocks have no one scale
        yield heading(name)
        yield figure(_maps(found, what, most), caption)


def _maps(found: Mapping[str, Any], what: str, most: float | None) -> str:
    """Maps of all tensors, two beside each other."""
    num_layers = len(next(iter(found["tensors"].values()))[what][0])
    height = 22 + ROW * num_layers
    drawn = []
    for i, (name, of) in enumerate(found["tensors"].items()):
        x, y = (i % 2) * (LEFT + WIDTH + 36), (i // 2) * (height + 8)
        cells = "".join(_map(name, of[what], found["steps"], most))
        drawn.append(f'<g transform="translate({x} {y})" fill="var(--ink)">{cells}</g>')
    rows = -(-len(drawn) // 2)
    return f'<svg viewBox="0 0 1072 {rows * (height + 8)}" role="img">{"".join(drawn)}</svg>'


def _map(name: str, rows: Sequence[Sequence[float | None]], steps: Sequence[int], most: float | None) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="12">{html.escape(name)}</text>'
    n = min(CELLS, len(rows), max(8, MOST // len(rows[0])))
    width = WIDTH / n
    columns = [range(i * len(rows) // n, (i + 1) * len(rows) // n) for i in range(n)]
    known = [x for row in rows for x in row if x]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    for layer in range(len(rows[0])):
        yield f'<text class="small soft end" x="{LEFT - 5}" y="{26 + ROW * layer}">{layer}</text>'
        for i, column in enumerate(columns):
            values = [value for at in column if (value := rows[at][layer]) is not None]
            if not values:
                continue  # a layer in bf16, or what was not finite
            value = max(values)
            told = f"{name}, layer {layer}, {_span(steps, column)}: {value:.3g}"
            yield (
                f'<rect x="{LEFT + i * width:.2f}" y="{18 + ROW * layer}" width="{width + 0.2:.2f}" height="{ROW - 1}" '
                f'fill-opacity="{_darkness(value, low, high, most):.2f}"><title>{html.escape(told)}</title></rect>'
            )


def _span(steps: Sequence[int], column: range) -> str:
    first, last = steps[column[0]], steps[column[-1]]
    return f"step {last:,}" if first == last else f"the largest of steps {first:,} to {last:,}"


def _darkness(value: float, low: float, high: float, most: float | None) -> float:
    """From 0.04, so that a cell of zero is seen to be one, to 1."""
    if most is not None:
        part = min(1.0, value / most)
    elif value <= 0:
        part = 0.0
    else:
        part = (math.log(value) - math.log(low)) / max(math.log(high) - math.log(low), math.log(2))
    return 0.04 + 0.96 * max(0.0, part)
