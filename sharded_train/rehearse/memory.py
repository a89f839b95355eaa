"""Does it fit? What a device holds at the fullest moment of a step, against what it has.

The state comes from the arrays of the program's arguments, everything else from XLA's buffer assignment: one
allocation of temporaries, and what lies in it at its fullest moment (`buffers`). What an array is, is told by where its
numbers come from (`origins`): a gather over data is a weight, a reduce-scatter over data, an fp32 sum of a weight's
shape or a backward product of one is a gradient, and the rest are activations, their gradients and temporaries.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from sharded_train import memory, params
from sharded_train.devices import Device
from sharded_train.memory import ACTIVATIONS, GRADIENTS, MASTERS, MOMENTS, WEIGHTS
from sharded_train.rehearse import scopes
from sharded_train.rehearse.buffers import Temporaries, Value
from sharded_train.rehearse.compile import Compiled, stand_ins
from sharded_train.rehearse.hlo import Instruction, Module, shapes_in
from sharded_train.rehearse.origins import Origins, argument_in_words
from sharded_train.rehearse.wires import Collective
from sharded_train.sharding import is_placement
from sharded_train.show import bytes_held
from sharded_train.step import Program
from sharded_train.tables import bytes_in_words, new_table

TOO_CLOSE = 0.03  # of what there is
LARGEST = 12  # arrays named
CALLS = ("closed_call", "checkpoint", "pjit", "jit", "shard_map", "body", "cond", "while")  # by jax, no operations
ROOM = 0.8  # of what there is: below it nothing need shrink
WORKSPACE, GAPS, RESULTS = "workspaces of kernels", "gaps between arrays", "results beside the state"


TOTALS = {  # what sums of parts are called; those of a function that is not ours come second
    "state": "state, held between steps",
    "step": "all at the fullest moment of a step",
    "arguments": "arguments",
    "call": "all at the fullest moment of a step",
}


def describe(compiled: Compiled, module: Module, collectives: Sequence[Collective]) -> dict[str, Any]:
    """The section as JSON values; all bytes are those of one device. `module` is the compiled text, parsed.

    `parts` are disjoint and sum to `total_bytes`.
    """
    device, total = compiled.cluster.device, memory.total(compiled.memory)
    limit = device.memory - device.reserve
    state = _state(compiled.program)
    of_program, warnings = _of_program(compiled, state)
    sums = {each: sum(n for kind, *_, n in state if kind == each) for each in dict.fromkeys(kind for kind, *_ in state)}
    kinds = _Kinds(module, compiled.program, collectives)
    step = {**of_program, **_temporaries(compiled, kinds)}
    assert sum(sums.values()) + sum(step.values()) == total, (sums, step, total)
    held = {**sums, **step}
    return section_of(
        total,
        limit,
        device,
        parts=[*_parts("state", sums), *_parts("step", step)],
        largest=_largest(state, compiled.temporaries, kinds),
        remedies=memory.remedies(compiled.recipe, stand_ins(compiled.cluster), held) if total >= ROOM * limit else [],
        warnings=warnings,
    )


def section_of(total: int, limit: int, device: Device, **found: Any) -> dict[str, Any]:
    """What is reported of a program's bytes on each device: the verdict, and what was `found`."""
    verdict = verdict_of(total, limit)
    return {
        "verdict": verdict,
        "words": in_words(verdict, total, device),
        "device_bytes": device.memory,
        "reserve_bytes": device.reserve,
        "limit_bytes": limit,
        "total_bytes": total,
        **found,
    }


def verdict_of(total: int, limit: int) -> str:
    """In words that a decision can rest on: compilers and allocators differ from version to version."""
    if abs(total - limit) <= TOO_CLOSE * limit:
        return "too close to say"
    return "fits" if total < limit else "does not fit"


def in_words(verdict: str, total: int, device: Device) -> str:
    """The verdict with its numbers."""
    limit = device.memory - device.reserve
    margin = f"; within {100 * TOO_CLOSE:.0f} % of the line no answer is given" if verdict == "too close to say" else ""
    held, usable, whole = map(bytes_in_words, (total, limit, device.memory))
    left = f"{100 * device.reserve_fraction:.0f} % are left to NCCL, CUDA and fragmentation"
    fit = f"{verdict}: {held} of {usable} = {100 * total / limit:.0f} %{margin}"
    return f"{fit}. The device has {whole}, of which {left}"


