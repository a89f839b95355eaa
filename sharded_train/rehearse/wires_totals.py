"""Sums over the collectives of a step, and what to warn of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sharded_train.tables import bytes_in_words

if TYPE_CHECKING:
    from sharded_train.rehearse.wires import Collective, Unknown

MUCH = 2**20  # bytes on the wire of a device in a step, under which nothing is warned of


def totals(found: Iterable[Collective]) -> list[dict[str, Any]]:
    """Per axes, link, operation and dtype: runs and bytes on the wire a step, and the part of them that spans products.

    `certain` is False where a branch or a loop of unknown length makes the numbers a bound.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in found:
        for dtype in sorted({member.dtype for member in each.members}):
            share = sum(member.bytes for member in each.members if member.dtype == dtype) / each.payload_bytes
            key = {"axes": list(each.axes), "link": each.link, "op": each.op, "dtype": dtype}
            start = {**key, "runs": 0, "wire_bytes": 0.0, "spanning_bytes": 0.0, "certain": True}
            row = rows.setdefault((each.axes, each.link, each.op, dtype), start)
            row["runs"] += each.times
            row["wire_bytes"] += share * each.wire_bytes * each.times
            row["spanning_bytes"] += share * each.wire_bytes * each.times * bool(each.spans)
            row["certain"] &= each.certain
    for row in rows.values():
        row["runs"] = as_number(row["runs"])
    return sorted(rows.values(), key=lambda row: (row["link"], row["axes"], -row["wire_bytes"]))


def warnings(found: Sequence[Collective], unknown: Sequence[Unknown], host_size: int) -> list[str]:
    """What is wrong with the collectives, in sentences; `host_size` is how many devices one host has."""
    said = [
        *_about(found, _crosses_often, lambda those: _often(those)),
        *_about(found, _gathers_fp32, lambda those: _wide(those)),
        *_about(found, lambda each: each.link == "both" and each.group_size <= host_size, lambda those: _mixed(those)),
    ]
    if unknown:
        names = ", ".join(sorted({f"{each.opcode} ({each.why})" for each in unknown}))
        said.append(f"Not understood, and in no sum: {len(unknown)} operations: {names}.")
    if unsure := [each for each in found if not each.certain]:
        said.append(
            f"How often they run is not certain for {len(unsure)} collectives: those in a conditional count as though "
            "every branch ran, those in a loop of unknown length as though it turned once."
        )
    said += [f"{each.op} {each.name}: {each.note}." for each in found if each.note]
    return said


def _about(
    found: Sequence[Collective], wrong: Callable[[Collective], bool], words: Callable[[list[Collective]], str]
) -> list[str]:
    """One sentence for all collectives of an operation over the same axes that something is wrong with."""
    kinds: dict[tuple[Any, ...], list[Collective]] = {}
    for each in found:
        if wrong(each):
            kinds.setdefault((each.op, each.axes), []).append(each)
    return [words(those) for those in kinds.values() if sum(map(_bytes, those)) >= MUCH]


def as_number(times: int | Fraction) -> int | float:
    """For JSON: how often, which on the mean device need not be whole."""
    return int(times) if times == int(times) else float(times)


def number_in_words(times: float | Fraction) -> str:
    """12 -> "12", 1234.56 -> "1,234.6"."""
    return f"{float(times):,.1f}".removesuffix(".0")


def _bytes(each: Collective) -> float:
    return each.wire_bytes * each.times


def _crosses_often(each: Collective) -> bool:
    """Between hosts in every layer; weights and gradients in those of every microbatch, for once a step they must."""
    turns = [turn for turn, _ in each.loops]
    once = turns == ["layer"] and {"data", "replica"}.issuperset(each.axes)
    return each.link in ("network", "both") and "layer" in turns and not once


def _gathers_fp32(each: Collective) -> bool:
    return each.op == "all-gather" and any(member.dtype == "f32" for member in each.members)


def _sum(those: Sequence[Collective]) -> str:
    first = those[0]
    runs, total = sum(each.times for each in those), bytes_in_words(round(sum(map(_bytes, those))))
    return f"{first.op} over {axes_in_words(first.axes)}: {number_in_words(runs)} runs a step, {total} from each device"


def _often(those: Sequence[Collective]) -> str:
    axes, links = those[0].axes, {each.link for each in those}
    if "tensor" in axes:
        advice = "tensor belongs inside a host: put it last in mesh.order or make it smaller"
    elif "data" in axes:
        advice = "a lower zero.stage moves less, fewer microbatches move it less often"
        advice += ", a zero.group_size that fits a host keeps it there" if "both" in links else ""
    else:
        advice = "an axis that is needed in every layer is best off inside a host: see mesh.order"
    return f"Crosses hosts in every layer: {_sum(those)}; {advice}."


def _wide(those: Sequence[Collective]) -> str:
    return f"Gathers fp32, where the compute dtype would halve it: {_sum(those)}."


def _mixed(those: Sequence[Collective]) -> str:
    first = those[0]
    return (
        f"Mixes NVLink and network needlessly: {_sum(those)}; groups of {first.group_size} have {first.per_host} "
        "devices on a host and would fit on one: see mesh.order."
    )


def axes_in_words(axes: Sequence[str]) -> str:
    """("data", "tensor") -> "data x tensor"."""
    return " x ".join(axes) or "no axis"
