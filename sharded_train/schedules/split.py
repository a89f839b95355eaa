"""Layers over the chunks of the stages: any number of them, so that the busiest chunk is as little busy as can be.

Loads are in units of a layer. The first virtual stage also embeds and the last one has the head and the loss; where
these cost something, those two get fewer layers, even none when embedding or head alone is a chunk's worth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sharded_train.errors import ConfigError


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
    extra = np.zeros(p * v)
    extra[0] += embedding
    extra[-1] += head
    if p * v > num_layers:
        raise ConfigError(_too_many_chunks(num_layers, p, v))
    counts = _balanced(num_layers, p, extra)
    if layers is not None:
        _check(layers, num_layers, p, v, counts)
        counts = np.array(layers)
    by_stage = lambda virtual: virtual.reshape(v, p).T
    return Split(by_stage(counts), by_stage(counts + extra))


def _balanced(num_layers: int, p: int, extra: np.ndarray) -> np.ndarray:
    """Layer after layer to the chunk that is least busy with it; among equals to one inside, on the least busy stage.

    As all layers cost the same, no other way has a less busy busiest chunk.
    """
    num = len(extra)
    counts, virtual = np.zeros(num, int), np.arange(num)
    at_end = (virtual == 0) | (virtual == num - 1)
    for _ in range(num_layers):
        loads = extra + counts
        of_stage = loads.reshape(-1, p).sum(0)[virtual % p]
        counts[np.lexsort((virtual, of_stage, at_end, loads))[0]] += 1
    return counts


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
