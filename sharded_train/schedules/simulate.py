"""How long a schedule takes and what it holds: found by playing its table with real costs, never by counting ticks.

A tick ends in a send to each neighbour in the ring, so a stage begins its next tick when it *and its neighbours* have
ended this one. `schedule_report.bounds` has the bounds on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from sharded_train.schedules.costs import Costs
from sharded_train.schedules.table import NONE, Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """When every stage begins and ends its work of every tick, `[tick, stage]`; times in the unit of the costs."""

    begins: np.ndarray
    ends: np.ndarray

    @property
    def time(self) -> float:
        """Of the whole step."""
        return float(self.ends.max())

    @property
    def bubble(self) -> float:
        """The part of all stages' time that is not work."""
        return float(1 - (self.ends - self.begins).sum() / (self.ends.shape[1] * self.time))


def work(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Time `[kind, tick, stage]` of the forwards, backwards and weights of each tick."""
    if schedule.weights is None:
        parts = [(schedule.forward, costs.forward), (schedule.backward, costs.together)]
    else:
        weights = (schedule.weights, costs.weights)
        parts = [(schedule.forward, costs.forward), (schedule.backward, costs.backward), weights]
    stage = np.arange(schedule.num_stages)
    spent = [np.where(items == NONE, 0.0, cost[stage, schedule.chunk(items)]) for items, cost in parts]
    return np.stack(spent if len(spent) == 3 else [*spent, np.zeros_like(spent[0])])


def neighbours(schedule: Schedule, costs: Costs) -> Timing:
    """The step as the executor runs it. With one chunk nothing goes round the ring's end, so nobody waits there."""
    ring = schedule.num_chunks > 1

    def wait(ends: np.ndarray) -> np.ndarray:
        before, after = np.roll(ends, 1), np.roll(ends, -1)
        if not ring:
            before[0], after[-1] = ends[0], ends[-1]
        return np.maximum(ends, np.maximum(before, after))

    return in_ticks(work(schedule, costs).sum(0), wait)


def in_ticks(spent: np.ndarray, wait: Callable[[np.ndarray], np.ndarray]) -> Timing:
    """Of times `[tick, stage]`, when `wait` makes of every stage's end the time at which its next tick may begin."""
    begins, ends = np.zeros_like(spent), np.zeros_like(spent)
    at = np.zeros(spent.shape[1])
    for tick, cost in enumerate(spent):
        begins[tick] = at
        ends[tick] = at + cost
        at = wait(ends[tick])
    return Timing(begins, ends)


def in_flight(schedule: Schedule) -> np.ndarray:
    """The most items that each stage holds from forward to backward, and from backward to weights: `[2, stage]`.

    Divided by the chunks: in whole stages' worth of a microbatch.
    """
    going = _most_between(schedule.forward, schedule.backward)
    kept = np.zeros_like(going) if schedule.weights is None else _most_between(schedule.backward, schedule.weights)
    return np.stack([going, kept])


def _most_between(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Both ends count: what begins and ends in the same tick is held in it."""
    begun, ended = np.cumsum(first != NONE, axis=0), np.cumsum(last != NONE, axis=0)
    return (begun - ended + (last != NONE)).max(0)
