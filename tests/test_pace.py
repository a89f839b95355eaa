"""A pipeline's program: which branch its stages take, and what FLOPs and time follow from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from sharded_train.flops import Flops, flops_of, flops_of_step
from sharded_train.rehearse import computed, hlo, timeline, wires
from sharded_train.rehearse.pace import Conditional, Doing, Pace, pace_of
from sharded_train.rehearse.streams import Streams
from sharded_train.rehearse.streams_state import Event, State, mean_of
from sharded_train.rehearse.wires import collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.schedules.build import make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours, work
from tests.rehearsed import CLUSTER, pipeline

SCHEDULES = ["1f1b", "zero_bubble"]


@functools.cache
def module(schedule: str = "1f1b") -> hlo.Module:
    return hlo.parse(pipeline(schedule).text)


@functools.cache
def pace(schedule: str = "1f1b") -> Pace:
    found = pace_of(pipeline(schedule).program.pipe, module(schedule))
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_conditional_of_the_executor_is_known(schedule: str) -> None:
    roles = Counter(each.role for each in pace(schedule).conditionals.values())
    later = ["weights", "layer weights"] if schedule == "zero_bubble" else []
    passes = ["forward", "backward", "layer forward", "layer backward"]
    assert roles == dict.fromkeys([*passes, "embed", "head", "embed back", *later], 1)
    pipe = pipeline(schedule).program.pipe
    assert pipe is not None
    assert pipe.padded
    assert len(pace(schedule).ticks) == pipe.schedule.num_ticks
    total = Counter(itertools.chain.from_iterable(pace(schedule).ticks))
    assert sum((doing.weights or 0) * n for doing, n in total.items()) == (4 * 3 if later else 0)
    assert sum((doing.forward or 0) * n for doing, n in total.items()) == 4 * 3  # microbatches, layers
    assert sum((doing.backward or 0) * n for doing, n in total.items()) == 4 * 3
    assert sum(doing.heads * n for doing, n in total.items()) == 4


def test_shares_of_a_conditional_are_one_whole() -> None:
    shares = pace().shares()
    for name, conditional in pace().conditionals.items():
        assert sum(shares[name, branch] for branch in range(conditional.count)) == 1
        if conditional.role == "forward":
            assert shares[name, conditional.busy] == Fraction(4 * 2, 2 * len(pace().ticks))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_flops_of_the_mean_stage_are_those_of_the_model(schedule: str) -> None:
    section = computed.describe(module(schedule), model(), "bf16", pace(schedule))
    assert abs(section["explained"][computed.REST]) <= 2  # of rounding
    assert not section["conditionals"]
    assert not section["unknown_trips"]
    assert "step" not in {row["part"] for row in section["by_part"]}  # every product has a place in the model
    blind = computed.describe(module(schedule), model(), "bf16")
    assert blind["products"] > 1.2 * section["products"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_of_the_mean_stage_are_certain(schedule: str) -> None:
    """A send each way in every tick, of a microbatch's activations in bf16, to whom it concerns."""
    program, those = pipeline(schedule).program, module(schedule)
    section = wires.describe(those, program.mesh, pace(schedule))
    assert not [words for words in section["warnings"] if "certain" in words]
    assert all(each["certain"] for each in section["collectives"])
    sends = [each for each in section["collectives"] if each["op"] == "collective-permute"]
    assert sum(each["times"] for each in sends) == 2 * len(pace(schedule).ticks)
    assert {tuple(loop["turn"] for loop in each["loops"]) for each in sends} == {("tick",)}


def test_what_leaves_gradients_for_later_is_known() -> None:
    """Without compiling: a tick of a forward and a backward of inputs, and one of weights alone."""
    ticks = [(Doing(forward=1, backward=1), Doing()), (Doing(weights=1), Doing(weights=1))]
    roles = {"a": Conditional("backward", 1, 2), "b": Conditional("weights", 0, 2)}
    shares = Pace(tuple(ticks), roles).shares()
    assert shares == {
        ("a", 0): Fraction(3, 4),
        ("a", 1): Fraction(1, 4),
        ("b", 0): Fraction(1, 2),
        ("b", 1): Fraction(1, 2),
    }


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble"])
def test_the_path_that_the_step_waits_for_is_as_long_as_the_simulation(name: str) -> None:
    """Stages of unequal costs, waiting for neighbours."""
    chunks = 2 if name == "interleaved" else 1
    schedule = make(name, 4, 8, chunks)
    draw = np.random.default_rng(0)
    for _ in range(5):
        costs = Costs(*(draw.uniform(0.5, 2.0, (4, chunks)) for _ in range(4)))
        spent = work(schedule, costs).sum(0)
        ticks = tuple(tuple(Doing(tick, stage) for stage in range(4)) for tick in range(schedule.num_ticks))
        seconds = {doing: spent[doing.forward, doing.backward] for tick in ticks for doing in tick}
        path = Pace(ticks, {}, ring=chunks > 1).critical(seconds)
        assert [doing.forward for doing in path] == list(range(schedule.num_ticks))
        assert sum(seconds[doing] for doing in path) == pytest.approx(neighbours(schedule, costs).time)


def test_a_step_is_its_kernels_and_what_is_waited_for() -> None:
    known, blind = seconds(pace()), seconds(None)
    assert known["step"] < blind["step"]
    assert known["step"] == pytest.approx(known["sum"])
    assert 0 < known["idle"] < known["step"]
    assert blind["idle"] == 0


def test_nobody_is_idle_where_all_do_the_same() -> None:
    alike = Pace(tuple((max(tick, key=_work),) * 2 for tick in pace().ticks), pace().conditionals)
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


def test_layers_of_several_windows_count_as_often_as_there_are_such() -> None:
    """Two layers of a window and one of all keys: what is computed beyond the model is what is recomputed by design."""
    compiled = pipeline(windows=(64, 0))
    program, parsed = compiled.program, hlo.parse(compiled.text)
    found = pace_of(program.pipe, parsed, program.model.layer_windows)
    assert found is not None
    assert Counter(each.role for each in found.conditionals.values()) == Counter(
        each.role for each in pace().conditionals.values()
    )
    assert set(found.windows.values()) == {Fraction(2, 3), Fraction(1, 3)}
    section = computed.describe(parsed, flops_of(program), "bf16", found)
    assert not section["conditionals"]
    assert abs(section["explained"]["not explained"]) < 0.02 * section["products"]
    sent, _ = collectives(parsed, Places.of(program.mesh))
    mean, slowest = (
        Streams(parsed, CLUSTER.device, sent, dataclasses.replace(found, windows=windows)).run()
        for windows in (found.windows, {})
    )
    assert mean.seconds == pytest.approx(slowest.seconds)  # rows so short are as soon read whole as in part


def test_the_mean_of_branches_is_drawn_as_long_as_it_takes() -> None:
    """Of a second and of five, taken three times of four and once."""
    short, long = State(now=3.0), State(now=7.0)
    short.totals["kind", "attention"], long.totals["kind", "attention"] = 1.0, 5.0
    long.events += [Event("compute", "before", "mlp", 0.0, 2.0), Event("compute", "all", "attention", 3.0, 4.0)]
    mean = mean_of([short, long], [0.75, 0.25], 2.0)
    assert mean.now == 4.0
    assert mean.totals["kind", "attention"] == 2.0
    assert mean.events == [long.events[0], Event("compute", "all", "attention", 2.4, 1.6)]
