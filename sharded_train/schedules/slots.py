"""Where a stage keeps what waits: buffers of as many slots as are ever in use at once, on the stage that needs most.

Three buffers, each `[slot, ...]` on every stage:

| buffer | one entry | from | until |
|---|---|---|---|
| inputs | the input of a stage's chunk | it arrives (first virtual stage: its forward) | its backward |
| cotangents | the cotangent of a chunk's output | it arrives | its backward |
| kept | what a backward of inputs leaves for the weights | its backward | its `weights` |

All tables are int32 `[tick, stage]`, -1 where there is nothing to write or read. In a tick, writes of what arrives
come first, then the forward reads (or, on the first virtual stage, writes) its input, the backward reads input and
cotangent and writes what is kept, and `weights` reads that. The last virtual stage has no slot for cotangents: its
backward starts from the loss.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from sharded_train.schedules.table import NONE, Schedule, when


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Slots `[tick, stage]` by what is done with them. A buffer of 0 slots is not needed at all."""

    num_inputs: int
    num_cotangents: int
    num_kept: int
    arriving_input: np.ndarray  # write what the stage before sent
    forward_input: np.ndarray  # of the item in `forward`; on the first virtual stage written, else read
    backward_input: np.ndarray  # of the item in `backward`
    arriving_cotangent: np.ndarray  # write what the next stage sent
    backward_cotangent: np.ndarray  # of the item in `backward`
    backward_kept: np.ndarray  # of the item in `backward`: written
    weights_kept: np.ndarray  # of the item in `weights`: read


def slots(schedule: Schedule) -> Slots:
    """The slot tables of a valid schedule, with as few slots as can be."""
    forward, backward = schedule.forward, schedule.backward
    arriving, cotangents = schedule.arriving_inputs(), schedule.arriving_cotangents()
    embedded = np.where(schedule.is_first(forward), forward, NONE)
    used = when(schedule, backward)
    inputs, num_inputs = _colour(np.maximum(when(schedule, embedded), when(schedule, arriving)), used)
    outputs, num_cotangents = _colour(when(schedule, cotangents), used)
    if schedule.weights is None:
        kept, num_kept, weights = np.full_like(used, NONE), 0, np.full_like(forward, NONE)
    else:
        weights = schedule.weights
        kept, num_kept = _colour(used, when(schedule, weights))
    return Slots(
        num_inputs,
        num_cotangents,
        num_kept,
        arriving_input=_looked_up(inputs, arriving),
        forward_input=_looked_up(inputs, forward),
        backward_input=_looked_up(inputs, backward),
        arriving_cotangent=_looked_up(outputs, cotangents),
        backward_cotangent=_looked_up(outputs, backward),
        backward_kept=_looked_up(kept, backward),
        weights_kept=_looked_up(kept, weights),
    )


def _looked_up(slot: np.ndarray, items: np.ndarray) -> np.ndarray:
    """`slot[item, stage]` for each item of a table `[tick, stage]`; -1 stays -1."""
    return np.where(items == NONE, NONE, slot[items, np.arange(items.shape[1])]).astype(np.int32)


def _colour(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """Slots `[item, stage]` for intervals of ticks, both ends included, and how many there are; no start: no slot.

    Going by their starts, each takes the lowest free slot: that needs no more slots than ever overlap.
    """
    found, most = np.full_like(starts, NONE), 0
    for stage in range(starts.shape[1]):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        num = 0
        for item in np.argsort(starts[:, stage], kind="stable").tolist():
            start, end = int(starts[item, stage]), int(ends[item, stage])
            if start == NONE:
                continue
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, num)
                num += 1
            slot = heapq.heappop(free)
            heapq.heappush(busy, (end, slot))
            found[item, stage] = slot
        most = max(most, num)
    return found, most