def _state(program: Program) -> list[tuple[str, str, str, int]]:
    """(kind, name, shape on a device, bytes of that) of every array that stays from step to step."""
    state = program.abstract_state
    names = [name for name, _ in params.named_leaves(program.specs)]
    structure: Any = jax.tree.structure(state.params)

    def each() -> Iterator[tuple[str, str, str, int]]:
        for name, leaf in zip(names, jax.tree.leaves(state.params), strict=True):
            yield MASTERS, name, *_held(leaf)
        for name, slots in zip(names, structure.flatten_up_to(state.opt_state), strict=True):
            yield from ((MOMENTS, name, *_held(leaf)) for leaf in jax.tree.leaves(slots))
        for name, leaf in zip(names, jax.tree.leaves(state.ema), strict=False):
            yield "averaged weights", name, *_held(leaf)

    found = list(each())
    rest = sum(map(bytes_held, jax.tree.leaves(state))) - sum(n for *_, n in found)
    return [*found, ("other state", "counters", "", rest)]


def _held(leaf: Any) -> tuple[str, int]:
    """What a device holds of an array, as HLO writes it ("f32[2,64]"), and its bytes."""
    dtype = leaf.dtype.name.replace("float", "f")  # bfloat16 is bf16
    return f"{dtype}[{','.join(map(str, leaf.sharding.shard_shape(leaf.shape)))}]", bytes_held(leaf)


