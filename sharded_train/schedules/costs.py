"""What the work of a schedule costs, in any unit of time: the numbers by which schedules are judged."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Time of one microbatch in each chunk, `[stage, chunk]` of float64.

    `backward` is that of the inputs and `weights` that of the weights; a schedule without `weights` does both at
    once. What is rematerialised counts with the backward: 1 : 2 : 1 with full rematerialisation, 1 : 1 : 1 with none.
    """

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray

    @staticmethod
    def shared(shares: np.ndarray, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0) -> Costs:
        """Costs of a whole stage, F, B and W, times what each chunk has of it, `shares[stage, chunk]`."""
        shares = np.asarray(shares, float)
        return Costs(forward * shares, backward * shares, weights * shares)

    @staticmethod
    def even(p: int, v: int, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0) -> Costs:
        """F, B and W of a stage in equal parts to its v chunks."""
        return Costs.shared(np.full((p, v), 1 / v), forward, backward, weights)
