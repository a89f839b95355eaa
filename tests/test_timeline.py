"""The schedule on paper: against steps worked out by hand, and properties that hold whatever the program."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_train.devices import DEVICES, Device
from sharded_train.flops import Flops
from sharded_train.rehearse import clusters, hlo, timeline, trace
from sharded_train.rehearse.costs import seconds_on_links
from sharded_train.rehearse.streams import Streams
from sharded_train.rehearse.streams_state import Result
from sharded_train.rehearse.wires import Collective, collectives
from sharded_train.rehearse.wires_places import Link, Places
from tests.rehearsed import tiny

SAVED = sorted((Path(__file__).parent / "hlo").glob("*.txt"))
PLACES = Places({"data": 2, "sequence": 2, "tensor": 2}, np.repeat([0, 1], 4).reshape(2, 2, 2))
# Round numbers: 1 GB/s of memory, 1 GB/s of NVLink, 0.1 GB/s of network, no latency.
PLAIN = dataclasses.replace(
    DEVICES["h100"],
    memory_bandwidth=1e9,
    nvlink_bandwidth=1e9,
    network_bandwidth=1e8,
    nvlink_latency=0.0,
    network_latency=0.0,
)
INSIDE, ACROSS = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"


def program(*lines: str, bodies: str = "") -> hlo.Module:
    """A scheduled program for 8 devices whose entry holds these lines; x is f32[1000000], 4 MB."""
    body = "\n  ".join(lines)
    text = f"""HloModule made, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{bodies}
