"""A mesh drawn: hosts as boxes on the network, devices within, what each axis rides on."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from sharded_train import compat
from sharded_train.draw.display import Html
from sharded_train.errors import ConfigError, did_you_mean
from sharded_train.links import hosts_of, links
from sharded_train.mesh_picture import draw_mesh
from sharded_train.rehearse.clusters import parse
from sharded_train.rehearse.compile import check_plugin
from sharded_train.rehearse.page_bars import rectangle, text
from sharded_train.rehearse.page_parts import figure, table
from sharded_train.rehearse.page_style import WIDTH

MOST_HOSTS, MOST_DEVICES = 8, 16  # that are drawn; the others are told as a number
CELL, GAP, ROW = 52, 8, 26
EDGE = 12  # right of the hosts, where the network goes on from row to row
# Of groups, in turn; light enough for dark letters, on light and dark paper alike.
COLOURS = ("#8fb3f5", "#f2bd75", "#86d0b1", "#f0a3c7", "#8fd5e3", "#c9b0f0", "#d9c29a", "#b8c0cc")


def cluster_mesh(cluster: str, **sizes: int) -> Mesh:
    """A mesh over a cluster that is not there, outermost axis first; programs can be compiled for it.

    Example: `cluster_mesh("h100:8x8", data=8, tensor=8)` puts tensor inside hosts.

    Raises ConfigError: an unknown cluster, sizes whose product is not its number of devices, no plugin to compile with.
    """
    place = parse(cluster)
    check_plugin()
    product = int(np.prod(list(sizes.values()), dtype=np.int64))
    if product != place.num_devices:
        words = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(f"cluster_mesh: {words} = {product} devices, but {cluster} has {place.num_devices}")
    devices = compat.compile_only_devices(place.target, place.num_hosts, place.devices_per_host)
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def mesh(mesh: Mesh, groups: str | None = None) -> Html:
    """Hosts with their devices; those that `groups` (an axis) joins for a collective have one colour.

    A device shows its number in the mesh and its place on every axis; by default the innermost axis colours.
    """
    names: Sequence[str] = mesh.axis_names
    if groups is not None and groups not in names:
        raise ConfigError(f"draw.mesh: groups={groups!r} is no axis of the mesh{did_you_mean(groups, names)}")
    shown = groups or next((axis for axis in reversed(names) if mesh.shape[axis] > 1), names[-1])
    platform = mesh.devices.flat[0].platform
    inside = "shared memory" if platform == "cpu" else "NVLink"
    rows = [(axis, f"{mesh.shape[axis]:,}", link.words(platform)) for axis, link in links(mesh.devices, names).items()]
    picture, height = _picture(mesh, list(names).index(shown), inside)
    drawn = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{picture}</svg>'
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    num_groups = mesh.size // mesh.shape[shown]
    again = f", though colours come again after {len(COLOURS)} of {num_groups}" if num_groups > len(COLOURS) else ""
    caption = f"{sizes} = {mesh.size:,} devices. One colour: one group over {shown}, which its collectives join{again}."
    body = figure(drawn, caption) + table(("axis", "size", "rides on"), rows, right=(1,))
    return Html(body, draw_mesh(mesh.devices, names))


def _picture(mesh: Mesh, axis: int, inside: str) -> tuple[str, float]:
    hosts = hosts_of(mesh.devices)
    numbers = list(dict.fromkeys(hosts.flat))
    label = max(len(_place(mesh, np.array(mesh.devices.shape) - 1)), 6) * 5.6
    cell = max(CELL, label + 6)
    most = min(MOST_DEVICES, int(np.unique(hosts, return_counts=True)[1].max()))
    across = next(n for n in (8, 4, 2, 1) if (n <= most and n * (cell + GAP) + GAP + 16 <= WIDTH) or n == 1)
    box_width, box_rows = across * (cell + GAP) + GAP, -(-most // across)
    box_height = 24 + box_rows * (2 * ROW - 8 + GAP) + 24
    per_row = max(1, int((WIDTH - EDGE + 16) // (box_width + 16)))
    drawn: list[str] = []
    shown = numbers[:MOST_HOSTS]
    height, edge = 0.0, min(per_row, len(shown)) * (box_width + 16) - 16 + EDGE
    for i, number in enumerate(shown):
        x, y = (i % per_row) * (box_width + 16), (i // per_row) * (box_height + 34)
        drawn += _host(mesh, hosts, number, axis, (x, y, box_width, box_height), (cell, across, most), inside)
        height = y + box_height + 30
        if len(numbers) > 1:
            drawn.append(rectangle(x + box_width / 2 - 1, 2, y + box_height, 14, "var(--soft)"))
            last_in_row = i % per_row == per_row - 1 or i == len(shown) - 1
            if last_in_row:
                drawn.append(rectangle(0, edge, y + box_height + 14, 4, "var(--soft)"))
    if len(numbers) > 1:
        more = f"network; {len(numbers) - len(shown):,} more hosts" if len(numbers) > len(shown) else "network"
        drawn.append(rectangle(edge - 4, 4, box_height + 14, height - box_height - 26, "var(--soft)"))
        drawn.append(text(0, height + 6, more, "soft"))
        height += 14
    return "".join(drawn), height


def _host(
    mesh: Mesh,
    hosts: np.ndarray,
    number: int,
    axis: int,
    box: tuple[float, float, float, float],
    cells: tuple[float, int, int],
    inside: str,
) -> Iterator[str]:
    x, y, width, height = box
    cell, across, most = cells
    yield rectangle(x, width, y, height, "var(--card)", 'stroke="var(--line)" rx="6"')
    yield text(x + GAP, y + 17, f"host {number}")
    places = np.argwhere(hosts == number)
    for i, place in enumerate(places[:most]):
        left, top = x + GAP + (i % across) * (cell + GAP), y + 26 + (i // across) * (2 * ROW - 8 + GAP)
        colour = COLOURS[_group(mesh, place, axis) % len(COLOURS)]
        rank = int(np.ravel_multi_index(tuple(place), mesh.devices.shape))
        yield rectangle(left, cell, top, 2 * ROW - 8, colour, 'rx="4"')
        yield _dark(left + cell / 2, top + 18, str(rank), 13)
        yield _dark(left + cell / 2, top + 35, _place(mesh, place), 10)
    rest = f", {len(places) - most:,} more devices" if len(places) > most else ""
    yield text(x + GAP, y + height - 8, f"{inside}{rest}", "soft small")


def _group(mesh: Mesh, place: np.ndarray, axis: int) -> int:
    """Number of the group over the axis that a device is in."""
    others = [i for i in range(len(place)) if i != axis]
    shape = tuple(mesh.devices.shape[i] for i in others)
    return int(np.ravel_multi_index(tuple(place[others]), shape)) if others else 0


def _place(mesh: Mesh, place: Any) -> str:
    """ "d0 t3": the axes with more than one device, by their first letters where these differ."""
    names = [(axis, i) for axis, i in zip(mesh.axis_names, place, strict=True) if mesh.shape[axis] > 1]
    short = len({axis[0] for axis, _ in names}) == len(names)
    return " ".join(f"{axis[0] if short else axis}{i}" for axis, i in names)


def _dark(x: float, y: float, words: str, size: float) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" style="fill:#14181f;font-size:{size}px">'
        f"{html.escape(words)}</text>"
    )