def _parts(what: str, bytes_of: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": n, "what": what} for name, n in bytes_of.items() if n]


def _of_program(compiled: Compiled, state: Sequence[tuple[str, str, str, int]]) -> tuple[dict[str, int], list[str]]:
    """What the program's arguments and results take beside the state, and what is odd about it."""
    stats, held = compiled.memory, sum(n for *_, n in state)
    batch, results = stats.argument_size_in_bytes - held, stats.output_size_in_bytes - stats.alias_size_in_bytes
    warnings = []
    assert batch >= 0, (stats, held)
    if held - stats.alias_size_in_bytes > 0.001 * held:
        missing = bytes_in_words(held - stats.alias_size_in_bytes)
        warnings.append(f"{missing} of the state are not updated in place: they are held twice")
    if compiled.temporaries is None:
        warnings.append("XLA left no buffer assignment: temporaries are told as one sum, arrays of it are not named")
    return {"batch": batch, RESULTS: results}, warnings


def _temporaries(compiled: Compiled, kinds: _Kinds) -> dict[str, int]:
    """Bytes of the allocation of temporaries by kind, at its fullest moment."""
    total, temporaries = compiled.memory.temp_size_in_bytes, compiled.temporaries
    if temporaries is None:
        return {ACTIVATIONS: total}
    found = {kind: 0 for kind in (WEIGHTS, GRADIENTS, ACTIVATIONS, WORKSPACE)}
    for value in temporaries.fullest:
        found[kinds.of(value)[0]] += value.size
    return {**found, GAPS: total - sum(found.values())}


class _Kinds:
    """Tells what a temporary is."""

    def __init__(self, module: Module, program: Program, collectives: Sequence[Collective]) -> None:
        self._origins = Origins(module)
        over_data = [c for c in collectives if c.axes and "tensor" not in c.axes]
        by_name = lambda *ops: {name: c for c in over_data if c.op in ops for name in (c.name, c.done)}
        self._gathers, self._reductions = by_name("all-gather"), by_name("reduce-scatter", "all-reduce")
        self._shapes = _shapes(program)

    def of(self, value: Value) -> tuple[str, str, str]:
        """The kind of a temporary, its name (a weight's, else the operation that made it) and where that stands."""
        found = self._origins.element(value.name, value.index) or self._origins.element(value.within, value.index)
        if found is None:
            return ACTIVATIONS, value.name, ""
        origin, element = found
        kind = self._kind(value, origin)
        if origin.opcode == "parameter":
            return kind, argument_in_words(origin), "as it is stored"
        if gather := self._gathers.get(origin.name):
            name = gather.members[element].parameter if element < len(gather.members) else ""
            return kind, name or "all_gather", gather.place
        where = scopes.words_of(origin.scope) if origin.scope else ""
        if kind == GRADIENTS and (names := self._shapes.get(_dims(value.shape))):
            return kind, _any_of(names), where
        operation = scopes.names_of(origin.scope)[-1].partition(":")[0].strip("(){} ").rpartition("/")[2]
        return kind, origin.opcode if operation in ("", *CALLS) else operation, where

    def _kind(self, value: Value, origin: Instruction) -> str:
        dtype, scope = value.shape.partition("[")[0], origin.scope
        if origin.opcode == "custom-call" and dtype in ("s8", "u8"):
            return WORKSPACE
        if origin.name in self._gathers or "gather_weights" in scope:
            return WEIGHTS
        if origin.opcode == "parameter" and "state.params" in scope:
            return WEIGHTS  # cast or laid out anew, without a gather
        if origin.name in self._reductions or "reduce_gradients" in scope or "gradient_sums" in scope:
            return GRADIENTS
        backward = "transpose(" in scope or scopes.part_of(scope) == "head"  # whose forward pass takes its gradient too
        summed = dtype == "f32" and origin.opcode == "add" and "jvp(" not in scope
        return GRADIENTS if (backward or summed) and _dims(value.shape) in self._shapes else ACTIVATIONS


def _shapes(program: Program) -> dict[tuple[int, ...], list[str]]:
    """Names of parameters by their dims on a device, sorted and without ones: gathered and stored, of all layers and
    of one.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, placement in params.named_leaves(program.plan.placements, is_placement):
        for spec in (placement.gathered, placement.stored):
            local = NamedSharding(program.mesh, spec).shard_shape(placement.spec.shape)
            for dims in {_sorted(local), _sorted(local[1:] if placement.spec.stacked else local)}:
                found[dims] = list(dict.fromkeys([*found.get(dims, ()), name]))
    return {dims: names for dims, names in found.items() if len(dims) > 1}


def _any_of(names: Sequence[str]) -> str:
    """ "layers/mlp/down, gate, up" of several in one place: which of them it is cannot be told."""
    folder = os.path.commonpath(names) + "/" if len(names) > 1 and os.path.commonpath(names) else ""
    return folder + ", ".join(name.removeprefix(folder) for name in names)


def _dims(shape: str) -> tuple[int, ...]:
    shapes = shapes_in(shape)
    return _sorted(shapes[0].dims) if len(shapes) == 1 else ()


def _sorted(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n != 1))


def _largest(
    state: Sequence[tuple[str, str, str, int]], temporaries: Temporaries | None, kinds: _Kinds
) -> list[dict[str, Any]]:
    """The largest arrays of the fullest moment; equal ones from one place in the model are told together."""
    found = [(*kinds.of(v), v.shape.partition("{")[0], v.size) for v in temporaries.fullest] if temporaries else []
    found += [(kind, name, "between steps", shape, size) for kind, name, shape, size in state]
    rows: list[dict[str, Any]] = []
    for (kind, name, where, shape, size), those in itertools.groupby(sorted(found)):
        count = len(list(those))
        same = {"name": name, "kind": kind, "where": where, "shape": shape, "count": count}
        rows.append({**same, "bytes": count * size})
    return sorted(rows, key=lambda row: -row["bytes"])[:LARGEST]


def counted(row: Mapping[str, Any]) -> str:
    """The arrays of a row of `largest`: "4 × bf16[2,1024]"."""
    return f"{row['count']} × {row['shape']}" if row["count"] > 1 else str(row["shape"])


def tables(section: Mapping[str, Any]) -> list[Any]:
    """The section for a terminal."""
    held = new_table("on each device", "bytes", "", right=["bytes", ""])
    for what in dict.fromkeys(part["what"] for part in section["parts"]):
        words = TOTALS[what]
        those = [part for part in section["parts"] if part["what"] == what]
        for part in those:
            held.add_row(part["name"], f"{part['bytes']:,}", bytes_in_words(part["bytes"]))
        total = sum(part["bytes"] for part in those) if what in ("state", "arguments") else section["total_bytes"]
        if len(those) == 1 and those[0]["name"] == words:
            held.add_section()
        else:
            held.add_row(words, f"{total:,}", bytes_in_words(total), style="bold", end_section=True)
    device, reserve = section["device_bytes"], section["reserve_bytes"]
    held.add_row("the device's memory", f"{device:,}", bytes_in_words(device))
    held.add_row("reserve for NCCL, CUDA, fragmentation", f"{reserve:,}", bytes_in_words(reserve))
    largest = new_table("largest then", "kind", "where", "arrays", "bytes", right=["bytes"])
    for row in section["largest"]:
        largest.add_row(
            row["name"],
            row["kind"].partition(" and ")[0],
            row["where"],
            counted(row),
            bytes_in_words(row["bytes"]),
        )
    found = [f"{section['words']}.", "", held, "", largest]
    if section["verdict"] != "fits" and section["remedies"]:
        found += ["", "What would shrink it:", *(f"  {remedy}" for remedy in section["remedies"])]
    return [*found, *(f"Note: {warning}." for warning in section["warnings"])]
