"""Pipeline schedules as tables: right for all numbers, as fast and as small as claimed, and caught when not."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.schedules import single_operations
from sharded_train.errors import ConfigError
from sharded_train.schedule_report.bounds import asynchronous, lockstep, useful_sends
from sharded_train.schedule_report.check import check, check_slots
from sharded_train.schedule_report.remarks import remarks
from sharded_train.schedules.build import SCHEDULES, make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours, work
from sharded_train.schedules.slots import slots
from sharded_train.schedules.table import NONE, Schedule, when

COSTS = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 1.3), (1.0, 1.5, 0.5), (1.0, 2.0, 0.0))
CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4, 5, 6, 7, 8], "zero_bubble": [1, 2, 3, 4, 5, 6, 7, 8]}


def samples(name: str, stages: int, number: int) -> list[tuple[int, int]]:
    """Microbatches and chunks to try: few, below and above a multiple of the stages, many, and some drawn by lot."""
    lot = random.Random(f"{name} {stages}")
    edges = [1, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages + 1, 64]
    microbatches = sorted({m for m in edges if 1 <= m <= 64})
    drawn = [lot.randint(1, 64) for _ in range(number)]
    return [(m, lot.choice(CHUNKS[name])) for m in [*microbatches, *drawn]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_is_right_and_as_fast_as_claimed(name: str) -> None:
    for p in range(1, 17):
        for i, (m, v) in enumerate(samples(name, p, 2)):
            f, b, w = COSTS[i % len(COSTS)]
            costs = Costs.even(p, v, f, b, w)
            schedule = make(name, p, m, v, costs)
            check(schedule)
            check_slots(schedule, slots(schedule))
            assert useful_sends(schedule) == 2 * m * (p * v - 1)
            time, of_1f1b = neighbours(schedule, costs).time, (m + p - 1) * (f + b + w)
            assert asynchronous(schedule, costs) <= time + 1e-9
            assert time <= lockstep(schedule, costs).time + 1e-9
            assert m * (f + b + w) <= time + 1e-9
            assert time <= of_1f1b + 1e-9
            if name in ("gpipe", "1f1b"):
                assert time == pytest.approx(of_1f1b)
            if name == "interleaved" and m >= p:
                assert time == pytest.approx((m + (p - 1) / v) * (f + b + w))
            if name == "zero_bubble" and m >= 2 * p - 1 and w <= min(f, b):
                assert time == pytest.approx(m * (f + b + w) + (p - 1) / v * (f + b - w))


def test_costs_of_every_chunk_its_own() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(60):
        p, m, v = (int(numbers.integers(1, most + 1)) for most in (8, 32, 4))
        costs = Costs.shared(numbers.uniform(0.5, 1.5, (p, v)) / v, *numbers.uniform(0.3, 2, 3))
        schedule, plain = make("zero_bubble", p, m, v, costs), make("interleaved" if v > 1 else "1f1b", p, m, v)
        check(schedule)
        times = [f(schedule, costs) for f in (asynchronous, lambda s, c: neighbours(s, c).time)]
        assert m * (costs.forward + costs.backward + costs.weights).sum(1).max() <= times[0] + 1e-9
        assert times[0] <= times[1] + 1e-9
        assert times[1] <= neighbours(plain, costs).time + 1e-9
        assert work(schedule, costs).sum() == pytest.approx(work(plain, costs).sum())


def test_in_flight() -> None:
    for p in range(1, 17):
        stage = np.arange(p)
        for m in (1, p, 3 * p + 1, 64):
            assert (in_flight(make("gpipe", p, m))[0] == m).all()
            assert (in_flight(make("1f1b", p, m))[0] == np.minimum(m, 2 * (p - stage) - 1)).all()
        for v in (2, 4, 8):
            items = np.minimum(2 * p * v, p * v + p - 1 - 2 * stage)  # as Megatron's interleaved schedule
            assert (in_flight(make("interleaved", p, 2 * p, v))[0] == items).all()
            held = in_flight(make("zero_bubble", p, 4 * p, v))
            assert (held[0] <= p * v + p - 1 - 2 * stage).all()
            assert held[1].max() <= 2 * p - 1


def test_buffers_do_not_grow_with_the_microbatches() -> None:
    def sizes(name: str, m: int, v: int) -> tuple[int, int, int]:
        found = slots(make(name, 8, m, v))
        return found.num_inputs, found.num_cotangents, found.num_kept

    for name, v in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zero_bubble", 2)):
        assert sizes(name, 32, v) == sizes(name, 64, v) == sizes(name, 256, v)
    assert sizes("1f1b", 64, 1) == (15, 1, 0)
    assert sizes("interleaved", 64, 4) == (39, 1, 0)
    assert sizes("gpipe", 64, 1) == (64, 1, 0)


def test_microbatches_that_the_stages_do_not_divide_cost_no_time_and_little_memory() -> None:
    for p in (2, 4, 8):
        for m in range(p, 6 * p):
            for v in (2, 4):
                schedule = make("interleaved", p, m, v)
                assert neighbours(schedule, Costs.even(p, v)).time == pytest.approx(3 * (m + (p - 1) / v))
                group = -(-m // (m // p))
                assert (in_flight(schedule)[0] <= p * v + p - 1 - 2 * np.arange(p) + (v - 1) * (group - p)).all()


def test_zero_bubble_has_at_most_a_third_of_the_bubble_of_1f1b() -> None:
    for p in range(2, 17):
        for m in (2 * p - 1, 4 * p, 64):
            for f, b, w in ((1, 1, 1), (1, 2, 1)):
                costs = Costs.even(p, 2, f, b, w)
                plain = neighbours(make("1f1b", p, m), Costs.even(p, 1, f, b, w))
                assert neighbours(make("zero_bubble", p, m, 2, costs), costs).bubble <= plain.bubble / 3
            costs = Costs.even(p, 1)  # with one chunk: of the idle time, and where a W is as long as F and B
            idle = lambda name: neighbours(make(name, p, m), costs).time - 3 * m  # noqa: B023
            assert idle("zero_bubble") <= idle("1f1b") / 3 + 1e-9


def test_ticks_are_not_time() -> None:
    schedule = single_operations(8, 64)
    check_slots(schedule, slots(schedule))
    ideal = lambda costs: neighbours(make("1f1b", 8, 64), costs).time
    equal, twice = Costs.even(8, 1, 1, 1, 0), Costs.even(8, 1, 1, 2, 0)
    assert neighbours(schedule, equal).time == pytest.approx(ideal(equal))
    assert neighbours(schedule, twice).time > 1.25 * ideal(twice)


Spoil = Callable[[Schedule], Schedule]


def changed(kind: str, change: Callable[[np.ndarray], None]) -> Spoil:
    def spoil(schedule: Schedule) -> Schedule:
        items = getattr(schedule, kind).copy()
        change(items)
        return dataclasses.replace(schedule, **{kind: items})

    return spoil


def swap(items: np.ndarray, a: int, b: int, stage: int) -> None:
    items[[a, b], stage] = items[[b, a], stage]


def first_of(items: np.ndarray, stage: int) -> int:
    return int(np.flatnonzero(items[:, stage] != NONE)[0])


def earlier(items: np.ndarray, stage: int) -> None:
    """The column of a stage one tick earlier."""
    assert items[0, stage] == NONE
    items[:, stage] = np.roll(items[:, stage], -1)


def at_first(items: np.ndarray, stage: int) -> None:
    """A stage's first item in tick 0."""
    tick = first_of(items, stage)
    items[[0, tick], stage] = items[[tick, 0], stage]


SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (changed("forward", lambda t: t.__setitem__((first_of(t, 2), 2), NONE)), "is done 0 times"),
    "twice": (changed("backward", lambda t: t.__setitem__((0, 1), 5)), "is done 2 times"),
    "no such item": (changed("forward", lambda t: t.__setitem__((-1, 0), 99)), "outside of"),
    "forward early": (changed("forward", lambda t: earlier(t, 2)), "forward before it allows"),
    "backward early": (changed("backward", lambda t: earlier(t, 1)), "backward after it allows"),
    "backward first": (changed("backward", lambda t: earlier(t, 3)), "backward .* forward allows"),
    "swapped": (changed("forward", lambda t: swap(t, 6, 7, 1)), "allows"),
    "weights early": (changed("weights", lambda t: at_first(t, 3)), "weights .* backward allows"),
    "dtype": (lambda s: dataclasses.replace(s, forward=s.forward.astype(np.int64)), "int64"),
    "shape": (lambda s: dataclasses.replace(s, backward=s.backward[:, :-1]), "not int32"),
    "bound": (lambda s: dataclasses.replace(s, claimed=s.claimed - [[1], [0]]), "from forward to backward, .* claimed"),
    "kept": (
        lambda s: dataclasses.replace(s, claimed=np.stack([s.claimed[0], in_flight(s)[1] - 1])),
        "from backward to weights",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_the_validator_catches(kind: str) -> None:
    schedule = make("zero_bubble", 4, 8, 1)
    check(schedule)
    spoil, words = SPOILT[kind]
    with pytest.raises(ValueError, match=words):
        check(spoil(schedule))


def test_the_validator_catches_every_swap_and_every_loss() -> None:
    """Any two neighbouring entries of a stage swapped in 1F1B's steady state break a dependency, or are both empty."""
    schedule = make("1f1b", 4, 6)
    for kind in ("forward", "backward"):
        items = getattr(schedule, kind)
        for tick, stage in np.argwhere(items[:-1] != NONE):
            spoil = changed(kind, lambda t, a=tick, s=stage: swap(t, a, a + 1, s))  # type: ignore[misc]
            if stage != (3 if kind == "forward" else 0) or items[tick + 1, stage] == NONE:
                with pytest.raises(ValueError, match=r"allows|claimed"):
                    check(spoil(schedule))
            with pytest.raises(ValueError, match="0 times"):
                check(changed(kind, lambda t, a=tick, s=stage: t.__setitem__((a, s), NONE))(schedule))  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(slots(make("1f1b", 2, 2))) if f.type == "np.ndarray"]
)
def test_wrong_slots_are_caught(name: str) -> None:
    schedule = make("zero_bubble", 4, 16, 2)
    good = slots(schedule)
    table = getattr(good, name)
    limit = {"in": good.num_inputs, "co": good.num_cotangents, "ke": good.num_kept}[name.split("_")[1][:2]]
    caught, where = 0, np.argwhere(table != NONE)
    for tick, stage in where[:: max(1, len(where) // 20)]:
        for wrong in (NONE, limit, (table[tick, stage] + 1) % limit):
            spoilt = table.copy()
            spoilt[tick, stage] = wrong
            if limit == 1 and wrong == table[tick, stage]:
                continue
            try:
                check_slots(schedule, dataclasses.replace(good, **{name: spoilt}))
            except ValueError:
                caught += 1
            else:
                pytest.fail(f"{name}[{tick}, {stage}] = {wrong} was not noticed")
    assert caught > 20


def test_items_arrive_a_tick_after_they_are_sent() -> None:
    schedule = make("interleaved", 4, 6, 3)
    sent, arrived = when(schedule, schedule.forward), when(schedule, schedule.arriving_inputs())
    virtual = lambda ticks: ticks.reshape(6, 12)
    assert (virtual(arrived)[:, 1:] == virtual(sent)[:, :-1] + 1).all()
    assert (virtual(arrived)[:, 0] == NONE).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpip", 4, 8), "schedule gpip: there are gpipe, 1f1b, interleaved, zero_bubble; did you mean gpipe?"),
        (("1F1B", 4, 8), "did you mean 1f1b?"),
        (("gpipe", 4, 8, 2), "gpipe has 1 chunk a stage, not 2: choose interleaved"),
        (("1f1b", 4, 8, 3), "1f1b has 1 chunk a stage, not 3"),
        (("interleaved", 4, 8, 1), "give it 2 chunks or more, or choose 1f1b"),
        (("1f1b", 4, 0), "0 microbatches; it needs at least 1"),
        (("zero_bubble", 0, 8), "0 stages"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(*arguments)
    assert words in str(caught.value)


def test_a_choice_that_costs_is_said_with_its_numbers() -> None:
    said = lambda name, p, m, v, costs: " ".join(remarks(make(name, p, m, v, costs), costs))
    assert said("1f1b", 8, 32, 1, Costs.even(8, 1)) == ""
    assert said("interleaved", 8, 32, 2, Costs.even(8, 2)) == ""
    ends = np.full((4, 4), 0.25)
    ends[0, 0] = ends[3, 3] = 1.25  # embedding and head, in ticks of their own
    assert "slower" in said("interleaved", 4, 16, 4, Costs.shared(ends))
    assert "4 microbatches on 8 stages" in said("1f1b", 8, 4, 1, Costs.even(8, 1))
    assert "gpipe holds 32 microbatches in flight" in said("gpipe", 8, 32, 1, Costs.even(8, 1))
    assert "nothing is gained" in said("zero_bubble", 8, 32, 2, Costs.even(8, 2, 1, 2, 0))
    assert "keeps inputs and cotangents" in said("zero_bubble", 8, 32, 1, Costs.even(8, 1))


def test_the_schedules_need_numpy_alone() -> None:
    code = (
        "import sys; from sharded_train.schedule_report import check\n"
        "from sharded_train.schedules import build, slots, split\n"
        "build.make('1f1b', 2, 3); assert not {'jax', 'rich', 'ml_collections'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
