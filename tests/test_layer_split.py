"""Layers over stages and chunks: always the model's, the busiest chunk as little busy as can be, in their order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sharded_train.errors import ConfigError
from sharded_train.schedules.build import rounds
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours
from sharded_train.schedules.split import split


def in_order(by_stage: np.ndarray) -> list[float]:
    """`[stage, chunk]` in the order in which the layers run."""
    return by_stage.T.ravel().tolist()


def test_every_layer_has_one_place_in_the_order_of_the_model() -> None:
    for p, v in itertools.product((1, 2, 3, 4, 8), (1, 2, 3)):
        for num_layers in (p * v, p * v + 1, 30, 61, 126):
            if num_layers < p * v:
                continue
            found = split(num_layers, p, v, embedding=0.3, head=2.5)
            assert found.layers.sum() == num_layers
            assert found.layers.shape == (p, v)
            places, indices = found.places(), found.indices()
            assert places.shape == (num_layers, 3)
            assert indices.shape == (p, v, found.most)
            assert (indices[tuple(places.T)] == np.arange(num_layers)).all()
            assert (indices >= 0).sum() == num_layers
            virtual = places[:, 1] * p + places[:, 0]
            assert (np.diff(virtual * found.most + places[:, 2]) > 0).all()


def test_no_split_has_a_less_busy_busiest_chunk() -> None:
    for num_layers, p, v in ((4, 2, 1), (9, 4, 1), (7, 3, 1), (8, 2, 2), (9, 2, 2)):
        for embedding, head in ((0, 0), (0.5, 1.5), (0, 3.2), (2, 2), (1, 0)):
            extra = np.zeros(p * v)
            extra[0] += embedding
            extra[-1] += head
            every = itertools.product(range(num_layers + 1), repeat=p * v)
            best = min(max(np.array(n) + extra) for n in every if sum(n) == num_layers)
            found = split(num_layers, p, v, embedding=embedding, head=head)
            assert found.loads.max() == pytest.approx(best)
            assert in_order(found.loads) == pytest.approx(np.array(in_order(found.layers)) + extra)


@pytest.mark.parametrize(("num_layers", "p", "v", "head"), [(30, 4, 1, 1.0), (14, 3, 2, 0.7), (18, 2, 4, 0.0)])
def test_hardly_any_split_is_faster(num_layers: int, p: int, v: int, head: float) -> None:
    """Against every split in which each chunk is within a layer of even, simulated with twice the microbatches."""
    schedule = rounds("", p, 8 * p, v)
    time = lambda loads: neighbours(schedule, Costs.shared(loads, 1, 2, 0)).time
    even = num_layers // (p * v)
    extra = np.zeros(p * v)
    extra[-1] = head
    every = itertools.product((even - 1, even, even + 1), repeat=p * v)
    best = min(time((np.array(n) + extra).reshape(v, p).T) for n in every if sum(n) == num_layers)
    assert time(split(num_layers, p, v, head=head).loads) <= 1.04 * best


def test_what_is_left_over_goes_inside_and_the_ends_get_less_when_they_have_more_to_do() -> None:
    assert in_order(split(30, 4, 1).layers) == [7, 8, 8, 7]
    assert in_order(split(32, 4, 1).layers) == [8, 8, 8, 8]
    assert in_order(split(126, 16, 1, embedding=0.1, head=0.9).layers) == [7, *[8] * 14, 7]
    assert in_order(split(32, 4, 1, head=2.0).layers) == [8, 9, 9, 6]
    assert in_order(split(16, 8, 1, head=4.3).layers)[-1] == 0  # the head alone is more than a share


@pytest.mark.parametrize("head", [0.0, 1.2, 30.0])
def test_as_many_chunks_as_layers_get_one_each(head: float) -> None:
    for p, v in ((2, 1), (4, 1), (2, 2)):
        assert in_order(split(p * v, p, v, embedding=head, head=head).layers) == [1] * p * v


def test_the_user_may_say() -> None:
    assert in_order(split(30, 4, 1, layers=(6, 8, 9, 7)).layers) == [6, 8, 9, 7]
    assert split(10, 2, 2, layers=(1, 2, 3, 4)).layers.tolist() == [[1, 3], [2, 4]]
    assert split(10, 4, 1, head=3, layers=(3, 4, 3, 0)).loads.tolist() == [[3], [4], [3], [3]]


@pytest.mark.parametrize(
    ("arguments", "layers", "words"),
    [
        ((30, 4, 1), (8, 8, 8, 8), "layers (8, 8, 8, 8) sum to 32, but the model has 30: (7, 8, 8, 7) works"),
        ((30, 4, 1), (15, 15), "are 2 numbers, but 4 stages × 1 chunk = 4"),
        ((8, 2, 2), (0, 4, 0, 4), "every chunk but the first and the last needs at least 1"),
        ((8, 2, 1), (9, -1), "needs at least 1"),
        ((32, 8, 5), None, "8 stages × 5 chunks = 40 chunks, but the model has 32 layers: at most 4 chunks a stage"),
        ((6, 8, 1), None, "8 stages × 1 chunk = 8 chunks, but the model has 6 layers: at most 6 stages"),
    ],
)
def test_what_cannot_be_split_is_refused(
    arguments: tuple[int, int, int], layers: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        split(*arguments, layers=layers)
    assert words in str(caught.value)