ENTRY %main (x: f32[1000000]) -> f32[1000000] {{
  %x = f32[1000000]{{0}} parameter(0)
  {body}
  ROOT %done = f32[1000000]{{0}} bitcast(%x)
}}
"""
    return hlo.parse(text)


def kernel(name: str) -> str:
    """Reads and writes 4 MB: 8 ms."""
    return f"%{name} = f32[1000000]{{0}} copy(%x)"


def start(name: str, groups: str) -> str:
    """A sum of 4 MB: over 4 devices of a host 2 * 3/4 * 4 ms = 6 ms, over 2 hosts 2 * 1/2 * 40 ms = 40 ms."""
    return f"%{name} = f32[1000000]{{0}} all-reduce-start(%x), replica_groups={groups}, to_apply=%add"


def done(name: str) -> str:
    return f"%{name}-done = f32[1000000]{{0}} all-reduce-done(%{name})"


def run(module: hlo.Module, device: Device = PLAIN) -> Result:
    found, unknown = collectives(module, PLACES)
    assert not unknown
    return Streams(module, device, found).run()


def milliseconds(*lines: str, bodies: str = "") -> float:
    return round(1e3 * run(program(*lines, bodies=bodies)).seconds, 6)


def test_without_overlap_a_step_is_the_sum() -> None:
    assert milliseconds(kernel("a")) == 8
    assert milliseconds(kernel("a"), start("s", INSIDE), done("s"), kernel("b")) == 8 + 6 + 8


def test_what_is_computed_meanwhile_hides_the_transfer() -> None:
    result = run(program(start("s", INSIDE), kernel("a"), done("s"), kernel("b")))
    assert result.seconds == pytest.approx(16e-3)
    assert not result.totals.get(("exposed", "sequence x tensor", "NVLink"))
    result = run(program(start("s", ACROSS), kernel("a"), done("s"), kernel("b")))
    assert result.seconds == pytest.approx(48e-3)
    assert result.totals["exposed", "data", "network"] == pytest.approx(32e-3)


def test_links_work_side_by_side_and_each_one_after_the_other() -> None:
    assert milliseconds(start("s", ACROSS), start("t", INSIDE), done("t"), done("s")) == 40
    assert milliseconds(start("s", INSIDE), start("t", INSIDE), done("t"), done("s")) == 12


def test_waiting_is_charged_to_what_the_link_carries() -> None:
    """t (tensor, 2 * 1/2 * 4 ms) is waited for, but s, which stands before it on the link, has 6 of the 10 ms."""
    pairs = "{{0,1},{2,3},{4,5},{6,7}}"
    result = run(program(start("s", INSIDE), start("t", pairs), done("t"), done("s")))
    assert result.totals["exposed", "sequence x tensor", "NVLink"] == pytest.approx(6e-3)
    assert result.totals["exposed", "tensor", "NVLink"] == pytest.approx(4e-3)
    assert [event.what for event in result.events if event.lane == "compute"] == ["wait"]


def test_a_synchronous_collective_is_waited_for_at_once() -> None:
    synchronous = start("s", INSIDE) + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert milliseconds(synchronous, kernel("a"), done("s")) == 6 + 8


LOOP = """
%condition (c: (s32[], f32[1000000])) -> pred[] {{
  %c = (s32[], f32[1000000]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant({trips})
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%body (p: (s32[], f32[1000000])) -> (s32[], f32[1000000]) {{
  %p = (s32[], f32[1000000]) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %x = f32[1000000]{{0}} get-tuple-element(%p), index=1
  {body}
  ROOT %again = (s32[], f32[1000000]) tuple(%next, %x)
}}
"""


def looped(trips: int, *body: str) -> hlo.Module:
    """Around the loop a transfer over the network, which its body may have to queue behind."""
    bodies = LOOP.format(trips=trips, body="\n  ".join(body))
    return program(
        start("outer", ACROSS),
        "%zero = s32[] constant(0)",
        "%init = (s32[], f32[1000000]) tuple(%zero, %x)",
        "%loop = (s32[], f32[1000000]) while(%init), condition=%condition, body=%body",
        done("outer"),
        bodies=bodies,
    )


BODIES = {
    "hidden": (start("s", INSIDE), kernel("a"), done("s")),
    "waits": (start("s", INSIDE), done("s"), kernel("a")),
    "queues behind the outer transfer": (kernel("a"), start("s", ACROSS), kernel("b"), done("s")),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("trips", [1, 2, 3, 17])
def test_a_loop_is_what_it_would_be_unrolled(name: str, trips: int) -> None:
    turns = [line.replace("%s", f"%s{i}").replace("%a ", f"%a{i} ") for i in range(trips) for line in BODIES[name]]
    turns = [line.replace("%b ", f"%b{i // len(BODIES[name])} ") for i, line in enumerate(turns)]
    unrolled = run(program(start("outer", ACROSS), *turns, done("outer")))
    rolled = run(looped(trips, *BODIES[name]))
    counting = 60e-9 * (trips + 1)  # the loop's own counter and comparison
    assert rolled.seconds == pytest.approx(unrolled.seconds, abs=counting)
    for key, seconds in unrolled.totals.items():
        if key[0] in ("kind", "busy", "sent", "exposed"):
            assert rolled.totals[key] == pytest.approx(seconds, abs=counting), key


def test_loops_scale_and_cost_no_more_to_run() -> None:
    few, many = (run(looped(trips, *BODIES["waits"])) for trips in (100, 1_000_000))
    assert many.seconds == pytest.approx(10_000 * few.seconds, rel=1e-2)
    assert len(many.events) == len(few.events) < 40
    assert many.totals["turns", "loop"] == 1_000_000
    assert many.totals["loop", "loop"] == pytest.approx(many.seconds, rel=1e-2)


def test_of_a_conditional_the_slowest_branch_is_taken() -> None:
    branches = """
%short (p: f32[1000000]) -> f32[1000000] {
  ROOT %p = f32[1000000]{0} parameter(0)
}

%long (q: f32[1000000]) -> f32[1000000] {
  %q = f32[1000000]{0} parameter(0)
  ROOT %c = f32[1000000]{0} copy(%q)
}
"""
    line = "%y = f32[1000000]{0} conditional(%x, %x, %x), branch_computations={%short, %long, %short}"
    result = run(program(line, kernel("a"), bodies=branches))
    assert result.seconds == pytest.approx(16e-3)
    assert any("slowest is taken" in note for note in result.notes)


def test_a_fusion_costs_what_it_uses_of_its_operands() -> None:
    fused = """
%fused (p: f32[10,1000000], i: s32[], q: f32[10,1000000]) -> f32[10,1000000] {
  %p = f32[10,1000000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %q = f32[10,1000000]{1,0} parameter(2)
  %z = s32[] constant(0)
  %one = f32[1,1000000]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,1000000}
  %twice = f32[1,1000000]{1,0} add(%one, %one)
  ROOT %put = f32[10,1000000]{1,0} dynamic-update-slice(%q, %twice, %i, %z)
}
"""
    lines = (
        "%stack = f32[10,1000000]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%f = f32[10,1000000]{1,0} fusion(%stack, %i, %stack), kind=kLoop, calls=%fused",
    )
    assert milliseconds(*lines, bodies=fused) == pytest.approx(8, abs=1e-3)  # a slice in, a slice out


def collective(link: Link, op: str, per_host: int, group_size: int = 16) -> Collective:
    module = program(start("s", INSIDE), done("s"))
    (found,), _ = collectives(module, PLACES)
    return dataclasses.replace(found, link=link, op=op, per_host=per_host, group_size=group_size)


def test_hosts_share_the_traffic_between_them() -> None:
    """A ring of 16 on 2 hosts of 8 crosses between hosts with an eighth of its bytes for each NIC; one a host, all."""
    ring = 2 * 15 / 16 * 4e6
    assert seconds_on_links(collective("both", "all-reduce", 8), PLAIN) == pytest.approx(
        {"NVLink": ring / 1e9, "network": ring / 8 / 1e8}
    )
    assert seconds_on_links(collective("network", "all-reduce", 1), PLAIN) == pytest.approx({"network": ring / 1e8})
    sent = seconds_on_links(collective("both", "all-to-all", 8), PLAIN)
    assert sent == pytest.approx({"NVLink": 7 / 16 * 4e6 / 1e9, "network": 8 / 16 * 4e6 / 1e8})
    assert seconds_on_links(collective("none", "all-gather", 1, 1), PLAIN) == {}


def saved(path: Path) -> tuple[hlo.Module, list[Collective]]:
    module = hlo.parse(path.read_text())
    return module, collectives(module, PLACES)[0]


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_bounds_that_hold_for_every_program(path: Path) -> None:
    result = Streams(saved(path)[0], DEVICES["h100"], saved(path)[1]).run()
    computing = sum(seconds for key, seconds in result.totals.items() if key[0] == "kind")
    exposed = sum(seconds for key, seconds in result.totals.items() if key[0] == "exposed")
    assert result.seconds == pytest.approx(computing + exposed)
    assert sum(event.seconds for event in result.events if event.lane == "compute") == pytest.approx(result.seconds)
    for lane in ("NVLink", "network"):
        assert result.totals.get(("busy", lane), 0.0) <= result.seconds * (1 + 1e-9)
    for key, seconds in result.totals.items():
        if key[0] == "exposed":
            assert 0 < seconds <= result.totals[("sent", *key[1:])] * (1 + 1e-9)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
@pytest.mark.parametrize("field", ["memory_bandwidth", "nvlink_bandwidth", "network_bandwidth", "peaks"])
def test_a_faster_device_is_never_slower(path: Path, field: str) -> None:
    module, found = saved(path)
    slow = DEVICES["h100"]
    value = getattr(slow, field)
    seconds = []
    for factor in (1.0, 1.3, 2.0, 50.0):
        faster = {k: factor * v for k, v in value.items()} if isinstance(value, dict) else factor * value
        changed: dict[str, Any] = {field: faster}
        device = dataclasses.replace(slow, **changed)
        seconds.append(Streams(module, device, found).run().seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_a_trace_is_in_order_and_no_stream_does_two_things_at_once(path: Path) -> None:
    module, found = saved(path)
    cluster = dataclasses.replace(clusters.parse("h100:2x4"))
    _check_trace(timeline.describe(module, cluster, found, Flops({"all": 10**12}, 1024), "bf16"))


def _check_trace(section: dict[str, Any]) -> None:
    events = [event for event in trace.trace(section)["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    for row in set(trace.ROWS.values()) - {trace.ROWS["loops"]}:
        own = [event for event in events if event["tid"] == row]
        for one, other in itertools.pairwise(own):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6, (one, other)
    total = sum(event["dur"] for event in events if event["tid"] == trace.ROWS["compute"])
    assert total == pytest.approx(1e6 * section["step_seconds"])


def test_the_section_adds_up_for_a_train_step() -> None:
    section = tiny().facts["time"]
    waiting = timeline.exposed_seconds(section)
    step = section["step_seconds"]
    assert step == pytest.approx(sum(section["compute"].values()) + waiting)
    assert section["mfu"] == pytest.approx(section["model_flops"] / step / 989e12)
    assert section["tokens_per_second_per_device"] == pytest.approx(8 * 256 / 4 / step)
    assert sum(row["seconds"] for row in section["kernels"]) == pytest.approx(sum(section["compute"].values()))
    assert {(row["axes"], row["link"]) for row in section["exposed"]} >= {("tensor", "NVLink"), ("data", "network")}
    _check_trace(section)
    assert timeline.tables(section)
