"""Reading HLO text: saved programs of both jax versions (tests/hlo/make.py), and what they do not show, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sharded_train.rehearse import hlo, hlo_walk
from sharded_train.rehearse.hlo import Shape, shapes_in, split_attributes
from sharded_train.rehearse.hlo_groups import groups_of, pairs_of, parse_groups
from sharded_train.rehearse.hlo_walk import branches_of, trip_count, walk

SAVED = Path(__file__).parent / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")


def saved(name: str, version: str) -> hlo.Module:
    return hlo.parse((SAVED / f"{name}-{version}.txt").read_text())


def by_opcode(module: hlo.Module, start: str) -> list[hlo.Instruction]:
    """The instructions that run whose opcode starts so, but for what waits for them."""
    runs = (run.instruction for run in walk(module))
    return [each for each in runs if each.opcode.startswith(start) and not each.opcode.endswith("-done")]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_with_every_collective(version: str) -> None:
    module = saved("mixed", version)
    assert (module.name, module.num_devices, module.scheduled) == ("jit_mixed", 8, True)
    entry = module.computations[module.entry]
    assert [each.opcode for each in entry if each.opcode == "parameter"] == ["parameter"] * 2
    (gather,) = by_opcode(module, "all-gather")
    assert [operand.shapes for operand in entry.operands(gather)] == [
        (Shape("bf16", (128, 512)),),
        (Shape("bf16", (256, 256)),),
    ]
    assert gather.shapes[-2:] == (Shape("bf16", (256, 512)), Shape("bf16", (512, 256)))
    assert gather.scope == "jit(mixed)/shard_map/all_gather"
    assert gather.source.startswith("make.py:")
    assert gather.source.endswith(" in mixed")
    # Devices of the 2 x 2 x 2 mesh are numbered data-major: over data they are 4 apart, over tensor neighbours.
    assert groups_of(gather, 8).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    (scatter,) = by_opcode(module, "reduce-scatter")
    assert groups_of(scatter, 8).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    (total,) = by_opcode(module, "all-reduce")
    assert groups_of(total, 8).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    (permute,) = by_opcode(module, "collective-permute")
    assert sorted(pairs_of(permute).tolist()) == [[0, 2], [1, 3], [2, 0], [3, 1], [4, 6], [5, 7], [6, 4], [7, 5]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("noted", [True, False])
def test_loops_tell_how_often(version: str, noted: bool) -> None:
    """3 microbatches of 5 layers, the counts noted by XLA or read from the conditions; then a loop of neither."""
    text = (SAVED / f"loops-{version}.txt").read_text()
    module = hlo.parse(text if noted else text.replace("known_trip_count", "forgotten"))
    runs = [run for run in walk(module) if run.instruction.opcode.startswith("all-gather")]
    assert all((run.times, [loop.trips for loop in run.loops], run.certain) == (15, [3, 5], True) for run in runs)
    loops = [run for run in walk(module) if run.instruction.opcode == "while"]
    assert [trip_count(module, run.computation, run.instruction) for run in loops] == [3, 5, None]
    maxima = [run for run in walk(module) if run.instruction.scope.endswith("while/body/pmax")]
    assert maxima
    assert all((run.times, run.certain) == (1, False) for run in maxima)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_branches_of_a_conditional_are_walked_and_marked(version: str) -> None:
    module = saved("loops", version)
    inside = [run for run in walk(module) if run.branches and run.instruction.opcode.startswith("all-reduce")]
    sums = [run for run in inside if not run.instruction.opcode.endswith("-done")]
    assert [(run.branches[0].index, run.branches[0].count, run.times) for run in sums] == [(0, 2, 1), (1, 2, 1)]
    assert not any(run.certain for run in sums)


@pytest.mark.parametrize("version", VERSIONS)
def test_work_done_in_place_if_there_is_any_is_a_branch(version: str) -> None:
    """in_place_if in three ticks, over two layers; once its body asks for another turn it is a loop like any."""
    text = (SAVED / f"sometimes-{version}.txt").read_text()
    module = hlo.parse(text)
    (gather,) = [run for run in walk(module) if run.instruction.opcode in ("all-gather", "all-gather-start")]
    assert (gather.times, [loop.trips for loop in gather.loops], gather.certain) == (6, [3, 2], False)
    (branch,) = gather.branches
    assert (branch.index, branch.count) == (0, 2)
    loops = {run.instruction.name: run for run in walk(module) if run.instruction.opcode == "while"}
    assert len(loops) == 3
    for name, run in loops.items():
        body = run.instruction.attributes["body"].lstrip("%")
        branches = [module.computations[body], None] if name == branch.conditional else None
        assert branches_of(module, run.instruction) == branches
    forever = hlo.parse(text.replace("pred[] constant(false)", "pred[] constant(true)"))
    (gather,) = [run for run in walk(forever) if run.instruction.opcode in ("all-gather", "all-gather-start")]
    assert (gather.branches, [loop.trips for loop in gather.loops]) == ((), [3, None, 2])


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_of_a_saved_program_is_lost(version: str) -> None:
    for path in SAVED.glob(f"*-{version}.txt"):
        text = path.read_text()
        module = hlo.parse(text)
        found = [each for computation in module.computations.values() for each in computation]
        assert len(found) == sum(" = " in line and line.startswith("  ") for line in text.splitlines())
        for computation in module.computations.values():
            for each in computation:
                assert each.shapes or each.opcode == "tuple"
                computation.operands(each)  # every operand exists
                module.called(each)  # and every computation


HANDMADE = """HloModule by_hand, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=4

