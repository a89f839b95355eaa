"""The schedules: each is one function from numbers to a table, and a name in `SCHEDULES`.

What they share is the wave. Number the items of a stage in the order of its work, k = 0, 1, ...: then item k goes
forward in tick `s + k`, and item k of the backward order (the same microbatches, chunks in reverse) in tick `b + (p -
1 - s) + k`, so that everything arrives just when it is used. `b` is the tick in which the last stage goes back for
the first time.

A tick with one forward *and* one backward lasts F + B on every stage alike, whatever B / F is. (A table of single
operations makes a stage that goes forward wait for its neighbour that goes back: see docs/pipeline.md.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sharded_train.errors import ConfigError, did_you_mean
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.fill import filled
from sharded_train.schedules.table import NONE, Schedule


def gpipe(p: int, m: int, v: int, costs: Costs) -> Schedule:
    """All forwards, then all backwards: time (m + p - 1)(F + B + W), and every microbatch in flight at once."""
    _one_chunk("gpipe", v)
    return _wave("gpipe", p, m, 1, np.arange(m), m + p - 1)


def one_f_one_b(p: int, m: int, v: int, costs: Costs) -> Schedule:
    """One forward and one backward a tick: GPipe's time, at most 2 (p - s) - 1 microbatches in flight on stage s."""
    _one_chunk("1f1b", v)
    return _wave("1f1b", p, m, 1, np.arange(m), p - 1)


def interleaved(p: int, m: int, v: int, costs: Costs) -> Schedule:
    """1F1B with v chunks a stage, for a bubble v times smaller: (m + (p - 1) / v)(F + B + W) for m >= p.

    In flight on stage s: p + (p - 1 - 2 s) / v stages' worth where p divides m. References: Narayanan et al. 2021,
    "Efficient large-scale language model training on GPU clusters".
    """
    if v == 1:
        raise ConfigError("interleaved with 1 chunk a stage is 1f1b: give it 2 chunks or more, or choose 1f1b")
    return rounds("interleaved", p, m, v)


def zero_bubble(p: int, m: int, v: int, costs: Costs) -> Schedule:
    """Backwards of the weights fill idle time: m (F + B + W) + ((p - 1) / v)(F + B - W) for m >= 2 p - 1, W <= F, B.

    Costs decide where they go. What the backward leaves for them, every layer's inputs and cotangents, is held for at
    most 2 p - 1 items. References: Qi et al. 2023, "Zero bubble pipeline parallelism".
    """
    return filled(rounds("zero_bubble", p, m, v), costs)


SCHEDULES: dict[str, Callable[[int, int, int, Costs], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def default_chunks(name: str) -> int:
    """How many chunks a stage has where nobody says."""
    return 2 if name in ("interleaved", "zero_bubble") else 1


def make(name: str, p: int, m: int, v: int = 1, costs: Costs | None = None) -> Schedule:
    """The schedule of that name for p stages, m microbatches and v chunks a stage; ConfigError where there is none."""
    if name not in SCHEDULES:
        hint = did_you_mean(name.lower(), SCHEDULES)
        raise ConfigError(f"schedule {name}: there are {', '.join(SCHEDULES)}{hint}")
    for what, number in (("stages", p), ("microbatches", m), ("chunks a stage", v)):
        if number < 1:
            raise ConfigError(f"{name}: {number} {what}; it needs at least 1")
    return SCHEDULES[name](p, m, v, costs or Costs.even(p, v))


def _one_chunk(name: str, v: int) -> None:
    if v != 1:
        raise ConfigError(
            f"{name} has 1 chunk a stage, not {v}: choose interleaved or zero_bubble, or leave the chunks at 1"
        )


def rounds(name: str, p: int, m: int, v: int) -> Schedule:
    """Microbatches go through all chunks in groups, because a microbatch is back at the first stage after p ticks.

    Groups have p microbatches, or g, a few more, where p does not divide m: that costs no time, but
    (g - p)(v - 1) / v more stages' worth in flight. With fewer than p microbatches the stages wait for the ring.
    """
    groups = np.array_split(np.arange(m), max(1, m // p))
    longest = max(p, len(groups[0]))
    order: list[int] = []
    for group in groups:
        for chunk in range(v):
            order += [*(group * v + chunk).tolist(), *[NONE] * (p - len(group))]
    return _wave(name, p, m, v, np.array(order), p - 1 + (v - 1) * longest)


def _wave(name: str, p: int, m: int, v: int, order: np.ndarray, b: int) -> Schedule:
    """The table of a wave: `order` are the items in which every stage goes forward, -1 where it waits."""
    back = np.where(order == NONE, NONE, order - 2 * (order % v) + v - 1)  # chunk c -> v - 1 - c
    forward, backward = (np.full((b + p - 1 + len(order), p), NONE, np.int32) for _ in range(2))
    k, stage = np.arange(len(order))[:, None], np.arange(p)
    forward[stage + k, stage] = order[:, None]
    backward[b + p - 1 - stage + k, stage] = back[:, None]
    used = (forward != NONE).any(1) | (backward != NONE).any(1)
    in_flight = np.minimum(m * v, b + p - 2 * stage)
    claimed = np.stack([in_flight, np.zeros_like(in_flight)])
    return Schedule(name, p, m, v, forward[used], backward[used], None, claimed)
