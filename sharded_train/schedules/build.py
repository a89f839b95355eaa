"""The schedules: each is one function from numbers to a table, and a name in `SCHEDULES`.

What they share is the wave. Number the items of a stage in the order of its work, k = 0, 1, ...: then item k goes forward in
tick `s + k`, and item k of the backward order (the same microbatches, chunks in reverse) in tick `b + (p - 1 - s) + k`, so
that everything arrives in the tick in which it is used. `b` is when the last stage goes back for the first time.

A tick with one forward *and* one backward lasts F + B on every stage alike, whatever B / F is. (A table of single operations
makes a stage that goes forward wait for its neighbour that goes back: see docs/pipeline.md.)
"""

from __future__ import annotations

import numpy as np

from sharded_train.schedules.table import NONE, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: every microbatch is in flight at once."""
    return _wave("gpipe", p, m, 1, np.arange(m), m + p - 1)


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward and one backward a tick: GPipe's time, and at most 2 (p - s) - 1 microbatches in flight on stage s."""
    return _wave("1f1b", p, m, 1, np.arange(m), p - 1)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """The same with v chunks a stage, for which the bubble is v times smaller: time (m + (p - 1) / v) (F + B) for m >= p.

    Microbatches go through the chunks in groups, because the first of a group is back at the first stage for its next chunk
    after p ticks. Groups have p microbatches, or a few more where p does not divide m: that costs no time, but
    (g - p)(v - 1) / v more stages' worth in flight. With fewer than p microbatches stages wait for the ring.
    """
    groups = [group for group in np.array_split(np.arange(m), max(1, m // p))]
    order: list[int] = []
    for group in groups:
        idle = [NONE] * (p - len(group))
        for chunk in range(v):
            order += [*(group * v + chunk).tolist(), *idle]
    longest = max(p, max(map(len, groups)))
    return _wave("interleaved", p, m, v, np.array(order), p - 1 + (v - 1) * longest)


def _wave(name: str, p: int, m: int, v: int, order: np.ndarray, first_backward: int) -> Schedule:
    """The table of a wave: `order` are the items in which every stage goes forward, -1 where it waits."""
    back = np.where(order == NONE, NONE, order - 2 * (order % v) + v - 1)  # chunk c -> v - 1 - c
    num_ticks = first_backward + p - 1 + len(order)
    forward = np.full((num_ticks, p), NONE, np.int32)
    backward = np.full((num_ticks, p), NONE, np.int32)
    k = np.arange(len(order))
    for stage in range(p):
        forward[stage + k, stage] = order
        backward[first_backward + p - 1 - stage + k, stage] = back
    used = (forward != NONE).any(1) | (backward != NONE).any(1)
    return Schedule(name, p, m, v, forward[used], backward[used])
