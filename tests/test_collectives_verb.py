"""`collectives`: right on every axis, wrong when they are wrong; conventions are those by which `rehearse` counts."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import __main__, draw
from sharded_train.bench import measure, operations, picture
from sharded_train.bench.measure import Point
from sharded_train.bench.operations import OPERATIONS, programs
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.mesh import MeshConfig, build_mesh
from sharded_train.rehearse import clusters
from sharded_train.rehearse.compile import check_plugin
from sharded_train.verbs import collectives as collectives_verb

MESH = MeshConfig(data=2, tensor=4)


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_right_and_their_check_sees_errors(name: str, axis: str) -> None:
    """The check is against numbers of the ranks; it counts exactly the entries that are spoilt."""
    mesh = build_mesh(MESH)
    start, run, wrong = programs(OPERATIONS[name], mesh, axis, 24)
    y = run(start())
    assert int(wrong(y)) == 0
    assert int(wrong(y.at[3].add(1))) == 1
    assert int(wrong(y + 1)) == y.size


@pytest.mark.parametrize("name", OPERATIONS)
def test_bus_bandwidth_counts_what_the_compiled_program_sends(name: str) -> None:
    """The factor of nccl-tests times the size is what a device sends; of a stand-in, what that sends is more."""
    try:
        check_plugin()
    except ConfigError as error:
        pytest.skip(str(error))
    operation, mesh, entries = OPERATIONS[name], draw.cluster_mesh("h100:2x4", data=2, tensor=4), 4096
    _, run, _ = programs(operation, mesh, "tensor", entries)
    given = entries // 4 if operation.splits_input else entries
    sharding = NamedSharding(mesh, P(("data", "tensor")))
    found = draw.audit(run, jax.ShapeDtypeStruct((8 * given,), np.float32, sharding=sharding), cluster="h100:2x4")
    (row,) = found.facts["wires"]["totals"]
    assert (row["axes"], row["link"]) == (["tensor"], "NVLink")
    sent = operation.bus(4) * entries * operations.ITEMSIZE
    assert row["wire_bytes"] == sent if name != "reduce" else row["wire_bytes"] > sent
    expected = {"broadcast": "collective-broadcast", "permute": "collective-permute", "reduce": "all-reduce"}
    assert row["op"] == {**expected, "scatter": "all-to-all"}.get(name, name)


def test_sizes_are_such_as_all_can_share() -> None:
    assert measure.sizes(4096, 2**18, 8) == [4096, 16384, 65536, 262144]
    assert measure.sizes(1000, 1000, 3) == [996]
    assert measure.sizes(4, 4, 8) == [32]


def points(mesh: Mesh, **changes: Any) -> list[Point]:
    """Made-up points: 10 µs and 8 GB/s over data, over tensor twice as fast."""
    found = []
    for axis, speed in (("data", 1.0), ("tensor", 2.0)):
        for name, operation in OPERATIONS.items():
            for size, seconds in ((4096, 1e-5 / speed), (2**30, 0.125 / speed)):
                rate = size / seconds
                bus = rate * operation.bus(mesh.shape[axis])
                found.append(Point(axis, name, size, mesh.shape[axis], seconds, rate, bus, 5, 0))
    return [dataclasses.replace(each, **changes) for each in found]


def test_constants_are_told_by_link() -> None:
    mesh = build_mesh(MESH)
    device = measure.constants(points(mesh), mesh)
    # one host: both axes within it; tensor is the faster. Median of 2 · 3/4, 3/4, 3/4 of the algorithm's rate.
    assert device == {"nvlink_bandwidth": pytest.approx(0.75 * 2**30 / 0.0625), "nvlink_latency": 5e-6}
    assert measure.constants(points(mesh, wrong=1), mesh) == {}


def test_its_result_is_taken_by_rehearse(tmp_path: Path) -> None:
    mesh = build_mesh(MESH)
    facts = collectives_verb.describe(points(mesh), mesh)
    facts |= {"kind": "h100", "hosts": 1, "devices_per_host": 8}
    result = tmp_path / "links.json"
    result.write_text(json.dumps(facts))
    own = clusters.parse(f"file:{result}")
    assert (own.num_hosts, own.devices_per_host, own.device.memory) == (1, 8, clusters.DEVICES["h100"].memory)
    assert own.device.nvlink_bandwidth == facts["device"]["nvlink_bandwidth"]
    assert own.device.network_bandwidth == clusters.DEVICES["h100"].network_bandwidth  # not measured
    spec = tmp_path / "ours.toml"
    spec.write_text('kind = "h100"\nhosts = 16\ndevices_per_host = 8\nmeasured = "links.json"\nnvlink_latency = 1e-5\n')
    larger = clusters.parse(f"file:{spec}")
    assert (larger.num_hosts, larger.device.nvlink_latency) == (16, 1e-5)
    assert larger.device.nvlink_bandwidth == facts["device"]["nvlink_bandwidth"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "is no result"), ("{", "is no JSON"), ('{"collectives": 1, "device": {}, "hosts": 1}', "missing|must be")],
)
def test_files_that_are_no_result_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        clusters.parse(f"file:{path}")


def test_measured_must_be_a_result(tmp_path: Path) -> None:
    spec = tmp_path / "ours.toml"
    spec.write_text('kind = "h100"\nhosts = 1\ndevices_per_host = 8\nmeasured = 3\n')
    with pytest.raises(ConfigError, match="measured = 3: must be"):
        clusters.parse(f"file:{spec}")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"json": tmp_path / "links.json", "svg": tmp_path / "links.svg"}
    code = collectives_verb.collectives(MESH, axis="tensor", least=4096, most=16384, repeat=2, outputs=outputs)
    assert code == Exit.DONE
    said = capsys.readouterr().out
    assert "Over tensor, shared memory: 4 devices" in said
    assert "Over data" not in said
    facts = json.loads(outputs["json"].read_text())
    assert {each["operation"] for each in facts["points"]} == set(OPERATIONS)
    assert {each["bytes"] for each in facts["points"]} == {4096, 16384}
    for each in facts["points"]:
        assert each["algorithm_bandwidth"] == pytest.approx(each["bytes"] / each["seconds"])
    assert facts["kind"] is None  # a CPU is no GPU that rehearse knows
    drawn = ET.fromstring(outputs["svg"].read_text())
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == len(OPERATIONS)


def test_wrong_results_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = OPERATIONS["permute"]
    broken = {"permute": dataclasses.replace(right, run=lambda x, axis: right.run(x, axis) + 1)}
    monkeypatch.setattr(measure, "OPERATIONS", broken)
    code = collectives_verb.collectives(MESH, axis="data", least=4096, most=4096, repeat=1, outputs={})
    assert code == Exit.FAILED
    assert "8,192 entries of results are wrong" in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused() -> None:
    ask = lambda **options: collectives_verb.collectives(
        MESH, **{"axis": None, "least": 4096, "most": 4096, "repeat": 1, "outputs": {}, **options}
    )
    with pytest.raises(ConfigError, match="--axis=tenser: no axis of the mesh; did you mean tensor"):
        ask(axis="tenser")
    with pytest.raises(ConfigError, match="--axis=sequence: has one device in"):
        ask(axis="sequence")
    with pytest.raises(ConfigError, match="is below --min"):
        ask(most=16)


@pytest.mark.parametrize("text", ["4k", "0", "-1", "1.5M", ""])
def test_sizes_are_numbers_of_bytes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["collectives", f"--max={text}"]) == Exit.CONFIG
    assert "wanted a number of bytes" in capsys.readouterr().err


def test_the_picture_has_one_size_or_many() -> None:
    mesh = build_mesh(MESH)
    for found in (points(mesh), [each for each in points(mesh) if each.bytes == 4096]):
        ET.fromstring(picture.svg(found, {"data": "a", "tensor": "b"}))
