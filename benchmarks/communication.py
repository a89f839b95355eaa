"""Bytes that one train step puts on the wires, by ZeRO's formulae and in the compiled program, side by side.

    python benchmarks/communication.py [--config FILE] [--cluster h100:8x8] [--runs 0 1 2 3 1:4 3:4] [--json OUT]
        [--config.key=value ...]

Nothing runs: the step is compiled for the cluster (the CUDA plugin of jax's version is needed, a GPU is not) and its
collectives are read. A run is a ZeRO stage, with a group size after a colon. All bytes are what each device sends in a
step, as nccl-tests counts them: B bytes of the whole array among n devices make B (n - 1) / n, twice that for an
all-reduce. With psi the parameters of one tensor rank, m microbatches, L layers, A the activations `[rows, seq, embed]`
of one microbatch:

    weights gathered       psi (stages 1, 2), m (2 psi_layers + psi_outer) (stage 3)
    gradients scattered    psi (stage 1), m psi (stages 2, 3); then psi / n summed between groups, where there are some
    gradients summed       psi (stage 0); what ZeRO cannot split; over tensor those of weights that are whole over it
    activations            m (4 L + 2) A gathered over tensor and as much scattered
    loss                   m 3 tokens summed over tensor: maxima, exponentials and the logit of the target

A difference that has a known reason has it below the table, if that gives it to the byte; sums of single numbers
(counts of tokens, norms) are left out of theory and listed by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sharded_train import launch, params
from sharded_train.recipe import load
from sharded_train.rehearse import clusters, hlo
from sharded_train.rehearse.compile import Compiled, compile_for
from sharded_train.rehearse.wires import FACTORS, Collective, collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.sharding import Placement, is_placement
from sharded_train.tables import new_table

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "benchmarks" / "communication_config.py"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What moves over which axes, by which operation and in which dtype."""

    what: str
    op: str
    over: str
    dtype: str


