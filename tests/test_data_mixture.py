"""Mixtures: shares, epochs and order of several sources, each a pure function of seed and sample."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from sharded_train.data.mixture import PERIOD, Member, Mixture, Turns, parts_of_period
from sharded_train.data.order import train_sample
from sharded_train.data.rows import ArrayStream, Rows


def of_size(num_rows: int) -> Rows:
    return Rows(ArrayStream(np.ones(num_rows * 4 + 1, np.uint16)), 4, 0)


def mixture(*members: tuple[int, float | None, int | None]) -> Mixture:
    return Mixture(
        tuple(Member(f"s{n}", of_size(size), weight, epochs) for n, (size, weight, epochs) in enumerate(members))
    )


def places(mixed: Mixture, seed: int, samples: range) -> list[tuple[int, int]]:
    return [mixed.place_of(int(row)) for row in mixed.order(seed, np.array(samples))]


def test_one_source_is_in_the_order_it_always_was() -> None:
    mixed = mixture((37, None, None))
    np.testing.assert_array_equal(mixed.order(5, np.arange(200)), train_sample(range(37), 5, np.arange(200)))
    assert mixed.num_samples is None
    assert (len(mixed), mixed.epoch_size) == (37, 37)


def test_without_weights_all_sources_end_at_once_and_go_epoch_by_epoch() -> None:
    sizes, epochs = (10, 7, 4), (1, 3, 1)
    mixed = mixture((10, None, None), (7, None, 3), (4, None, 1))
    assert mixed.num_samples == mixed.epoch_size == 10 + 3 * 7 + 4
    assert len(mixed) == 21
    assert mixed.shares == [10 / 35, 21 / 35, 4 / 35]
    for start in (0, 35, 70):
        seen = places(mixed, 0, range(start, start + 35))
        for member in range(3):
            rows = [row for which, row in seen if which == member]
            assert len(rows) == sizes[member] * epochs[member]
            for begin in range(0, len(rows), sizes[member]):
                assert sorted(rows[begin : begin + sizes[member]]) == list(range(sizes[member]))


def test_weights_are_the_shares_of_any_stretch_and_sources_go_epoch_by_epoch() -> None:
    weights, sizes = [6.0, 3.0, 1.0], (50, 17, 13)
    mixed = mixture(*((size, weight, None) for size, weight in zip(sizes, weights, strict=True)))
    seen = places(mixed, 3, range(5000))
    for start, count in ((0, 10), (0, 1000), (777, 100), (123, 4000)):
        counted = Counter(member for member, _ in seen[start : start + count])
        for member, weight in enumerate(weights):
            assert abs(counted[member] - count * weight / 10) <= 2
    for member, size in enumerate(sizes):
        rows = [row for which, row in seen if which == member]
        epochs = [rows[begin : begin + size] for begin in range(0, len(rows) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_sample_of_a_mixture_does_not_depend_on_the_others_asked_for() -> None:
    mixed = mixture((50, 0.5, None), (7, 0.5, None))
    far = PERIOD * 3 - 20
    together = mixed.order(9, np.arange(far, far + 40)).tolist()
    assert [int(mixed.order(9, sample)) for sample in range(far, far + 40)] == together
    assert mixed.order(9, np.arange(far, far + 40)).tolist() != mixed.order(8, np.arange(far, far + 40)).tolist()


def test_the_order_of_mixtures_is_frozen() -> None:
    """These numbers may never change: a run that resumes after an update must see the samples it would have seen."""
    weighted = mixture((5, 3.0, None), (4, 1.0, None))
    assert weighted.order(0, np.arange(12)).tolist() == [3, 4, 5, 2, 0, 1, 8, 0, 1, 3, 7, 2]
    joined = mixture((5, None, 2), (4, None, None))
    assert joined.order(0, np.arange(14)).tolist() == [3, 5, 4, 2, 0, 8, 1, 0, 7, 1, 3, 2, 6, 4]


WEIGHTS = [[1.0], [1.0, 1.0], [0.1, 0.2, 0.7], [1e-9, 1.0], [3.0] * 7, [2.0**-n for n in range(12)]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_rounded_to_parts_of_the_period(weights: list[float]) -> None:
    counts = np.array(parts_of_period(weights))
    assert counts.sum() == PERIOD
    assert (counts >= 1).all()
    assert np.abs(counts - np.array(weights) / sum(weights) * PERIOD).max() <= 1


COUNTS = [[1], [5], [3, 3, 3], [1, 10], [7, 0, 4, 0], [2, 3, 5, 7, 11, 13], [500, 1, 1, 1, 1, 1, 1], [64] + [1] * 40]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_turns_are_in_the_order_of_their_times(counts: list[int]) -> None:
    size = sum(counts)
    times = sorted((Fraction(2 * k + 1, 2 * count), n, k) for n, count in enumerate(counts) for k in range(count))
    turns = Turns(counts)
    whose, turn = turns.of_samples(np.arange(3 * size))
    assert whose.tolist() == 3 * [n for _, n, _ in times]
    assert turn.tolist() == [k + counts[n] * r for r in range(3) for _, n, k in times]
    assert [turns.sample_of(n, k) for n, k in zip(whose.tolist(), turn.tolist(), strict=True)] == list(range(3 * size))


def test_turns_of_huge_sources_are_exact() -> None:
    counts = [3 * 10**12, 10**6, 7 * 10**11 + 1]
    turns, rng = Turns(counts), np.random.default_rng(0)
    samples = np.sort(rng.integers(0, sum(counts), 200))
    samples[1::2] = samples[::2] + 1
    whose, turn = turns.of_samples(samples)
    assert [turns.sample_of(n, k) for n, k in zip(whose.tolist(), turn.tolist(), strict=True)] == samples.tolist()
    times = [Fraction(2 * k + 1, 2 * counts[n]) for n, k in zip(whose.tolist(), turn.tolist(), strict=True)]
    assert times == sorted(times)


def test_the_end_is_where_a_source_would_be_begun_once_more() -> None:
    mixed = mixture((30, 3.0, None), (5, 1.0, 2))
    end = mixed.num_samples
    assert end is not None
    assert [member for member, _ in places(mixed, 0, range(end))].count(1) == 10
    assert places(mixed, 0, range(end, end + 1))[0][0] == 1
    assert mixed.shortfalls(end) == []
    (problem,) = mixed.shortfalls(end + 100)
    assert "s1" in problem
    assert "num_epochs = 2, 5 rows" in problem
    assert "s0" not in problem
    assert mixed.epochs_after(40) == {"s0": 1.0, "s1": 2.0}


def test_rows_are_numbered_through_the_sources() -> None:
    mixed = mixture((3, None, None), (0, None, None), (2, None, None))
    assert [mixed.place_of(index) for index in range(5)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    for index in (-1, 5):
        with pytest.raises(IndexError):
            mixed.place_of(index)
    assert Counter(places(mixed, 0, range(5))) == Counter([(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)])
