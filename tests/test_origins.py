"""Where an array's numbers come from: through loops, fusions, tuples and what is asynchronous."""

from __future__ import annotations

import pytest

from sharded_train.rehearse.hlo import parse
from sharded_train.rehearse.origins import Origins, argument_in_words

TEXT = """HloModule step, is_scheduled=true, entry_computation_layout={(f32[4,8])->f32[4,8]}

%cast (p.0: f32[8], p.1: s32[]) -> bf16[8] {
  %p.0 = f32[8]{0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %convert.1 = bf16[8]{0} convert(%p.0)
}

%put (q.0: f32[4,8], q.1: f32[8], q.2: s32[]) -> f32[4,8] {
  %q.0 = f32[4,8]{1,0} parameter(0)
  %q.1 = f32[8]{0} parameter(1)
  %q.2 = s32[] parameter(2)
  %bitcast.1 = f32[1,8]{1,0} bitcast(%q.1)
  ROOT %update.1 = f32[4,8]{1,0} dynamic-update-slice(%q.0, %bitcast.1, %q.2, %q.2)
}

%body (carry: (s32[], f32[4,8], f32[8])) -> (s32[], f32[4,8], f32[8]) {
  %carry = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %stack = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %same = f32[8]{0} get-tuple-element(%carry), index=2
  %half = bf16[8]{0} fusion(%same, %i), kind=kLoop, calls=%cast
  %made = f32[8]{0} exponential(%same), metadata={op_name="jit(step)/mlp/exp"}
  %placed = f32[4,8]{1,0} fusion(%stack, %made, %i), kind=kLoop, calls=%put
  %next = s32[] add(%i, %i)
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[8]{0}) tuple(%next, %placed, %same)
}

%condition (state: (s32[], f32[4,8], f32[8])) -> pred[] {
  %state = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}

%idle (kept: (f32[8], f32[8])) -> (f32[8], f32[8]) {
  %kept = (f32[8]{0}, f32[8]{0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%kept), index=0
  %b = f32[8]{0} get-tuple-element(%kept), index=1
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)
}

%busy (given: f32[8]) -> (f32[8], f32[8]) {
  %given = f32[8]{0} parameter(0)
  %root = f32[8]{0} sqrt(%given)
  %copied = f32[8]{0} copy(%root)
  ROOT %pair = (f32[8]{0}, f32[8]{0}) tuple(%copied, %given)
}

ENTRY %main (w: f32[8], x: f32[4,8]) -> f32[4,8] {
  %w = f32[8]{0} parameter(0), metadata={op_name="state.params['layers']['mlp']['up']"}
  %x = f32[4,8]{1,0} parameter(1), metadata={op_name="batch.tokens"}
  %zero = s32[] constant(0)
  %moved = f32[8]{0} copy(%w)
  %begin = (s32[], f32[4,8]{1,0}, f32[8]{0}) tuple(%zero, %x, %moved)
  %loop = (s32[], f32[4,8]{1,0}, f32[8]{0}) while(%begin), condition=%condition, body=%body
  %two = (f32[8]{0}, f32[8]{0}) tuple(%moved, %moved)
  %choice = s32[] constant(1)
  %either = (f32[8]{0}, f32[8]{0}) conditional(%choice, %two, %w), branch_computations={%idle, %busy}
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("name", "index", "origin"),
    [
        ("moved", (), "w"),  # a copy
        ("half", (), "w"),  # a cast in a fusion, of what the loop carries on unchanged
        ("same", (), "w"),
        ("loop", (2,), "w"),
        ("loop", (1,), "made"),  # what each turn puts in its place
        ("carry", (1,), "made"),
        ("placed", (), "made"),
        ("result", (), "made"),
        ("made", (), "made"),
        ("either", (0,), "root"),  # what the busy branch makes
        ("either", (1,), "w"),  # what both hand on
        ("b", (), "w"),
        ("given", (), "w"),
    ],
)
def test_origins(name: str, index: tuple[int, ...], origin: str) -> None:
    found = Origins(parse(TEXT)).of(name, index)
    assert found is not None
    assert found.name == origin


def test_what_is_not_there() -> None:
    assert Origins(parse(TEXT)).of("nothing") is None


def test_arguments_in_words() -> None:
    module = parse(TEXT)
    entry = module.computations[module.entry]
    assert argument_in_words(entry.instructions["w"]) == "layers/mlp/up"
    assert argument_in_words(entry.instructions["x"]) == "batch.tokens"