@dataclasses.dataclass
class Row:
    """Bytes that each device sends of one kind: by formula, in the program, and the reasons of the difference.

    `reasons` are (words, bytes) that may explain it, alone or together.
    """

    formula: str = ""
    theory: float = 0
    compiled: float = 0
    reasons: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    @property
    def because(self) -> list[str]:
        """The fewest reasons that together give the difference to the byte; if no three do, that."""
        difference = self.compiled - self.theory
        for count in range(4):
            for chosen in itertools.combinations(self.reasons, count):
                if math.isclose(sum(sent for _, sent in chosen), difference, rel_tol=1e-12, abs_tol=1e-3):
                    return [words for words, _ in chosen]
        return ["NOT EXPLAINED"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its entries on a device while it is multiplied with, and what splits them."""

    name: str
    size: int
    stacked: bool  # one in each layer
    zero_split: bool
    tensor_whole: bool


def leaves_of(compiled: Compiled) -> list[Leaf]:
    """The program's parameters."""
    plan = compiled.program.plan
    return [
        _leaf(name, placement, plan.sizes) for name, placement in params.named_leaves(plan.placements, is_placement)
    ]


def _leaf(name: str, placement: Placement, sizes: Mapping[str, int]) -> Leaf:
    axes = [axis for dim in placement.gathered for axis in ([dim] if isinstance(dim, str) else dim or ())]
    size = placement.spec.size // math.prod(sizes[axis] for axis in axes)
    whole = "tensor" not in axes and sizes["tensor"] > 1
    return Leaf(name, size, placement.spec.stacked, placement.zero_dim is not None, whole)


def theory(compiled: Compiled) -> dict[Kind, Row]:
    """What the formulae give, the program's side still empty."""
    recipe, sizes = compiled.recipe, compiled.program.plan.sizes
    stage, m, layers = recipe.zero.stage, recipe.train.num_microbatches, recipe.model.num_layers
    wire, compute = HLO[recipe.zero.reduce_dtype], HLO[recipe.precision.compute_dtype.name]
    leaves = leaves_of(compiled)
    n = math.prod(sizes[axis] for axis in ("data", "sequence"))
    rows: dict[Kind, Row] = {}

    def add(what: str, op: str, axes: Sequence[str], dtype: str, formula: str, entries: float, **why: float) -> None:
        """A term, of an array of so many entries; `why` are entries that there may be more."""
        axes = [axis for axis in axes if sizes.get(axis, 1) > 1]
        factor = WIDTH[dtype] * FACTORS[op](math.prod(sizes[axis] for axis in axes)) if axes else 0
        if entries * factor:
            row = rows.setdefault(Kind(what, op, " x ".join(axes), dtype), Row())
            row.formula = " + ".join(filter(None, [row.formula, formula]))
            row.theory += entries * factor
            for reason, more in why.items():
                key, _, which = reason.partition(" ")
                row.reasons.append((REASONS[key].format(m=m, layers=layers, which=which), more * factor))

    def psi(stacked: bool | None = None, **like: bool) -> int:
        these = [leaf for leaf in leaves if stacked is None or leaf.stacked is stacked]
        return sum(leaf.size for leaf in these if all(getattr(leaf, key) is value for key, value in like.items()))

    settles = 1 if stage <= 1 else m
    times = "" if settles == 1 else f"{m} "
    over = ("data", "sequence")
    split_layers, split_outer = psi(True, zero_split=True), psi(False, zero_split=True)
    split, layer = split_layers + split_outer, split_layers / layers
    if stage == 3:
        words, handed_on = f"{m} (2 psi_layers + psi_outer)", -(m - 1) * layer
        add("weights", "all-gather", over, compute, words, m * (split + split_layers), handed_on=handed_on, ahead=layer)
    elif stage:
        add("weights", "all-gather", over, compute, "psi", split, ahead=layer)
    add("gradients", "reduce-scatter", over, wire, f"{times}psi", settles * split)
    for kind in itertools.product([True, False], repeat=2):
        zero_split, tensor_whole = kind
        ways = n if zero_split else 1
        inner, outer = (
            psi(stacked, zero_split=zero_split, tensor_whole=tensor_whole) // ways for stacked in (True, False)
        )
        axes = ["replica", *([] if zero_split else ["data", "sequence"]), *(["tensor"] if tensor_whole else [])]
        words = f"{times}psi{'_gains' if tensor_whole else ''}{f' / {ways}' if zero_split else ''}"
        what = SUMS if tensor_whole else "gradients"
        outside = [leaf for leaf in leaves if (leaf.stacked, leaf.zero_split, leaf.tensor_whole) == (False, *kind)]
        more = {"peeled": settles * inner / layers, "loss": 1.0}
        more |= {f"once {leaf.name}": -(m - 1) * leaf.size / ways for leaf in outside if settles > 1}
        more |= {f"twice {leaf.name}": -(m - 2) * leaf.size / ways for leaf in outside if settles > 2}
        add(what, "all-reduce", axes, wire, words, settles * (inner + outer), **more)
    rows_here = recipe.train.global_batch_size // (n * sizes.get("replica", 1)) // m
    tokens = rows_here * recipe.train.sequence_length
    entries = m * (4 * layers + 2) * tokens * recipe.model.d_model
    recomputed = range(1, m * layers + 1)  # layers, of which XLA may find some it need not compute again
    again = {f"again {k}": 2.0 * k * tokens * recipe.model.d_model for k in recomputed}
    add("activations", "all-gather", ["tensor"], compute, f"{m} (4 x {layers} + 2) A", entries, **again)
    add("activations", "reduce-scatter", ["tensor"], compute, f"{m} (4 x {layers} + 2) A", entries)
    sums = 4 if recipe.train.label_smoothing else 3
    add(SUMS, "all-reduce", ["tensor"], "f32", f"{m} x {sums} tokens", m * sums * tokens)
    return rows


HLO = {"float32": "f32", "bfloat16": "bf16"}
WIDTH = {"f32": 4, "bf16": 2}
SUMS = "loss, gains"
REASONS = {
    "handed_on": "every pass but the first gets its first layer's weights from the pass before",
    "ahead": "one layer more is fetched ahead",
    "peeled": "the layer outside of the loop is summed by itself and within the stack of all",
    "once": "XLA sums {which} once a step, not {m} times",
    "twice": "XLA sums {which} twice a step (of the first pass, of all others), not {m} times",
    "loss": "XLA sums the loss along with them",
    "again": "rematerialisation gathers the inputs of attention and MLP again in {which} of {m} x {layers} layers",
}


def kind_of(collective: Collective) -> Kind:
    """The kind that theory speaks of."""
    data = {"data", "sequence", "replica"}.issuperset(collective.axes)
    if collective.op == "all-reduce":
        what = "gradients" if data else SUMS
    elif collective.op in ("all-gather", "reduce-scatter"):
        what = ("weights" if collective.op == "all-gather" else "gradients") if data else "activations"
    else:
        what = "of another kind"
    return Kind(what, collective.op, " x ".join(collective.axes), collective.dtype)


def compare(compiled: Compiled) -> tuple[dict[Kind, Row], dict[str, float]]:
    """Theory beside the program; and by name the bytes of sums of a few numbers, which theory leaves out."""
    found, unknown = collectives(hlo.parse(compiled.text), Places.of(compiled.program.mesh))
    assert not unknown, unknown
    rows = theory(compiled)
    left_out: dict[str, float] = {}
    for each in found:
        kind = kind_of(each)
        for member in each.members:
            sent = member.bytes * FACTORS[each.op](each.group_size) * each.times
            if member.bytes <= FEW:
                name = f"{each.op} over {kind.over}, {each.place}, {member.dtype}"
                left_out[name] = left_out.get(name, 0) + sent
                continue
            rows.setdefault(kind, Row("nothing")).compiled += sent
    return rows, left_out


FEW = 64  # bytes of a member that is no array of the model


def run(config: Path, overrides: Sequence[str], cluster: str, which: str) -> dict[str, Any]:
    """One run as JSON values."""
    stage, _, group = which.partition(":")
    zero = [f"--config.zero.stage={stage}", *([f"--config.zero.group_size={group}"] if group else [])]
    compiled = compile_for(load(config, [*overrides, *zero]), clusters.parse(cluster))
    rows, left_out = compare(compiled)
    return {
        "stage": int(stage),
        "group_size": int(group) if group else None,
        "mesh": dict(compiled.program.plan.sizes),
        "psi": sum(leaf.size for leaf in leaves_of(compiled)),
        "rows": [{**dataclasses.asdict(kind), **_numbers(row)} for kind, row in rows.items()],
        "left_out_of_theory": left_out,
    }


def _numbers(row: Row) -> dict[str, Any]:
    return {"formula": row.formula, "theory": row.theory, "compiled": row.compiled, "because": row.because}


def print_runs(runs: Sequence[dict[str, Any]], console: Console) -> None:
    for each in runs:
        group = f", groups of {each['group_size']}" if each["group_size"] else ""
        console.print(f"[bold]ZeRO {each['stage']}{group}[/bold]: psi = {each['psi']:,} parameters on a device")
        right = ("theory", "compiled", "difference")
        table = new_table("what", "by", "over", "dtype", "formula", "theory", "compiled", "difference", right=right)
        for row in each["rows"]:
            difference = row["compiled"] - row["theory"]
            table.add_row(
                *(row[key] for key in ("what", "op", "over", "dtype", "formula")),
                f"{row['theory']:,.0f}",
                f"{row['compiled']:,.0f}",
                f"{difference:+,.0f}" if difference else "0",
            )
        console.print(table)
        for row in each["rows"]:
            if row["because"]:
                console.print(f"{row['what']}, {row['op']} over {row['over']}: {'; '.join(row['because'])}.")
        left = [f"{name}: {sent:,.0f} bytes" for name, sent in each["left_out_of_theory"].items()]
        console.print(f"Left out of theory: {'; '.join(left)}.")
        console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SMALL)
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--runs", nargs="+", default=["0", "1", "2", "3", "1:4", "3:4"], metavar="STAGE[:GROUP]")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args, overrides = parser.parse_known_args()
    launch.without_gpu()
    runs = []
    console = Console(width=120, highlight=False)
    for which in args.runs:
        runs.append(run(args.config, overrides, args.cluster, which))
        print_runs(runs[-1:], console)
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
