"""Bubbles of the pipeline schedules, and what waiting for the neighbours costs: simulated, in seconds.

    python benchmarks/schedules.py [--stages 8] [--microbatches 16 64]

The first table is a page of docs/measurements.md: the bubble for costs F : B : W of 1 : 1 : 1 (nothing rematerialised)
and 1 : 2 : 1 (everything), and the most that a stage holds, in microbatches' worth of it. Beside ours stands 1F1B as
the literature draws it, one operation a tick. The second table has stages that are not alike.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np

from sharded_train.schedule_report.bounds import asynchronous, lockstep
from sharded_train.schedule_report.check import check
from sharded_train.schedules.build import make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours
from sharded_train.schedules.table import NONE, Schedule

COSTS = {"1:1:1": (1.0, 1.0, 1.0), "1:2:1": (1.0, 2.0, 1.0)}
NAMES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zero_bubble", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    print(f"| {args.stages} stages | {' | '.join(columns(args.microbatches))} | in flight | kept |")
    print("|---|" + "---|" * (2 + 2 * len(args.microbatches)))
    for line in bubbles(args.stages, args.microbatches):
        print(line)
    print(
        f"\n| {args.stages} stages, 64 microbatches | spread of the costs | neighbours | lockstep |\n|---|---|---|---|"
    )
    for line in waiting(args.stages, 64):
        print(line)


def columns(microbatches: list[int]) -> list[str]:
    return [f"m = {m}, {name}" for m in microbatches for name in COSTS]


def bubbles(p: int, microbatches: list[int]) -> Iterator[str]:
    """A line for each schedule."""
    rows = [("1F1B, one operation a tick", 1, lambda m, costs: single_operations(p, m))]
    for name, v in NAMES:
        chunks = f", {v} chunks" if v > 1 else ""
        label = "1f1b, gpipe" if name == "1f1b" else name + chunks
        rows.append((label, v, lambda m, costs, name=name, v=v: make(name, p, m, v, costs)))  # type: ignore[misc]
    for label, v, of in rows:
        cells = []
        for m in microbatches:
            for each in COSTS.values():
                costs = Costs.even(p, v, *each)
                schedule = of(m, costs)
                cells.append(f"{neighbours(schedule, costs).bubble:.1%}")
        held = in_flight(schedule).max(1) / v
        yield f"| {label} | {' | '.join(cells)} | {held[0]:.4g} | {held[1]:.4g} |"


def waiting(p: int, m: int) -> Iterator[str]:
    """How much longer than with asynchronous sends a step takes when chunks differ at random, mean of 20 draws."""
    for name, v in NAMES:
        for spread in (0.05, 0.2):
            lost = []
            for seed in range(20):
                shares = np.random.default_rng(seed).uniform(1 - spread, 1 + spread, (p, v)) / v
                costs = Costs.shared(shares, 1, 2, 1)
                schedule = make(name, p, m, v, costs)
                least = asynchronous(schedule, costs)
                lost.append([neighbours(schedule, costs).time / least - 1, lockstep(schedule, costs).time / least - 1])
            cells = " | ".join(f"+{number:.1%}" for number in np.mean(lost, axis=0))
            yield f"| {name}, {v} chunk{'s' * (v > 1)} | ±{spread:.0%} | {cells} |"


def single_operations(p: int, m: int) -> Schedule:
    """1F1B as the literature draws it: every tick of a stage is one forward or one backward."""
    orders = []
    for stage in range(p):
        forwards = iter(range(m))
        order = [("F", next(forwards)) for _ in range(min(m, p - stage))]
        for microbatch in range(m):
            order.append(("B", microbatch))
            order += [("F", later) for later in itertools.islice(forwards, 1)]
        orders.append(order)
    done: set[tuple[str, int, int]] = set()
    rows: list[list[tuple[str, int] | None]] = []
    while any(orders):
        rows.append([o[0] if o and _ready(o[0], stage, p, done) else None for stage, o in enumerate(orders)])
        for stage, operation in enumerate(rows[-1]):
            if operation is not None:
                done.add((*operation, stage))
                orders[stage].pop(0)
    tables = [
        np.array([[op[1] if op is not None and op[0] == kind else NONE for op in row] for row in rows], np.int32)
        for kind in "FB"
    ]
    claimed = np.stack([np.minimum(m, p - np.arange(p)), np.zeros(p, int)])
    schedule = Schedule("1F1B, one operation a tick", p, m, 1, tables[0], tables[1], None, claimed)
    check(schedule)
    return schedule


def _ready(operation: tuple[str, int], stage: int, p: int, done: set[tuple[str, int, int]]) -> bool:
    kind, microbatch = operation
    if kind == "F":
        return stage == 0 or ("F", microbatch, stage - 1) in done
    return stage == p - 1 or ("B", microbatch, stage + 1) in done


if __name__ == "__main__":
    main()
