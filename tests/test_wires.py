"""Collectives read from saved programs (tests/hlo/make.py) and handmade ones, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sharded_train.mesh import stand_ins
from sharded_train.rehearse import hlo, wires
from sharded_train.rehearse.pace import Conditional, Doing, Pace
from sharded_train.rehearse.wires import Collective, collectives
from sharded_train.rehearse.wires_places import Places, place_groups, place_pairs
from sharded_train.rehearse.wires_tables import tables
from sharded_train.rehearse.wires_totals import totals, warnings

SAVED = Path(__file__).parent / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")
# Two hosts of four: data lies between hosts, sequence and tensor within one.
PLACES = Places({"data": 2, "sequence": 2, "tensor": 2}, np.repeat([0, 1], 4).reshape(2, 2, 2))


class Mesh:
    """What `wires.describe` asks of a mesh, for devices that are not there."""

    axis_names = tuple(PLACES.sizes)
    devices = np.array(stand_ins("2x4"), dtype=object).reshape(2, 2, 2)


def read(name: str, version: str) -> list[Collective]:
    found, unknown = collectives(hlo.parse((SAVED / f"{name}-{version}.txt").read_text()), PLACES)
    assert not unknown
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_axes_links_and_bytes_of_every_operation(version: str) -> None:
    """x `[256, 512]`, w `[512, 512]` bf16 gathered over data; z = x w `[256, 256]` a device, scattered over tensor."""
    found = read("mixed", version)
    assert [(each.op, each.axes, each.link, each.group_size) for each in found] == [
        ("all-gather", ("data",), "network", 2),
        ("reduce-scatter", ("tensor",), "NVLink", 2),
        ("all-reduce", ("data", "tensor"), "both", 4),
        ("collective-permute", ("sequence",), "NVLink", 2),
        ("all-to-all", ("tensor",), "NVLink", 2),
    ]
    assert [str(member) for member in found[0].members] == [
        "x bf16[128,512] -> bf16[256,512]",
        "w bf16[256,256] -> bf16[512,256]",
    ]
    payloads = [2 * (256 * 512 + 512 * 256), 2 * 256 * 256, 2, 2 * 128 * 256, 2 * 128 * 256]
    assert [each.payload_bytes for each in found] == payloads
    factors = [1 / 2, 1 / 2, 2 * 3 / 4, 1, 1 / 2]
    assert [each.wire_bytes for each in found] == [f * b for f, b in zip(factors, payloads, strict=True)]
    assert all(each.dtype == "bf16" and each.times == 1 and each.certain and not each.loops for each in found)
    assert [(each.num_groups, each.per_host) for each in found] == [(4, 1), (4, 2), (2, 2), (8, 2), (4, 2)]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_only_sometimes_done_counts_as_often_as_it_is(version: str) -> None:
    """Two layers in each of three ticks: without a schedule as though always, with one as the mean stage does it."""
    (gather,) = [each for each in read("sometimes", version) if each.op == "all-gather"]
    assert (gather.times, gather.certain, len(gather.branches)) == (6, False, 1)
    assert gather.loops == (("microbatch", 3), ("layer", 2))
    conditional = gather.branches[0].partition(",")[0]
    ticks = ((Doing(forward=2), Doing()), (Doing(forward=2), Doing(forward=2)), (Doing(), Doing(forward=1)))
    pace = Pace(ticks, {conditional: Conditional("forward", 0, 2)})
    module = hlo.parse((SAVED / f"sometimes-{version}.txt").read_text())
    (known,), _ = collectives(module, PLACES, pace)
    assert (known.times, known.certain) == (4, True)
    assert known.loops == (("tick", 3), ("layer", 2))
    uneven, _ = collectives(module, PLACES, Pace(ticks[:2], pace.conditionals))
    (row,) = totals(uneven)
    assert (row["runs"], row["wire_bytes"], row["certain"]) == (4.5, 4.5 * 64 * 64 * 2 / 2, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_times_follow_from_the_loops_and_are_named(version: str) -> None:
    found = read("loops", version)
    gathers = [each for each in found if each.op == "all-gather"]
    assert sum(each.times for each in gathers) == 15
    assert {each.loops for each in gathers} == {(("microbatch", 3), ("layer", 5))}
    assert {each.place for each in gathers} == {"weights: weights"}  # the argument is named so
    sums = [each for each in found if each.op == "all-reduce"]
    assert [len(each.branches) for each in sums] == [1, 1, 0, 0]
    assert [each.loops for each in sums] == [(), (), (("turn", None),), (("turn", None),)]
    assert not any(each.certain for each in sums)
    said = warnings(found, [], PLACES.host_size)
    assert any(words.startswith("How often they run is not certain for 4 collectives") for words in said)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_gather_spans_is_the_product_between(version: str) -> None:
    gather, scatter = read("overlap", version)
    assert gather.asynchronous
    assert len(gather.spans) == 1
    assert not scatter.spans
    assert not scatter.asynchronous
    over_data, over_tensor = (next(row for row in totals([gather, scatter]) if row["axes"] == [a]) for a in AXES)
    assert over_data["wire_bytes"] == over_data["spanning_bytes"] == 2 * 2048 * 2048 / 2
    assert (over_tensor["wire_bytes"], over_tensor["spanning_bytes"]) == (2 * 2048 * 2048 / 2, 0)


AXES = ("data", "tensor")

PRODUCT = "%p = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BETWEEN = {
    "nothing": ("%p = f32[4,4]{1,0} add(%a, %a)", ""),
    "dot": (PRODUCT, ""),
    "fusion": (
        "%p = f32[4,4]{1,0} fusion(%a), kind=kCustom, calls=%inner",
        "%inner (x: f32[4,4]) -> f32[4,4] {\n  %x = f32[4,4]{1,0} parameter(0)\n  ROOT %y = f32[4,4]{1,0} "
        "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n",
    ),
    "call": (
        "%p = f32[4,4]{1,0} call(%a), to_apply=%inner",
        "%inner (x: f32[4,4]) -> f32[4,4] {\n  %x = f32[4,4]{1,0} parameter(0)\n  ROOT %y = f32[4,4]{1,0} "
        "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n",
    ),
    "loop": (
        "%p = f32[4,4]{1,0} while(%a), condition=%cond, body=%inner",
        "%cond (c: f32[4,4]) -> pred[] {\n  %c = f32[4,4]{1,0} parameter(0)\n  ROOT %t = pred[] constant(true)\n}\n"
        "%inner (x: f32[4,4]) -> f32[4,4] {\n  %x = f32[4,4]{1,0} parameter(0)\n  ROOT %y = f32[4,4]{1,0} "
        "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n",
    ),
    "cublas": (
        '%p = (f32[4,4]{1,0}, s8[64]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", backend_config={'
        '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        "",
    ),
}


def by_hand(lines: str, computations: str = "") -> hlo.Module:
    """A program of 8 devices with these lines after its one argument `a`, f32[4,4]."""
    entry = [
        "ENTRY %main (a: f32[4,4]) -> f32[4,4] {",
        "  %a = f32[4,4]{1,0} parameter(0)",
        lines,
        "  ROOT %r = f32[4,4]{1,0} copy(%a)",
        "}",
    ]
    return hlo.parse("\n".join(["HloModule by_hand, is_scheduled=true, num_partitions=8", computations, *entry]))


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("is_sync", [True, False])
def test_products_count_wherever_they_stand_between(what: str, is_sync: bool) -> None:
    line, computations = BETWEEN[what]
    start = (
        "  %s = (f32[4,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}"
        f', backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}\n'
    )
    done = "  %d = f32[32,4]{1,0} all-gather-done(%s)"
    after = "  %later = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    (found,), unknown = collectives(by_hand(f"{start}  {line}\n{done}\n{after}", computations), PLACES)
    assert not unknown
    assert len(found.spans) == (what != "nothing" and not is_sync)
    assert found.asynchronous is not is_sync
    assert (found.done, found.payload_bytes) == ("d", 4 * 32 * 4)


def test_generic_asynchronous_starts_are_the_collective_they_hold() -> None:
    inner = (
        "%inner (x: f32[4,4]) -> f32[2,4] {\n  %x = f32[4,4]{1,0} parameter(0)\n  ROOT %y = f32[2,4]{1,0} "
        "reduce-scatter(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}\n}\n"
    )
    lines = (
        "  %s = ((f32[4,4]{1,0}), f32[2,4]{1,0}) async-start(%a), calls=%inner\n"
        f"  {PRODUCT}\n"
        "  %u = ((f32[4,4]{1,0}), f32[2,4]{1,0}) async-update(%s)\n"
        "  %d = f32[2,4]{1,0} async-done(%u)"
    )
    (found,), unknown = collectives(by_hand(lines, inner), PLACES)
    assert not unknown
    assert (found.name, found.op, found.axes, found.done) == ("s", "reduce-scatter", ("tensor",), "d")
    assert found.wire_bytes == 64 / 2
    assert found.spans == ("p",)


def test_nothing_that_moves_bytes_is_dropped() -> None:
    lines = "\n".join(
        [
            "  %t = token[] after-all()",
            "  %send = (f32[4,4]{1,0}, u32[], token[]) send(%a, %t), channel_id=1",
            "  %sent = token[] send-done(%send), channel_id=1",
            '  %call = f32[4,4]{1,0} custom-call(%a), custom_call_target="my_nccl_thing"',
            "  %new = f32[4,4]{1,0} all-shuffle(%a), channel_id=2, replica_groups={}",
            "  %odd = f32[8,4]{1,0} all-gather(%a), channel_id=3, replica_groups={{0,1},{2}}, dimensions={0}",
            "  %lost = f32[8,4]{1,0} all-gather(%a), channel_id=4, dimensions={0}",
        ]
    )
    found, unknown = collectives(by_hand(lines), PLACES)
    assert not found
    assert [(each.name, each.times) for each in unknown] == [(n, 1) for n in ("send", "call", "new", "odd", "lost")]
    assert "several sizes" in unknown[3].why
    assert "without 'replica_groups'" in unknown[4].why
    (words,) = warnings(found, unknown, 4)
    assert "5 operations" in words


@pytest.mark.parametrize(
    ("groups", "axes", "link", "per_host", "odd"),
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], ("data",), "network", 1, ""),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("sequence", "tensor"), "NVLink", 4, ""),
        ([list(range(8))], ("data", "sequence", "tensor"), "both", 4, ""),
        ([[0, 5], [1, 4], [2, 7], [3, 6]], ("data", "tensor"), "network", 1, "no product of mesh axes"),
        ([[0, 1]], ("tensor",), "NVLink", 2, "not all of the 8 devices"),
        ([[0], [1], [2], [3], [4], [5], [6], [7]], (), "none", 1, ""),
    ],
)
def test_groups_on_the_mesh(groups: list[list[int]], axes: tuple[str, ...], link: str, per_host: int, odd: str) -> None:
    found = place_groups(np.array(groups), PLACES)
    assert (found.axes, found.link, found.per_host) == (axes, link, per_host)
    assert odd in found.note
    assert bool(found.note) == bool(odd)


def test_a_permutation_that_stays_moves_nothing() -> None:
    assert place_pairs(np.array([[0, 0], [1, 1]]), PLACES).size == 1
    ring = place_pairs(np.array([[0, 4], [4, 0], [1, 1]]), PLACES)
    assert (ring.axes, ring.link) == (("data",), "network")


GATHER = "  %g = f32[1024,4096]{1,0} all-gather(%big), replica_groups=GROUPS, dimensions={0}"
BIG = "  %big = f32[512,4096]{1,0} broadcast(%a), dimensions={}"


def test_warnings_say_what_is_wrong() -> None:
    def said(groups: str, places: Places = PLACES) -> list[str]:
        found, unknown = collectives(by_hand(f"{BIG}\n{GATHER.replace('GROUPS', groups)}"), places)
        return warnings(found, unknown, places.host_size)

    (fp32,) = said("{{0,1},{2,3},{4,5},{6,7}}")
    assert fp32.startswith("Gathers fp32, where the compute dtype would halve it: all-gather over tensor: 1 runs")
    scattered = Places({"data": 4, "tensor": 2}, np.array([[0, 1], [1, 0], [1, 0], [0, 1]]))
    (_, mixed) = said("mesh['data'=4,'tensor'=2] {'data'}", scattered)
    assert mixed.startswith("Mixes NVLink and network needlessly: all-gather over data")
    assert "groups of 4 have 2 devices on a host" in mixed


def test_a_frequent_collective_between_hosts_is_warned_of() -> None:
    text = (SAVED / "loops-0.10.2.txt").read_text()
    bigger = text.replace("bf16[32,64]", "bf16[2048,1024]").replace("bf16[64,64]", "bf16[4096,1024]")
    found, unknown = collectives(hlo.parse(bigger), PLACES)
    often = [words for words in warnings(found, unknown, 4) if words.startswith("Crosses hosts in every layer")]
    assert len(often) == 1
    assert "all-gather over data: 15 runs a step" in often[0]
    assert "fewer microbatches" in often[0]
    assert "zero.group_size" not in often[0]  # every member of a group is on a host of its own


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["mixed", "loops", "overlap"])
def test_the_section_is_json_and_its_tables_fit_100_columns(name: str, version: str) -> None:
    section: dict[str, Any] = wires.describe(hlo.parse((SAVED / f"{name}-{version}.txt").read_text()), Mesh)  # type: ignore[arg-type]
    assert json.loads(json.dumps(section)) == section
    console = Console(width=100, record=True, file=io.StringIO())
    for thing in tables(section):
        console.print(thing)
    text = console.export_text()
    assert "network" in text
    assert "data" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_program_for_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="for 8 devices, the mesh has 4"):
        collectives(by_hand(""), Places({"data": 4}, np.zeros(4, int)))
