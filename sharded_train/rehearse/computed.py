"""What is computed? FLOPs of one step on one device by kind, and why they are more than the model needs.

Counted from the compiled program, loops resolved; how one instruction counts stands in `rehearse.products`. The model's
own FLOPs are those of `flops` over the number of devices. What the program does beyond is told by name:

    compiled products = model + rematerialised + scores again + hidden pairs + tiles + optimizer + not explained

where the last is zero when nothing is missed; it holds work that tensor ranks do twice (a kv head that several of them
need), padding, and a product that XLA merged with its own recomputation (the last layer's under remat "full", whose
backward pass follows at once). Tiles are attention by XLA on pairs that a mask hides; see `_by_xla`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from sharded_train.flops import CONVENTION, Flops
from sharded_train.rehearse.hlo import Module, bits_of
from sharded_train.rehearse.hlo_walk import Run, walk
from sharded_train.rehearse.pace import Pace
from sharded_train.rehearse.products import Product, Work, format_of, work_of
from sharded_train.rehearse.scopes import phase_of, words_of
from sharded_train.tables import flops_in_words, new_table

ATTENTION_WORDS = (
    "Attention by cuDNN: 2 products forward, 5 backward (the first computes the scores again). A causal mask that the "
    "kernel knows counts once; one that comes as a bias does not spare it the hidden pairs. A row counts as one "
    "document: of several the kernel computes less, which the program does not tell."
)
REMATERIALISED = "rematerialised by the checkpoint policy"
AGAIN = "scores computed again in attention's backward pass"
HIDDEN = "pairs of query and key that the causal mask hides, computed all the same"
TILES = "hidden pairs in the tiles of XLA's attention"
OPTIMIZER = "the optimizer's own, beside the model"
REST = "not explained"


@dataclasses.dataclass(frozen=True)
class Counted:
    """One instruction that runs, what it computes each time, and how often a step, on the mean device."""

    run: Run
    work: Work
    times: Fraction


def describe(
    module: Module, model: Flops | None, compute_dtype: str | None, pace: Pace | None = None
) -> dict[str, Any]:
    """The section as JSON values. All FLOPs are one device's in one step; `compute_dtype` is HLO's name ("bf16").

    Of a function that is no model of ours neither is known (None): then nothing is explained by the model's FLOPs.
    With the pace of a pipeline they are the mean device's, the branches of its conditionals counting as often as taken.
    """
    shares = {} if pace is None else pace.shares()
    counted, decided = one_branch_each(weighted(count(module), shares))
    products = [(product, each) for each in counted for product in each.work.products]
    kinds: defaultdict[str, Fraction] = defaultdict(Fraction)
    for product, each in products:
        kinds[product.kind] += product.flops * each.times
    return {
        "by_kind": {kind: round(kinds[kind]) for kind in sorted(kinds, key=lambda kind: -kinds[kind])},
        "products": round(sum(kinds.values())),
        "other": round(sum(each.work.other_flops * each.times for each in counted)),
        "model": model and model.total // module.num_devices,
        "explained": _explained(products, model, module.num_devices) if model else {},
        "by_part": _by_part(products),
        "fallbacks": _fallbacks(products, compute_dtype),
        "unknown": _unknown(counted),
        "conditionals": decided,
        "unknown_trips": sorted({loop.name for each in counted for loop in each.run.loops if loop.trips is None}),
        "convention": f"{ATTENTION_WORDS} {CONVENTION[0].upper()}{CONVENTION[1:]}.",
    }


def count(module: Module) -> list[Counted]:
    """Everything that runs with its work, all branches of conditionals."""
    entered = ("call", "async-start", "call-start")  # walk goes into them
    return [
        Counted(run, work_of(module, run.computation, run.instruction), Fraction(run.times))
        for run in walk(module)
        if run.instruction.opcode not in entered
    ]


def weighted(counted: Sequence[Counted], shares: Mapping[tuple[str, int], Fraction]) -> list[Counted]:
    """Each as often as the branches that it stands in are taken; `shares` are by conditional and branch."""

    def share(each: Counted) -> Fraction:
        return math.prod(
            (shares.get((b.conditional, b.index), Fraction(1)) for b in each.run.branches), start=Fraction(1)
        )

    known = {name for name, _ in shares}
    return [
        dataclasses.replace(
            each,
            run=dataclasses.replace(
                each.run, branches=tuple(branch for branch in each.run.branches if branch.conditional not in known)
            ),
            times=each.times * share(each),
        )
        for each in counted
    ]


def one_branch_each(counted: Sequence[Counted]) -> tuple[list[Counted], list[dict[str, Any]]]:
    """Of each conditional the branch with the most FLOPs, as though it was taken every time; and which those are."""
    flops: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    counts: dict[str, int] = {}
    for each in counted:
        for branch in each.run.branches:
            counts[branch.conditional] = branch.count
            total = sum(product.flops for product in each.work.products) + each.work.other_flops
            flops[branch.conditional, branch.index] += total * each.times
    chosen = {name: max(range(n), key=lambda i: flops[name, i]) for name, n in counts.items()}
    kept = [each for each in counted if all(chosen[branch.conditional] == branch.index for branch in each.run.branches)]
    decided = [
        {
            "name": name,
            "branches": counts[name],
            "taken": index,
            "flops": [round(flops[name, i]) for i in range(counts[name])],
        }
        for name, index in chosen.items()
        if any(flops[name, i] for i in range(counts[name]))
    ]
    return kept, decided


Counts = Sequence[tuple[Product, Counted]]


def _explained(products: Counts, model: Flops, num_devices: int) -> dict[str, int]:
    """Compiled products as a sum."""
    parts: dict[str, Fraction] = {"the model, by its convention": Fraction(model.total // num_devices)}
    parts |= dict.fromkeys((REMATERIALISED, AGAIN, HIDDEN, TILES, OPTIMIZER), Fraction(0))
    total = Fraction(0)
    for product, each in products:
        total += product.flops * each.times
        if product.optimizer:
            parts[OPTIMIZER] += product.flops * each.times
        elif product.rematerialised:
            parts[REMATERIALISED] += product.flops * each.times
        else:
            parts[AGAIN] += product.again * each.times
            parts[HIDDEN] += product.hidden * each.times
    again, tiles = _by_xla(products, Fraction(model.by_kind.get("attention scores", 0), num_devices))
    parts[AGAIN] += again
    parts[TILES] += tiles
    whole = {what: round(flops) for what, flops in parts.items()}
    return {**whole, REST: round(total) - sum(whole.values())}


def _by_xla(products: Counts, model: Fraction) -> tuple[Fraction, Fraction]:
    """Attention by XLA: FLOPs of scores computed again, and of pairs that a mask hides; `model` are attention's needed.

    A tile has 2 products forward, and backward 4 of the same size, or 5 where the scores are computed again (XLA drops
    that one where it still has them). So what is beyond thrice the forward's are scores, and what is beyond the model
    within them are hidden pairs. Both are bounded: what else there may be stays unexplained.
    """
    forward = backward = known = Fraction(0)
    for product, each in products:
        if not product.attention or product.rematerialised:
            continue
        first = phase_of(product.scope) == "forward"
        if product.by == "cuDNN":
            known += 3 * (product.flops - product.hidden) * each.times if first else 0
        elif first:
            forward += product.flops * each.times
        else:
            backward += product.flops * each.times
    if not forward:
        return Fraction(0), Fraction(0)
    again = min(max(backward - 2 * forward, Fraction(0)), forward / 2)
    return again, max(3 * forward - max(model - known, Fraction(0)), Fraction(0))


def _by_part(products: Counts) -> list[dict[str, Any]]:
    """FLOPs by part of the model and pass, in program order."""
    parts: dict[str, dict[str, Any]] = {}
    for product, each in products:
        name = "optimizer" if product.optimizer else words_of(product.scope)
        row = parts.setdefault(name, {"part": name, "kinds": {}, "flops": Fraction(0), "runs": Fraction(0)})
        row["kinds"][product.kind] = row["kinds"].get(product.kind, Fraction(0)) + product.flops * each.times
        row["flops"] += product.flops * each.times
        row["runs"] += each.times
    return [_rounded({**row, "kinds": _rounded(row["kinds"])}) for row in parts.values()]


def _fallbacks(products: Counts, compute_dtype: str | None) -> list[dict[str, Any]]:
    """Products in a wider type than their factors came in, or than the recipe computes in; alike ones together.

    Not the optimizer's, whose type is a setting of its own.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for product, each in products:
        asked = min(product.from_dtype, compute_dtype or product.from_dtype, key=bits_of)
        if product.optimizer or bits_of(product.dtype) <= bits_of(asked):
            continue
        shapes = " · ".join(map(str, product.factors))
        told = {"part": words_of(product.scope), "shapes": shapes, "kind": product.kind, "asked": format_of(asked)}
        row = found.setdefault(tuple(told.values()), {**told, "name": product.name, "runs": 0, "flops": 0})
        row["runs"] += each.times
        row["flops"] += product.flops * each.times
    return [_rounded(row) for row in sorted(found.values(), key=lambda row: -row["flops"])]


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that may be those of a mean device, as whole ones."""
    return {key: round(value) if isinstance(value, Fraction) else value for key, value in row.items()}


def _unknown(counted: Sequence[Counted]) -> dict[str, int]:
    """What is not understood, and how often it runs."""
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for each in counted:
        for what in each.work.unknown:
            found[what] += each.times
    return _rounded(found)


def tables(section: Mapping[str, Any]) -> list[Any]:
    """The section for a terminal."""
    return list(_tables(section))


def _tables(section: Mapping[str, Any]) -> Iterator[Any]:
    total = section["products"]
    kinds = new_table("FLOPs a step on one device", "amount", "share", right=["amount", "share"])
    for kind, flops in section["by_kind"].items():
        kinds.add_row(kind, flops_in_words(flops), _share(flops, total))
    kinds.add_row("all products", flops_in_words(total), "", style="bold", end_section=True)
    kinds.add_row("everything else, one an element", flops_in_words(section["other"]), "")
    yield kinds
    if section["explained"]:
        why = new_table("why so many", "amount", "of the model's", right=["amount", "of the model's"])
        for what, flops in section["explained"].items():
            if flops:
                why.add_row(what, flops_in_words(flops), _share(flops, section["model"]))
        yield why
        yield section["convention"]
    if section["fallbacks"]:
        wide = new_table("computed in", "asked for", "where", "factors", "runs", "amount", right=["runs", "amount"])
        for row in section["fallbacks"]:
            wide.add_row(
                row["kind"], row["asked"], row["part"], row["shapes"], f"{row['runs']:,}", flops_in_words(row["flops"])
            )
        yield "Products in a wider type than asked for:"
        yield wide
    yield from remarks(section)


def remarks(section: Mapping[str, Any]) -> list[str]:
    """What to know about the numbers, in sentences."""
    found = [f"Not understood, so not counted: {what}, {n:,} times a step." for what, n in section["unknown"].items()]
    if (rest := section["explained"].get(REST, 0)) < 0:
        found.append(
            f"The program computes {flops_in_words(-rest)} less than the model's FLOPs: attention in a window, which "
            "the convention counts as though it saw all, or something that is not counted here."
        )
    if hidden := section["explained"].get(HIDDEN):
        found.append(
            "The mask of documents comes to attention's kernel as a bias, from which it cannot tell that the pairs "
            "above the diagonal are hidden, so it computes them too: "
            f"{_share(hidden, section['products'])} of the products."
        )
    if tiles := section["explained"].get(TILES):
        found.append(
            "Attention by XLA works in tiles, and those on the diagonal hold pairs that are hidden: "
            f"{_share(tiles, section['products'])} of the products."
        )
    if loops := section["unknown_trips"]:
        found.append(f"Counted once, since the program does not tell how often they run: {', '.join(loops)}.")
    if n := len(section["conditionals"]):
        these = f"{n} conditionals" if n > 1 else "a conditional"
        found.append(f"Of {these} the branch with the most FLOPs is counted, every time.")
    return found


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
