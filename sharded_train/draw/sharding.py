"""How arrays are split: a table of any pytree, and each array as a rectangle cut into its shards."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sharded_train.draw.display import Html
from sharded_train.draw.mesh import COLOURS
from sharded_train.errors import ConfigError
from sharded_train.rehearse.page_parts import table
from sharded_train.tables import bytes_in_words

PICTURES = 6  # arrays that are drawn; the table has all
BOX, MOST_LINES = 300, 16  # pixels of the longer side; pieces along one side that are drawn apart
COLUMNS = ("array", "shape", "split over", "shard", "copies", "bytes on a device")


def sharding(tree: Any) -> Html:
    """The arrays of a pytree (or `jax.ShapeDtypeStruct`s) with their shardings: what each device holds of each.

    In a picture a piece says which devices hold it, by their number in the mesh; several are copies.

    Raises ConfigError: an array has no NamedSharding.
    """
    leaves = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    if bare := [name for name, leaf in leaves if not isinstance(getattr(leaf, "sharding", None), NamedSharding)]:
        raise ConfigError(f"draw.sharding: no NamedSharding on {', '.join(bare)}; place it with jax.device_put first")
    rows = [_row(name, leaf) for name, leaf in leaves]
    total = sum(_bytes(leaf) for _, leaf in leaves)
    rows.append(("together", "", "", "", "", bytes_in_words(total)))
    pictures = "".join(_picture(name, leaf) for name, leaf in [each for each in leaves if each[1].shape][:PICTURES])
    words = "\n".join("  ".join(filter(None, row)) for row in (COLUMNS, *rows))
    drawn = f'<div style="display:flex;flex-wrap:wrap;gap:18px 30px;align-items:flex-start">{pictures}</div>'
    return Html(drawn + table(COLUMNS, rows, right=(4, 5), total=True), words)


def _name(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path)) or "array"


def _row(name: str, leaf: Any) -> tuple[str, ...]:
    pieces = _pieces(leaf)
    copies = max(map(len, pieces.values()))
    return name, _shape(leaf.shape), _spec(leaf), _shape(_local(leaf)), f"{copies}", bytes_in_words(_bytes(leaf))


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _local(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.sharding.shard_shape(leaf.shape))


def _bytes(leaf: Any) -> int:
    return math.prod(_local(leaf)) * leaf.dtype.itemsize


def _spec(leaf: Any) -> str:
    """What each dim is split over, "data · tensor+pipeline"."""
    spec = [*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec))]
    return " ".join("+".join([dim] if isinstance(dim, str) else dim) if dim else "·" for dim in spec)


def _pieces(leaf: Any) -> Mapping[tuple[tuple[int, int], ...], list[int]]:
    """Devices, by number in the mesh, that hold each piece, a piece being (start, stop) in every dim."""
    numbers = {device: i for i, device in enumerate(leaf.sharding.mesh.devices.flat)}
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
        bounds = (each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        found.setdefault(tuple(bounds), []).append(numbers[device])
    return {piece: sorted(found[piece]) for piece in sorted(found)}


def _picture(name: str, leaf: Any) -> str:
    """The array seen along two dims: those that are split, else the last ones."""
    pieces = _pieces(leaf)
    split = [i for i, (whole, part) in enumerate(zip(leaf.shape, _local(leaf), strict=True)) if whole != part]
    rest = [i for i in reversed(range(len(leaf.shape))) if i not in split]
    dims = sorted([*split, *rest][:2])
    height_of = leaf.shape[dims[0]] if len(dims) == 2 else 1
    width_of = leaf.shape[dims[-1]] if dims else 1
    longest = max(height_of, width_of, 1)
    # A side is at least a seventh of the other, or what its pieces need for their numbers.
    width = max(BOX * width_of / longest, BOX / 7, _needed(pieces, dims[-1:], 46))
    height = max(BOX * height_of / longest, BOX / 7, _needed(pieces, dims[:1] if len(dims) == 2 else [], 24))
    drawn = "".join(_cells(pieces, leaf.shape, dims, width, height))
    down = f"{height_of}" if len(dims) == 2 else ""
    svg = (
        f'<svg viewBox="-52 -2 {width + 56:.0f} {height + 26:.0f}" style="width:{width + 56:.0f}px;min-width:0">{drawn}'
        f'<text class="soft small end" x="-6" y="{height / 2 + 4:.0f}">{down}</text>'
        f'<text class="soft small middle" x="{width / 2:.0f}" y="{height + 16:.0f}">{width_of}</text></svg>'
    )
    left = [f"dim {i}: {leaf.shape[i]}" for i in range(len(leaf.shape)) if i not in dims]
    deep = f" ({', '.join(left)})" if left else ""
    title = f"<b>{html.escape(name)}</b> {_shape(leaf.shape)}{deep}<br>{html.escape(_spec(leaf))}"
    return f'<figure style="margin:0"><figcaption style="margin:0 0 6px">{title}</figcaption>{svg}</figure>'


def _needed(pieces: Mapping[Any, Any], dims: Sequence[int], each: float) -> float:
    """Pixels that the pieces along a dim need, up to what is drawn apart."""
    count = len({piece[dims[0]] for piece in pieces}) if dims else 1
    return each * min(count, MOST_LINES)


def _cells(
    pieces: Mapping[tuple[tuple[int, int], ...], list[int]],
    shape: Sequence[int],
    dims: Sequence[int],
    width: float,
    height: float,
) -> Iterator[str]:
    flat: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for piece, devices in pieces.items():
        key = tuple(piece[i] for i in dims)
        flat.setdefault(key, []).extend(devices)
    for i, (bounds, devices) in enumerate(flat.items()):
        (top, bottom), (left, right) = (((0, 1), (0, 1)), ((0, 1), *bounds), bounds)[len(bounds)]
        tall, wide = (shape[dims[0]] if len(dims) == 2 else 1), (shape[dims[-1]] if dims else 1)
        x, y = width * left / max(wide, 1), height * top / max(tall, 1)
        w, h = width * (right - left) / max(wide, 1), height * (bottom - top) / max(tall, 1)
        words = f"devices {', '.join(map(str, devices))}"
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{COLOURS[i % len(COLOURS)]}" '
            f'stroke="var(--paper)" stroke-width="1.5"><title>{words}</title></rect>'
        )
        if fitting := _numbers(devices, w):
            yield (
                f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle" '
                f'style="fill:#14181f;font-size:11.5px;pointer-events:none">{fitting}</text>'
            )


def _numbers(devices: Sequence[int], width: float) -> str:
    """The devices' numbers, or how many where those do not fit, or nothing."""
    ordered = sorted(set(devices))
    runs = np.split(np.array(ordered), np.flatnonzero(np.diff(ordered) != 1) + 1)
    short = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    for words in (" ".join(map(str, ordered)), short, f"{len(ordered)} devices", f"{len(ordered)}×"):
        if 6.6 * len(words) + 6 <= width:
            return words
    return ""
