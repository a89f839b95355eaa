"""A pipeline schedule as one HTML page that needs nothing else: its picture, its numbers and what they mean."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse.page import document
from sharded_train.rehearse.page_parts import figure, heading, paragraph, table

AS_LARGE_AS_IT_IS = "<style>figure svg { width: auto; max-width: none; }</style>"  # letters stay legible; it scrolls


def page(
    title: str, image: str, numbers: Sequence[Sequence[str]], stages: Sequence[Sequence[str]], facts: Mapping[str, Any]
) -> str:
    """The page; `numbers` and `stages` are tables, of which the first row is the head, and `image` is SVG."""
    return document(title, "\n".join([AS_LARGE_AS_IT_IS, *_body(title, image, numbers, stages, facts)]))


def _body(
    title: str, image: str, numbers: Sequence[Sequence[str]], stages: Sequence[Sequence[str]], facts: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h1>Pipeline schedule {html.escape(title)}</h1>"
    yield paragraph(
        "Simulated from the schedule's table: a stage begins its next tick when it and its neighbours have ended this "
        "one. Costs are those that were given, the same for all stages; sends take no time.",
        css="lede",
    )
    yield figure(image, _shows(facts))
    for remark in facts["remarks"]:
        yield f'<div class="warning">{html.escape(remark)}</div>'
    yield heading("Bubble and time")
    yield paragraph("The bubble is the part of all stages' time in which they are idle.")
    yield _table(numbers)
    yield heading("In flight")
    kept = (
        " What is kept for weights waits from a microbatch's backward of the inputs to that of the weights."
        if any(facts["kept"])
        else ""
    )
    yield paragraph(
        "Microbatches that a stage holds from their forward to their backward, at most, in whole stages' worth of "
        f"activations: that is its memory.{kept}"
    )
    yield _table(stages)


def _shows(facts: Mapping[str, Any]) -> str:
    chunks = " Darker blocks are of later chunks of layers." if facts["num_chunks"] > 1 else ""
    return (
        "A row for each stage; time goes right, in the unit of the costs. A block is one piece of work, with its "
        f"letter and the number of its microbatch: point at it to read what it is and when.{chunks} Between blocks "
        "the stage is idle."
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; numbers stand between names and words."""
    return table(rows[0], rows[1:], right=range(1, len(rows[0]) - 1))
