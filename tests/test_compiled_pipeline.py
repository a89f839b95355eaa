"""The pipeline in the compiled program: what is held, what is sent where, and what stands in the loop over ticks.

A small model is compiled for 4 hosts of 2 H100, pipeline 2 x data 2 x tensor 2: stages and data between hosts, tensor
within them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from sharded_train import params, recipe
from sharded_train.errors import ConfigError
from sharded_train.rehearse import clusters, hlo
from sharded_train.rehearse.compile import Compiled, check_plugin, compile_for
from sharded_train.rehearse.hlo_groups import pairs_of
from sharded_train.rehearse.hlo_walk import walk
from sharded_train.rehearse.wires import Collective, collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.sharding import is_placement

try:
    check_plugin()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

TINY = {
    "model": {"vocab_size": 512, "d_model": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512},
    "mesh": {"pipeline": 2, "data": 2, "tensor": 2},
    "precision": {"recipe": "bf16"},
    "train": {"sequence_length": 256, "remat": "full"},
}
P, M, ROWS = 2, 8, 2  # stages, microbatches, rows of each device in one
ACTIVATION = ROWS * 256 // 2 * 256 * 2  # bytes between stages: half of the sequence, bf16
FEW = 64  # bytes: a sum of a few numbers, such as the loss or a norm
# Schedules, ZeRO stages; what is not 1F1B on ZeRO 1 takes long in all.
CASES = [
    ("1f1b", 1),
    pytest.param("1f1b", 0, marks=pytest.mark.slow),
    pytest.param("gpipe", 1, marks=pytest.mark.slow),
    pytest.param("interleaved", 1, marks=pytest.mark.slow),
]


@functools.cache
def compiled(schedule: str, zero: int, m: int = M) -> Compiled:
    settings = {
        "pipeline.schedule": schedule,
        "zero.stage": zero,
        "train.num_microbatches": m,
        "train.global_batch_size": ROWS * 2 * m,
    }
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    return compile_for(recipe.from_dict(TINY, overrides), clusters.parse("h100:4x2"))


@functools.cache
def module_of(schedule: str, zero: int) -> hlo.Module:
    return hlo.parse(compiled(schedule, zero).text)


@functools.cache
def found(schedule: str, zero: int) -> tuple[Collective, ...]:
    those, unknown = collectives(module_of(schedule, zero), Places.of(compiled(schedule, zero).program.mesh))
    assert not unknown
    return tuple(those)


def sometimes(each: Collective) -> bool:
    """Whether a stage may pass it over: in a branch, or in a loop of one turn or none, which stands for one."""
    return bool(each.branches) or any(turns is None for _, turns in each.loops)


def over(axis: str, schedule: str, zero: int) -> list[Collective]:
    """The collectives over an axis that carry more than a few numbers."""
    return [each for each in found(schedule, zero) if axis in each.axes and each.payload_bytes > FEW]


@pytest.mark.parametrize(("schedule", "zero"), CASES)
def test_gradients_are_summed_over_data_once_after_the_last_tick(schedule: str, zero: int) -> None:
    plan = compiled(schedule, zero).program.plan
    reductions = [each for each in over("data", schedule, zero) if each.op in ("all-reduce", "reduce-scatter")]
    assert all(each.times == 1 and not each.loops and not sometimes(each) for each in reductions)
    whole = sum(
        4 * math.prod(plan.local_shape(p.spec.shape, p.gathered))
        for _, p in params.named_leaves(plan.placements, is_placement)
    )
    summed = sum(member.bytes for each in reductions for member in each.members)
    assert summed == pytest.approx(whole, abs=FEW)


@pytest.mark.parametrize(("schedule", "zero"), CASES)
def test_sends_go_to_neighbours_and_twice_a_tick(schedule: str, zero: int) -> None:
    program = compiled(schedule, zero).program
    assert program.pipe is not None
    numbers = np.moveaxis(
        np.arange(program.mesh.size).reshape(program.mesh.devices.shape), program.mesh.axis_names.index("pipeline"), 0
    ).reshape(P, -1)
    stage_of, beside = {}, {}
    for stage, place in np.ndindex(numbers.shape):
        stage_of[numbers[stage, place]], beside[numbers[stage, place]] = stage, place
    runs = [run for run in walk(module_of(schedule, zero)) if run.instruction.opcode.startswith("collective-permute")]
    runs = [run for run in runs if not run.instruction.opcode.endswith("-done")]
    ring = program.pipe.num_chunks > 1
    moved: list[set[int]] = []
    for run in runs:
        pairs = pairs_of(run.instruction)
        assert all(beside[source] == beside[target] for source, target in pairs)
        moved.append({int(stage_of[target] - stage_of[source]) for source, target in pairs})
        assert len(pairs) == (P if ring else P - 1) * numbers.shape[1]
    assert all(by == {1, -1} for by in moved) if ring else moved.count({1}) == moved.count({-1}) == len(moved) / 2
    sent = [each for each in found(schedule, zero) if each.op == "collective-permute"]
    # With two stages in a ring both directions are the same pairs, and XLA may send both at once.
    assert sum(each.times * len(each.members) for each in sent) == 2 * program.pipe.schedule.num_ticks
    assert {(member.bytes, member.dtype) for each in sent for member in each.members} == {(ACTIVATION, "bf16")}


@pytest.mark.parametrize(("schedule", "zero"), CASES)
def test_stages_that_idle_keep_nobody_waiting(schedule: str, zero: int) -> None:
    """In what other stages may pass over nothing is exchanged with them, nor between hosts at all."""
    for each in found(schedule, zero):
        if sometimes(each):
            assert each.axes == ("tensor",), each
    over_tensor = over("tensor", schedule, zero)
    assert any(sometimes(each) for each in over_tensor)
    assert all(each.link == "NVLink" for each in over_tensor if each.axes == ("tensor",))


@pytest.mark.parametrize(("schedule", "zero"), CASES)
def test_weights_are_gathered_before_the_first_tick(schedule: str, zero: int) -> None:
    gathers = [each for each in over("data", schedule, zero) if each.op == "all-gather"]
    assert bool(gathers) == (zero > 0)
    assert all(not each.loops and each.times == 1 and each.dtype == "bf16" for each in gathers)


def temporaries(schedule: str, m: int) -> int:
    memory: Any = compiled(schedule, 1, m).memory
    return int(memory.temp_size_in_bytes)


@pytest.mark.slow
def test_1f1b_holds_the_same_however_many_microbatches_there_are() -> None:
    few, many = temporaries("1f1b", M), temporaries("1f1b", 2 * M)
    assert abs(many - few) < ACTIVATION  # tables are longer


@pytest.mark.slow
def test_gpipe_holds_every_microbatch() -> None:
    """Of each: its input, every layer's, and the output; XLA may have one of these buffers twice."""
    few, many = temporaries("gpipe", M), temporaries("gpipe", 2 * M)
    each = (many - few) / M / ACTIVATION
    assert 2 + 4 // P <= round(each, 1) <= 2 + 4 // P + 1
    assert few > temporaries("1f1b", M)