%gather.body (p: f8e4m3fn[8,4]) -> f8e4m3fn[32,4] {
  %p = f8e4m3fn[8,4]{1,0:T(8,128)(4,1)S(1)} parameter(0)
  ROOT %inner = f8e4m3fn[32,4]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}, execution_thread="parallel"

%while.cond (c: (s32[], f32[2])) -> pred[] {
  %c = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %last = s32[] constant(-3)
  ROOT %more = pred[] compare(%last, %i), direction=LE
}

%while.body (b: (s32[], f32[2])) -> (s32[], f32[2]) {
  %b = (s32[], f32[2]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %two = s32[] constant(2)
  %less = s32[] subtract(%j, %two)
  %x = f32[2]{0} get-tuple-element(%b), index=1
  ROOT %next = (s32[], f32[2]{0}) tuple(%less, %x)
}

ENTRY %main (a: f8e4m3fn[8,4], n: s4[3]) -> f32[] {
  %a = f8e4m3fn[8,4]{1,0} parameter(0), metadata={op_name="state[\\'w\\']" source_file="step.py" source_line=7}
  %n = s4[3]{0} parameter(1)
  %start = ((f8e4m3fn[8,4]{1,0}), f8e4m3fn[32,4]{1,0}, u32[]) async-start(%a), calls=%gather.body
  %update = ((f8e4m3fn[8,4]{1,0}), f8e4m3fn[32,4]{1,0}, u32[]) async-update(%start)
  %first = s32[] constant(6)
  %zeros = f32[2]{0} constant({0, 0})
  %carried = (s32[], f32[2]{0}) tuple(%first, %zeros)
  %loop = (s32[], f32[2]{0}) while(%carried), condition=%while.cond, body=%while.body
  %token = token[] after-all()
  %odd = f32[<=16,2]{1,0} custom-call(%n), custom_call_target="a \\"b\\", {c}",
    backend_config={"text": "}, (", "list": [1, 2]}
  %done = f8e4m3fn[32,4]{1,0} async-done(%update)
  ROOT %out = f32[] constant(0)
}
"""


def test_the_grammar_that_the_saved_programs_do_not_show() -> None:
    module = hlo.parse(HANDMADE)
    entry = module.computations["main"].instructions
    assert entry["a"].shapes[0].bytes == 8 * 4
    assert entry["n"].shapes[0] == Shape("s4", (3,))
    assert entry["n"].shapes[0].bytes == 2  # 12 bits
    assert entry["token"].shapes[0].bytes == 0
    assert entry["odd"].shapes == (Shape("f32", (16, 2)),)
    assert hlo.unquoted(entry["odd"].attributes["custom_call_target"]) == 'a "b", {c}'
    assert entry["odd"].attributes["backend_config"] == '{"text": "}, (", "list": [1, 2]}'
    assert entry["start"].shapes == (Shape("f8e4m3fn", (8, 4)), Shape("f8e4m3fn", (32, 4)), Shape("u32"))
    assert (entry["a"].scope, entry["a"].source) == ("state['w']", "step.py:7")
    assert module.computations["gather.body"].instructions["p"].shapes == (Shape("f8e4m3fn", (8, 4)),)
    assert module.computations["main"].root == "out"
    (inner,) = [run for run in walk(module) if run.instruction.name == "inner"]
    assert inner.wrapper is not None
    assert inner.wrapper.name == "start"


def test_a_condition_that_counts_down_is_read() -> None:
    """From 6 in steps of -2 while -3 <= i: 6, 4, 2, 0, -2."""
    module = hlo.parse(HANDMADE)
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["loop"]) == 5
    forever = hlo.parse(HANDMADE.replace("subtract(%j, %two)", "add(%j, %two)"))
    assert trip_count(forever, forever.computations["main"], forever.computations["main"].instructions["loop"]) is None


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['p'=2,'q'=4], device_ids=([4,2]T(1,0)) {'q'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['p'=2,'q'=2], device_ids=(3,1,2,0) {'q'}", [[3, 1], [2, 0]]),
    ],
)
def test_groups_in_every_form(written: str, groups: list[list[int]]) -> None:
    assert np.array_equal(parse_groups(written, 8), groups)


def test_what_is_no_hlo_is_said_with_the_line() -> None:
    with pytest.raises(ValueError, match=r"several sizes: \{\{0,1\},\{2\}\}"):
        parse_groups("{{0,1},{2}}", 8)
    with pytest.raises(ValueError, match="form that is not known: everybody"):
        parse_groups("everybody", 8)
    with pytest.raises(ValueError, match="begins with HloModule"):
        hlo.parse("module @jit_f {}")
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse(HANDMADE.replace("ENTRY %main", "%main"))
    with pytest.raises(ValueError, match="no opcode where one should stand: '%two"):
        hlo.parse(HANDMADE.replace("s32[] constant(2)", "s32[] = 2"))
    with pytest.raises(ValueError, match="ends within"):
        hlo.parse(HANDMADE.rstrip().removesuffix("}"))


def test_attributes_split_where_nothing_is_open() -> None:
    assert split_attributes('a=1, b={x=2,y={3}}, c="d, \\"e\\"", f=[1,2]<=[2]') == {
        "a": "1",
        "b": "{x=2,y={3}}",
        "c": '"d, \\"e\\""',
        "f": "[1,2]<=[2]",
    }
    assert shapes_in("(f32[2,3]{1,0}, (pred[], bf16[4]{0:T(8)S(5)}))") == (
        Shape("f32", (2, 3)),
        Shape("pred"),
        Shape("bf16", (4,)),
    )


ONCE = """HloModule once, is_scheduled=true

%asked (now: (pred[], f32[8])) -> pred[] {
  %now = (pred[], f32[8]{0}) parameter(0)
  ROOT %there = pred[] get-tuple-element(%now), index=0
}

%work (held: (pred[], f32[8])) -> (pred[], f32[8]) {
  %held = (pred[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%held), index=1
  %twice = f32[8]{0} add(%x, %x)
  %no = pred[] constant(AGAIN)
  %copied = pred[] copy(%no)
  ROOT %made = (pred[], f32[8]{0}) tuple(%copied, %twice)
}

ENTRY %main (start: (pred[], f32[8])) -> (pred[], f32[8]) {
  %start = (pred[], f32[8]{0}) parameter(0)
  ROOT %loop = (pred[], f32[8]{0}) while(%start), condition=%asked, body=%work
}
"""


def test_a_loop_of_one_turn_or_none_is_a_branch() -> None:
    module = hlo.parse(ONCE.replace("AGAIN", "false"))
    body, nothing = hlo_walk.branches_of(module, module.computations["main"].instructions["loop"]) or []
    assert body is module.computations["work"]
    assert nothing is None
    (run,) = [run for run in hlo_walk.walk(module) if run.instruction.name == "twice"]
    assert (run.times, run.loops, run.certain) == (1, (), False)
    assert run.branches == (hlo_walk.Branch("loop", 0, 2),)


def test_a_loop_that_goes_on_is_none() -> None:
    module = hlo.parse(ONCE.replace("AGAIN", "true"))
    assert hlo_walk.branches_of(module, module.computations["main"].instructions["loop"]) is None
    (run,) = [run for run in hlo_walk.walk(module) if run.instruction.name == "twice"]
    assert [loop.trips for loop in run.loops] == [None]
    assert not run.branches
