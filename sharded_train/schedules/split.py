"""Layers over the chunks of the stages: any number of them, so that the busiest chunk is as little busy as can be.

Loads are in units of a layer. The first virtual stage also embeds and the last one has the head and the loss; where
these cost something, those two get fewer layers, even none when embedding or head alone is a chunk's worth; but of as
many chunks as layers each gets one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from sharded_train.errors import ConfigError
from sharded_train.schedules.build import rounds
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours

MOST = 32  # ways that are tried


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """`layers [stage, chunk]`: how many each chunk has; `loads [stage, chunk]`: the same with embedding and head."""

    layers: np.ndarray
    loads: np.ndarray

    @property
    def most(self) -> int:
        """Layers of the largest chunk, to which the others are padded."""
        return int(self.layers.max())

    def places(self) -> np.ndarray:
        """`[layer, 3]`: stage, chunk and place in the chunk of each layer of the model."""
        found = np.argwhere(self.indices() >= 0)
        return found[np.argsort(self.indices()[tuple(found.T)])]

    def indices(self) -> np.ndarray:
        """`[stage, chunk, place]`: which layer of the model is there, -1 for padding."""
        first = np.cumsum(self.layers.T).reshape(self.layers.T.shape).T - self.layers
        place = np.arange(self.most)
        return np.where(place < self.layers[..., None], first[..., None] + place, -1)


def split(
    num_layers: int, p: int, v: int, *, embedding: float = 0.0, head: float = 0.0, layers: Sequence[int] | None = None
) -> Split:
    """Splits the layers over p stages of v chunks; `embedding` and `head` cost as much as so many layers.

    `layers` gives the numbers instead, in the order in which the layers run: chunk 0 of all stages, then chunk 1.
    Raises ConfigError when there are more chunks than layers, or when `layers` are not the model's.
    """
    if p * v > num_layers:
        raise ConfigError(_too_many_chunks(num_layers, p, v))
    extra = np.zeros(p * v)
    extra[0] += embedding
    extra[-1] += head
    by_stage = lambda virtual: virtual.reshape(v, p).T
    best = _fastest([Split(by_stage(counts), by_stage(counts + extra)) for counts in _ways(num_layers, extra)])
    if layers is None:
        return best
    _check(layers, num_layers, p, v, best.layers.T.ravel())
    return Split(by_stage(np.array(layers)), by_stage(np.array(layers) + extra))


def _ways(num_layers: int, extra: np.ndarray) -> Iterator[np.ndarray]:
    """Ways to share out layers in which no chunk, with its `extra` load, is busier than the busiest has to be.

    Every chunk has as many layers as that allows; those that are too many are taken off neighbours, one each, the last
    and the first chunk counting as neighbours. Of as many layers as chunks, each has one whatever the loads.
    """
    if num_layers == len(extra):
        yield np.ones(num_layers, int)
        return
    loads = np.unique(np.add.outer(np.arange(num_layers + 1), extra))
    most_of = lambda load: np.maximum(0, np.floor(load - extra + 1e-9)).astype(int)
    counts = next(most_of(load) for load in loads if most_of(load).sum() >= num_layers)
    some = np.flatnonzero(counts > 1)
    for start in range(-1, max(0, len(some) - 1), 1 + len(some) // MOST):
        fewer = np.roll(some, -start)[: counts.sum() - num_layers]
        yield counts - np.isin(np.arange(len(counts)), fewer)


def _fastest(ways: list[Split]) -> Split:
    """Of those within 2 % of the fastest, as simulated, the one with the fewest layers at the ends.

    Who waits for whom tells ways with equally busy busiest chunks apart. The first stage holds the most in flight.
    """
    p, v = ways[0].layers.shape
    schedule = rounds("split", p, 4 * p, v)
    times = [neighbours(schedule, Costs.shared(way.loads, 1, 2, 0)).time for way in ways]
    at_ends = [way.layers[0, 0] + way.layers[-1, -1] for way in ways]
    near = [i for i, time in enumerate(times) if time <= 1.02 * min(times)]
    return ways[min(near, key=lambda i: (at_ends[i], times[i]))]


def _too_many_chunks(num_layers: int, p: int, v: int) -> str:
    most = f"{_count(num_layers // p, 'chunk')} a stage" if num_layers >= p else _count(num_layers, "stage")
    chunks = f"{_count(p, 'stage')} × {_count(v, 'chunk')} = {p * v} chunks"
    return f"{chunks}, but the model has {_count(num_layers, 'layer')}: at most {most}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _check(layers: Sequence[int], num_layers: int, p: int, v: int, nearest: np.ndarray) -> None:
    said = f"({', '.join(map(str, layers))})"
    works = f"({', '.join(map(str, nearest))}) works"
    if len(layers) != p * v:
        wanted = f"{_count(p, 'stage')} × {_count(v, 'chunk')} = {p * v}"
        raise ConfigError(f"layers {said} are {len(layers)} numbers, but {wanted}: {works}")
    if sum(layers) != num_layers:
        raise ConfigError(f"layers {said} sum to {sum(layers)}, but the model has {num_layers}: {works}")
    if min(layers) < 0 or min(layers[1:-1], default=1) < 1:
        raise ConfigError(f"layers {said}: every chunk but the first and the last needs at least 1: {works}")
