"""A picture of the mesh in text: hosts as boxes, their devices at their coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sharded_train.links import hosts_of

Box = list[str]
MOST = 8  # rows and columns of a box, and boxes where two stand side by side; more are abbreviated


def draw_mesh(array: np.ndarray, names: Sequence[str], width: int = 80) -> str:
    """The mesh as text, `[5]` being the device with id 5; at a `·` the group goes on on another host.

    Columns are the innermost axis with more than one device, rows the other axes. Big hosts and clusters are
    abbreviated in the middle. Example, data 2 × tensor 2 on one host:

        data 2 × tensor 2 = 4 devices on 1 host
        ┌ host 0 ─────────┐
        │ tensor   0   1  │
        │ data 0  [0] [1] │
        │ data 1  [2] [3] │
        └─────────────────┘
    """
    hosts = hosts_of(array)
    numbers = list(dict.fromkeys(hosts.flat))
    # Of CPU devices each process counts as a host, though several may share a machine.
    what = "process" if getattr(array.flat[0], "platform", None) == "cpu" and len(numbers) > 1 else "host"
    sizes = [f"{axis} {size}" for axis, size in zip(names, array.shape, strict=True) if size > 1]
    title = f"{' × '.join(sizes)} = " if sizes else ""
    title += f"{_count(array.size, 'device')} {'in' if what == 'process' else 'on'} {_count(len(numbers), what)}"
    first = _box(array, names, hosts, numbers[0], what, width)
    most = MOST if 2 * len(first[0]) + 1 <= width else MOST // 2
    if len(numbers) <= most:
        boxes = [_box(array, names, hosts, number, what, width) for number in numbers]
        return "\n".join([title, *_side_by_side(boxes, width)])
    boxes = [_box(array, names, hosts, number, what, width) for number in numbers[: most - 1]]
    rest = f"… {_count(len(numbers) - most, f'more {what}')} …"
    last = _box(array, names, hosts, numbers[-1], what, width)
    return "\n".join([title, *_side_by_side(boxes, width), rest, *last])


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 'es' if what.endswith('s') else 's'}"


def _box(array: np.ndarray, names: Sequence[str], hosts: np.ndarray, number: int, what: str, width: int) -> Box:
    """One host: a row of its devices for each of its places on the outer axes."""
    *outer, inner = [i for i, size in enumerate(array.shape) if size > 1] or [len(names) - 1]
    devices = {}
    for place in np.argwhere(hosts == number):
        row = " ".join(f"{names[i]} {place[i]}" for i in outer)
        devices[row, int(place[inner])] = f"[{array[tuple(place)].id}]"
    rows = list(dict.fromkeys(row for row, _ in devices))
    columns = sorted({column for _, column in devices})

    # Widths come from the whole mesh, so that all boxes are alike.
    label = max(len(names[inner]), len(" ".join(f"{names[i]} {array.shape[i] - 1}" for i in outer)))
    cell = max(len(f"[{device.id}]") for device in array.flat)
    most = max(3, min(MOST, (width - label - 6) // (cell + 1)))

    def line(head: str, cells: Iterable[str]) -> str:
        return f"{head:<{label}}  " + " ".join(f"{c:^{cell}}" for c in _abbreviated(list(cells), most))

    lines = [line(row, (devices.get((row, column), "·") for column in columns)) for row in rows]
    lines = [line(names[inner], map(str, columns)), *_abbreviated(lines, MOST)]
    inside = max(map(len, lines))
    top = f"┌ {what} {number} ".ljust(inside + 3, "─") + "┐"
    return [top, *(f"│ {text:<{inside}} │" for text in lines), f"└{'─' * (inside + 2)}┘"]


def _abbreviated(items: list[str], most: int) -> list[str]:
    return items if len(items) <= most else [*items[: most - 2], "…", items[-1]]


def _side_by_side(boxes: list[Box], width: int) -> Iterator[str]:
    """Boxes in rows as wide as the page."""
    each = max(len(box[0]) for box in boxes)
    across = max(1, (width + 1) // (each + 1))
    for start in range(0, len(boxes), across):
        for parts in itertools.zip_longest(*boxes[start : start + across], fillvalue=""):
            yield " ".join(f"{part:<{each}}" for part in parts).rstrip()
