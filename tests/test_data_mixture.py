"""Mixtures: shares, epochs and order of several sources, each a pure function of seed and sample."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sharded_train.data.mixture import PERIOD, Member, Mixture, Turns
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


def test_without_weights_all_sources_end_at_once() -> None:
    mixed = mixture((10, None, None), (7, None, 3), (4, None, 1))
    assert mixed.num_samples == mixed.epoch_size == 10 + 3 * 7 + 4
    assert len(mixed) == 21
    for epoch in range(3):
        counts = Counter(places(mixed, 0, range(35 * epoch, 35 * (epoch + 1))))
        assert counts == {(n, row): (1, 3, 1)[n] for n, size in enumerate((10, 7, 4)) for row in range(size)}
    assert mixed.shares == [10 / 35, 21 / 35, 4 / 35]


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
    assert mixture((5, None, 2), (4, None, None)).order(0, np.arange(14)).tolist() == [
        8,
        0,
        2,
        0,
        1,
        2,
        6,
        4,
        3,
        4,
        7,
        5,
        1,
        3,
    ]


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 1.0], [0.1, 0.2, 0.7], [1e-9, 1.0], [3.0] * 7, [2.0**-n for n in range(12)]]
)
def test_turns_are_whole_and_each_member_has_some(weights: list[float]) -> None:
    turns = Turns.of(weights)
    assert turns.counts.sum() == PERIOD
    assert (turns.counts >= 1).all()
    exact = np.array(weights) / sum(weights) * PERIOD
    assert np.abs(turns.counts - exact).max() <= 1
    np.testing.assert_array_equal(np.bincount(turns.member), turns.counts)
    member, count = turns.of_samples(np.arange(2 * PERIOD))
    for number in range(len(weights)):
        np.testing.assert_array_equal(count[member == number], np.arange(2 * turns.counts[number]))


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
