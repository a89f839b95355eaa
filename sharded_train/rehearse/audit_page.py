"""An audit as HTML: a page of its own, or shorter for a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from sharded_train.rehearse import page as whole
from sharded_train.rehearse import page_time, page_wires
from sharded_train.rehearse.page_parts import fragment, paragraph, table
from sharded_train.tables import bytes_in_words


def page(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    body = [*_head(facts), *whole.memory_section(facts["memory"]), *page_wires.section(facts["wires"], facts["time"])]
    body += [*whole.computed_section(facts["computed"]), *page_time.section(facts["time"]), *whole.foot(facts)]
    return whole.document(f"Audit: {facts['function']}", "\n".join(body))


def in_notebook(facts: Mapping[str, Any]) -> str:
    """Verdict, arguments, memory, collectives and the timeline."""
    body = [*_head(facts), *whole.memory_section(facts["memory"]), *page_wires.section(facts["wires"], facts["time"])]
    return fragment("\n".join([*body, *page_time.pictures(facts["time"])]))


def shapes_in_words(argument: Mapping[str, Any]) -> tuple[str, str, str]:
    """Global shape, what each dim is split over, local shape: ("4096×512", "data ·", "512×512")."""
    spec = [*argument["spec"], *[None] * (len(argument["shape"]) - len(argument["spec"]))]
    over = " ".join("+".join([dim] if isinstance(dim, str) else dim) if dim else "·" for dim in spec)
    shapes = ("×".join(map(str, argument[key])) or "scalar" for key in ("shape", "local_shape"))
    first, local = shapes
    return first, over, local


def _head(facts: Mapping[str, Any]) -> Iterator[str]:
    sizes = " × ".join(f"{axis} {size:,}" for axis, size in facts["mesh"]["sizes"].items() if size > 1)
    yield f"<h1>Audit: {html.escape(facts['function'])}</h1>"
    where = f"{facts['cluster']['words']}{f', as {sizes}' if sizes else ''}"
    yield paragraph(f"Compiled for {where}. No GPU was there; a step is one call.", css="lede")
    look = whole.LOOKS.get(facts["memory"]["verdict"], "close")
    yield f'<div class="verdict {look}">{paragraph(facts["verdict"]["words"])}</div>'
    for warning in facts["warnings"]:
        yield f'<div class="warning">{html.escape(warning)}</div>'
    rows = [
        (each["name"], each["dtype"], *shapes_in_words(each), bytes_in_words(each["bytes"]))
        for each in facts["arguments"]
    ]
    yield table(("argument", "dtype", "shape", "split over", "on a device", "bytes"), rows, right=(5,))
