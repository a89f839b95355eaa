"""A pipeline's program: which branch its stages take, and what FLOPs and time follow from it."""

from __future__ import annotations

import functools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from sharded_train.flops import Flops, flops_of_step
from sharded_train.rehearse import computed, hlo, timeline
from sharded_train.rehearse.pace import Doing, Pace, pace_of
from sharded_train.rehearse.streams import Streams
from sharded_train.rehearse.wires import collectives
from sharded_train.rehearse.wires_places import Places
from tests.rehearsed import CLUSTER, pipeline


@functools.cache
def module() -> hlo.Module:
    return hlo.parse(pipeline().text)


@functools.cache
def pace() -> Pace:
    found = pace_of(pipeline().program.pipe, module())
    assert found is not None
    return found


@functools.cache
def model() -> Flops:
    return flops_of_step(pipeline().program.specs, 8, 256)


def seconds(pace: Pace | None) -> dict[str, float]:
    found, _ = collectives(module(), Places.of(pipeline().program.mesh))
    result = Streams(module(), CLUSTER.device, found, pace).run()
    kinds = sum(value for key, value in result.totals.items() if key[0] == "kind")
    exposed = sum(value for key, value in result.totals.items() if key[0] == "exposed")
    return {"step": result.seconds, "idle": result.totals.get(("idle",), 0.0), "sum": kinds + exposed}


def test_every_conditional_of_the_executor_is_known() -> None:
    roles = {each.role for each in pace().conditionals.values()}
    assert roles >= {"forward", "backward", "head"}
    pipe = pipeline().program.pipe
    assert pipe is not None
    assert pipe.padded
    assert roles >= {"layer forward", "layer backward"}
    assert len(pace().ticks) == pipe.schedule.num_ticks
    total = sum(pace().ticks, Counter[Doing]())
    assert sum((doing.forward or 0) * n for doing, n in total.items()) == 4 * 3  # microbatches, layers
    assert sum((doing.backward or 0) * n for doing, n in total.items()) == 4 * 3
    assert sum(doing.heads * n for doing, n in total.items()) == 4


def test_shares_of_a_conditional_are_one_whole() -> None:
    shares = pace().shares()
    for name, conditional in pace().conditionals.items():
        assert sum(shares[name, branch] for branch in range(conditional.count)) == 1
        if conditional.role == "forward":
            assert shares[name, conditional.busy] == Fraction(4 * 2, 2 * len(pace().ticks))


def test_flops_of_the_mean_stage_are_those_of_the_model() -> None:
    section = computed.describe(module(), model(), "bf16", pace())
    assert abs(section["explained"][computed.REST]) <= 2  # of rounding
    assert not section["conditionals"]
    blind = computed.describe(module(), model(), "bf16")
    assert blind["products"] > 1.2 * section["products"]


def test_a_step_lasts_as_long_as_the_busiest_stage_of_each_tick() -> None:
    known, blind = seconds(pace()), seconds(None)
    assert known["step"] < blind["step"]
    assert known["step"] == pytest.approx(known["sum"])
    assert 0 < known["idle"] < known["step"]
    assert blind["idle"] == 0


def test_nobody_is_idle_where_all_do_the_same() -> None:
    alike = Pace(tuple(Counter({max(tick, key=_work): 2}) for tick in pace().ticks), pace().conditionals)
    found = seconds(alike)
    assert found["idle"] == pytest.approx(0, abs=1e-12)
    assert found["step"] == pytest.approx(seconds(pace())["step"], rel=0.2)


def _work(doing: Doing) -> float:
    return (doing.forward or 0) + 3 * (doing.backward or 0) + 4 * doing.heads


def test_the_section_tells_the_bubble() -> None:
    found, _ = collectives(module(), Places.of(pipeline().program.mesh))
    section = timeline.describe(module(), CLUSTER, found, model(), "bf16", pace())
    assert section["idle"] > 0
    assert any(isinstance(each, str) and timeline.IDLE in each for each in timeline.tables(section))
    (ticks,) = [loop for loop in section["loops"] if loop["turn"] == "tick"]
    assert ticks["step_turns"] == ticks["trips"] == len(pace().ticks)
    for loop in section["loops"]:
        assert 0 < loop["step_seconds"] <= section["step_seconds"]
    assert not [note for note in section["notes"] if "slowest" in note]
    assert np.isfinite(section["mfu"])


def test_without_a_pipeline_there_is_no_pace() -> None:
    assert pace_of(None, module()) is None
