"""Bounds on the time of a schedule, and what it sends: `lockstep` lets a stage wait for all others after every tick,
`asynchronous` only for the data that it needs.
"""

from __future__ import annotations

import numpy as np

from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import Timing, in_ticks, work
from sharded_train.schedules.table import NONE, Schedule


def lockstep(schedule: Schedule, costs: Costs) -> Timing:
    """Every stage waits for all stages after every tick."""
    return in_ticks(work(schedule, costs).sum(0), lambda ends: np.full_like(ends, ends.max()))


def asynchronous(schedule: Schedule, costs: Costs) -> float:
    """Time of the step if every stage kept its order of work but waited for data only: no executor can be faster."""
    spent, stage = work(schedule, costs), np.arange(schedule.num_stages)
    inputs, cotangents = (np.zeros((schedule.num_items + 1, schedule.num_stages)) for _ in range(2))  # last: of no item
    arriving = (schedule.arriving_inputs(), schedule.arriving_cotangents())
    free, sent_on, sent_back = (np.zeros(schedule.num_stages) for _ in range(3))
    for tick in range(schedule.num_ticks):
        inputs[arriving[0][tick], stage] = np.roll(sent_on, 1)
        cotangents[arriving[1][tick], stage] = np.roll(sent_back, -1)
        inputs[NONE], cotangents[NONE] = 0.0, 0.0
        free = np.maximum(free, inputs[schedule.forward[tick], stage]) + spent[0, tick]
        sent_on = free
        free = np.maximum(free, cotangents[schedule.backward[tick], stage]) + spent[1, tick]
        sent_back = free
        free = free + spent[2, tick]
    return float(free.max())


def useful_sends(schedule: Schedule) -> int:
    """How many of the 2 x ticks x stages sends of a step carry something that is used: 2 m (p v - 1)."""
    return int((schedule.arriving_inputs() != NONE).sum() + (schedule.arriving_cotangents() != NONE).sum())
