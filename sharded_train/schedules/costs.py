"""What the work of a schedule costs, in any unit of time: the numbers by which schedules are judged."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Time of one microbatch in each chunk, `[stage, chunk]` of float64.

    `backward` is that of the inputs and `weights` that of the weights, where a schedule does them apart; `together` is
    the time of both in one go. That can be less than their sum, as when both recompute the forward. What is
    rematerialised counts with the backward: F : B : W is 1 : 1 : 1 with nothing and 1 : 2 : 1 with all of it.
    """

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray
    together: np.ndarray

    @staticmethod
    def shared(
        shares: np.ndarray,
        forward: float = 1.0,
        backward: float = 1.0,
        weights: float = 1.0,
        together: float | None = None,
    ) -> Costs:
        """Costs of a whole stage (`together`: B + W by default) times the share of each chunk, `[stage, chunk]`."""
        shares = np.asarray(shares, float)
        both = backward + weights if together is None else together
        return Costs(forward * shares, backward * shares, weights * shares, both * shares)

    @staticmethod
    def even(
        p: int, v: int, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0, together: float | None = None
    ) -> Costs:
        """Costs of a whole stage in equal parts to its v chunks."""
        return Costs.shared(np.full((p, v), 1 / v), forward, backward, weights, together)

    def whole_stages(self) -> Costs:
        """The same work with one chunk a stage."""
        return Costs(*(vars(self)[field.name].sum(1, keepdims=True) for field in dataclasses.fields(self)))
