"""Proofs about any table: it computes the step, within the memory that it claims, and its slots hold what is read."""

from __future__ import annotations

import numpy as np

from sharded_train.schedules.simulate import in_flight
from sharded_train.schedules.slots import Slots
from sharded_train.schedules.table import NONE, Schedule, when


def check(schedule: Schedule) -> None:
    """Raises ValueError, naming item, stage and ticks, unless

    - every microbatch passes every virtual stage once in each direction (and once in `weights`, where there is one);
    - whatever is used was made before: by the same stage in this tick at the latest, by another in an earlier one;
    - no stage ever holds more items than `claimed`.
    """
    tables = {"forward": schedule.forward, "backward": schedule.backward}
    if schedule.weights is not None:
        tables["weights"] = schedule.weights
    for kind, items in tables.items():
        _once(schedule, kind, items)
    ticks = {kind: _by_virtual_stage(schedule, items) for kind, items in tables.items()}
    forward, backward = ticks["forward"], ticks["backward"]
    _after(schedule, "forward", forward[:, 1:], "forward before it", forward[:, :-1] + 1, first=1)
    _after(schedule, "backward", backward[:, :-1], "backward after it", backward[:, 1:] + 1)
    _after(schedule, "backward", backward, "forward", forward)
    if schedule.weights is not None:
        _after(schedule, "weights", ticks["weights"], "backward", backward)
    held = in_flight(schedule)
    if (held > schedule.claimed).any():
        kind, stage = np.argwhere(held > schedule.claimed)[0]
        what = ("forward to backward", "backward to weights")[kind]
        raise ValueError(
            f"{schedule.name}: stage {stage} holds {held[kind, stage]} items from {what}, "
            f"{schedule.claimed[kind, stage]} are claimed"
        )


def _once(schedule: Schedule, kind: str, items: np.ndarray) -> None:
    shape = (schedule.num_ticks, schedule.num_stages)
    if items.shape != shape or items.dtype != np.int32:
        raise ValueError(f"{schedule.name}: {kind} is {items.dtype}{list(items.shape)}, not int32{list(shape)}")
    if items.size and (items.min() < NONE or items.max() >= schedule.num_items):
        raise ValueError(f"{schedule.name}: {kind} has items outside of -1 to {schedule.num_items - 1}")
    for stage, column in enumerate(items.T):
        count = np.bincount(column[column != NONE], minlength=schedule.num_items)
        for item in np.flatnonzero(count != 1)[:1]:
            name = _name(schedule, item // schedule.num_chunks, item % schedule.num_chunks, stage)
            raise ValueError(f"{schedule.name}: {kind} of {name} is done {count[item]} times, not once")


def _by_virtual_stage(schedule: Schedule, items: np.ndarray) -> np.ndarray:
    """The tick of each item, `[microbatch, virtual stage]`."""
    return when(schedule, items).reshape(schedule.num_microbatches, schedule.num_chunks * schedule.num_stages)


def _after(
    schedule: Schedule, kind: str, ticks: np.ndarray, needed: str, earliest: np.ndarray, *, first: int = 0
) -> None:
    """Each of `ticks [microbatch, virtual stage]`, which begin with virtual stage `first`, is `earliest` or later."""
    for microbatch, virtual in np.argwhere(ticks < earliest)[:1]:
        chunk, stage = divmod(virtual + first, schedule.num_stages)
        raise ValueError(
            f"{schedule.name}: {kind} of {_name(schedule, microbatch, chunk, stage)} is in tick "
            f"{ticks[microbatch, virtual]}; the {needed} allows {earliest[microbatch, virtual]} at the earliest"
        )


def _name(schedule: Schedule, microbatch: int, chunk: int, stage: int) -> str:
    of_chunk = f" chunk {chunk}" if schedule.num_chunks > 1 else ""
    return f"microbatch {microbatch} on stage {stage}{of_chunk}"


def check_slots(schedule: Schedule, slots: Slots) -> None:
    """Raises ValueError unless every read finds what it should in its slot, played as the executor does."""
    first = schedule.is_first(schedule.forward)
    forward, backward = schedule.forward, schedule.backward
    last = schedule.is_last(backward)
    weights = np.full_like(forward, NONE) if schedule.weights is None else schedule.weights
    written = backward if schedule.weights is not None else np.full_like(backward, NONE)
    plans = {
        "inputs": (
            slots.num_inputs,
            [
                ("write", schedule.arriving_inputs(), slots.arriving_input),
                ("write", np.where(first, forward, NONE), np.where(first, slots.forward_input, NONE)),
                ("read", forward, slots.forward_input),
                ("read", backward, slots.backward_input),
            ],
        ),
        "cotangents": (
            slots.num_cotangents,
            [
                ("write", schedule.arriving_cotangents(), slots.arriving_cotangent),
                ("read", np.where(last, NONE, backward), slots.backward_cotangent),
            ],
        ),
        "kept": (slots.num_kept, [("write", written, slots.backward_kept), ("read", weights, slots.weights_kept)]),
    }
    for buffer, (num_slots, accesses) in plans.items():
        _play(schedule, buffer, num_slots, accesses)


def _play(schedule: Schedule, buffer: str, num_slots: int, accesses: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    stages = np.arange(schedule.num_stages)
    held = np.full((num_slots + 1, schedule.num_stages), NONE)  # the last slot, -1, is for items that are none
    for _, items, slot in accesses:
        if ((items == NONE) != (slot == NONE)).any() or slot.max(initial=NONE) >= num_slots:
            raise ValueError(f"{schedule.name}: {buffer} has a slot for no item, or an item without one of {num_slots}")
    for tick in range(schedule.num_ticks):
        for access, items, slot in accesses:
            if access == "write":
                held[slot[tick], stages] = items[tick]
                continue
            for stage in np.flatnonzero(held[slot[tick], stages] != items[tick])[:1]:
                raise ValueError(
                    f"{schedule.name}: in tick {tick} stage {stage} reads item {items[tick, stage]} in slot "
                    f"{slot[tick, stage]} of {buffer}, which holds item {held[slot[tick, stage], stage]}"
                )
