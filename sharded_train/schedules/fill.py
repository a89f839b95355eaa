"""Zero bubble: the backward of the weights waits for time in which its stage would have nothing to do."""

from __future__ import annotations

import dataclasses

import numpy as np

from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours, work
from sharded_train.schedules.table import NONE, Schedule


def filled(schedule: Schedule, costs: Costs) -> Schedule:
    """A schedule's backwards without the weights, which go into idle time, at most one a tick; the rest at the end.

    A stage holds at most 2 p - 1 items from backward to weights. Where a W is longer than the idle time of a tick,
    letting the tick last longer can still pay: each such length is tried, and every W right after its backward too.
    The table that takes the least time is taken.
    """
    p, num_items = schedule.num_stages, schedule.num_items
    claimed = np.stack([schedule.claimed[0], np.full(p, min(num_items, 2 * p - 1))])
    split = dataclasses.replace(schedule, weights=np.full_like(schedule.backward, NONE), claimed=claimed)
    longer = {
        max(0.0, float((costs.weights - other).max())) for other in (costs.forward, costs.backward, costs.weights)
    }
    at_once = dataclasses.replace(split, weights=schedule.backward)
    tables = [at_once, *(_fill(split, costs, over) for over in sorted(longer))]
    return min(tables, key=lambda table: round(neighbours(table, costs).time, 9))


def _fill(schedule: Schedule, costs: Costs, over: float) -> Schedule:
    """The schedule with its `weights`, and ticks added at the end for those that are left.

    In a tick a stage does a W if it then lasts at most `over` longer than without; and all stages that can do one where
    none would be idle by it, because each has one waiting or has done its last, or where one has too many waiting.
    """
    p, num_items = schedule.num_stages, schedule.num_items
    stage = np.arange(p)
    order = np.stack([column[column != NONE] for column in schedule.backward.T])  # [stage, items]: first in, first out
    cost = costs.weights[stage[:, None], schedule.chunk(order)]
    spent = work(schedule, costs).sum(0)
    going, done = np.zeros(p, int), np.zeros(p, int)
    rows: list[np.ndarray] = []
    while (done < num_items).any():
        tick = len(rows)
        used = spent[tick] if tick < len(spent) else np.zeros(p)
        going += schedule.backward[tick] != NONE if tick < len(spent) else 0
        waiting = going > done
        following = np.minimum(done, num_items - 1)
        fits = used + cost[stage, following] <= used.max() + over + 1e-9
        if ((waiting & ~fits) | (done == num_items)).all() or (going - done >= 2 * p - 1).any():
            fits = np.ones(p, bool)
        doing = waiting & fits
        rows.append(np.where(doing, order[stage, following], NONE))
        done += doing
    rest = np.full((len(rows) - len(spent), p), NONE, np.int32)
    return dataclasses.replace(
        schedule,
        forward=np.concatenate([schedule.forward, rest]),
        backward=np.concatenate([schedule.backward, rest]),
        weights=np.stack(rows).astype(np.int32),
    )
