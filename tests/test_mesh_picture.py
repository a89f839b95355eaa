"""The mesh as a picture in text."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from sharded_train.links import links
from sharded_train.mesh import AXES, MeshConfig, layout, stand_ins
from sharded_train.mesh_picture import draw_mesh


def test_the_picture_of_one_host() -> None:
    array = layout(MeshConfig(tensor=2), stand_ins("1x4"))
    assert draw_mesh(array, AXES).splitlines() == [
        "data 2 × tensor 2 = 4 devices on 1 host",
        "┌ host 0 ─────────┐",
        "│ tensor   0   1  │",
        "│ data 0  [0] [1] │",
        "│ data 1  [2] [3] │",
        "└─────────────────┘",
    ]


def test_processes_are_told_of_as_what_they_are() -> None:
    """Several may share a machine: that of CPU devices of one process is called a host."""
    cpus = [dataclasses.replace(device, platform="cpu") for device in stand_ins("2x2")]
    array = layout(MeshConfig(tensor=2), cpus)
    picture = draw_mesh(array, AXES)
    assert "= 4 devices in 2 processes" in picture
    assert "┌ process 1 ─" in picture
    assert "host" not in picture
    assert "on 1 host" in draw_mesh(layout(MeshConfig(), cpus[:2]), AXES)
    words = {axis: link.words("cpu") for axis, link in links(array, AXES).items()}
    assert words["data"] == "sockets: 2 devices, each in its own process"
    assert words["tensor"] == "shared memory: 2 devices of one host"
    both = links(layout(MeshConfig(), cpus), AXES)["data"].words("cpu")
    assert both == "shared memory and sockets: 4 devices in 2 processes, at most 2 in one"


CLUSTERS = ("1x1", "1x8", "2x2", "8x8", "3x6", "4x72", "512x8")
MESHES = [(c, t) for c, t in itertools.product(CLUSTERS, (1, 2, 6, 8)) if len(stand_ins(c)) % t == 0]


@pytest.mark.parametrize(("cluster", "tensor"), MESHES)
def test_the_picture_fits_the_page_and_shows_every_device_of_a_small_mesh(cluster: str, tensor: int) -> None:
    devices = stand_ins(cluster)
    array = layout(MeshConfig(tensor=tensor, allow_tensor_across_hosts=True), devices)
    picture = draw_mesh(array, AXES)
    lines = picture.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 45
    assert f"= {len(devices):,} devices" in lines[0] or len(devices) == 1
    shown = [int(n) for n in re.findall(r"\[(\d+)\]", picture)]
    assert len(shown) == len(set(shown))
    assert {0, len(devices) - 1} <= set(shown)
    if len(devices) <= 18 and "…" not in picture:
        assert set(shown) == {d.id for d in devices}


def test_the_picture_marks_a_group_that_goes_on_elsewhere() -> None:
    array = layout(MeshConfig(tensor=4, allow_tensor_across_hosts=True), stand_ins("2x6"))
    assert draw_mesh(array, AXES).count("·") == 4
