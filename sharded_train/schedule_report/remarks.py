"""What somebody who chose a schedule should hear: where it costs time or memory that another would not."""

from __future__ import annotations

import numpy as np

from sharded_train.schedules.build import make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours
from sharded_train.schedules.table import Schedule


def count(n: int, what: str) -> str:
    """ "3 stages" or "1 stage", from the plural."""
    one = what.removesuffix("es") if what.endswith("ches") else what.removesuffix("s")
    return f"{n} {one if n == 1 else what}"


def remarks(schedule: Schedule, costs: Costs, one_chunk: Costs | None = None) -> list[str]:
    """Sentences, each with its numbers; none where there is nothing to say.

    `one_chunk` are the costs with one chunk a stage, where layers are split otherwise then.
    """
    p, m, name = schedule.num_stages, schedule.num_microbatches, schedule.name
    one_chunk = one_chunk or costs.whole_stages()
    timing, found = neighbours(schedule, costs), []
    other = neighbours(make("1f1b", p, m), one_chunk).time
    if timing.time > other * (1 + 1e-9):
        found.append(
            f"{name} takes {timing.time:.4g} and 1f1b {other:.4g}: with these costs it is "
            f"{timing.time / other - 1:.1%} slower"
        )
    if m < p:
        better = neighbours(make("1f1b", p, 4 * p), one_chunk).bubble
        found.append(
            f"{count(m, 'microbatches')} on {count(p, 'stages')}: the stages are never all at work, and the bubble is "
            f"{timing.bubble:.0%}; 1f1b with {4 * p} microbatches has {better:.0%}"
        )
    if name == "gpipe" and m > 2 * p - 1:
        found.append(f"gpipe holds {m} microbatches in flight; 1f1b takes no longer, with at most {2 * p - 1}")
    if schedule.weights is not None:
        found += _of_kept(schedule, costs, timing.time)
    return found


def _of_kept(schedule: Schedule, costs: Costs, time: float) -> list[str]:
    """Whether moving the weights' backwards brings anything, against the same schedule without."""
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    plain = make("interleaved" if v > 1 else "1f1b", p, m, v)
    without = neighbours(plain, costs).time
    if time >= without * (1 - 1e-9):
        return [f"{schedule.name} takes {time:.4g}, {plain.name} {without:.4g}: nothing is gained with these costs"]
    if v == 1 and p > 1 and float(np.mean(in_flight(schedule)[1])) > p:
        held = int(in_flight(schedule)[1].max())
        return [
            f"{schedule.name} with 1 chunk a stage keeps inputs and cotangents of all its layers for {held} "
            "microbatches; 2 chunks halve that"
        ]
    return []
