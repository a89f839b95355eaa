"""Does it fit? What a device holds at the fullest moment of a step, against what it has.

The state comes from the arrays of the program's arguments, everything else from XLA's buffer assignment: one
allocation of temporaries, and what lies in it at its fullest moment (`buffers`). What an array is, is told by where its
numbers come from (`origins`): a gather over data is a weight, a reduce-scatter over data, an fp32 sum of a weight's
shape or a backward product of one is a gradient, and the rest are activations, their gradients and temporaries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from sharded_train import memory, params
from sharded_train.rehearse import scopes
from sharded_train.rehearse.buffers import Temporaries, Value
from sharded_train.rehearse.compile import Compiled
from sharded_train.rehearse.hlo import Instruction, Module, shapes_in
from sharded_train.rehearse.origins import Origins
from sharded_train.rehearse.wires import Collective
from sharded_train.sharding import is_placement
from sharded_train.show import bytes_held
from sharded_train.show_tables import bytes_in_words
from sharded_train.step import Program

TOO_CLOSE = 0.03  # of what there is
LARGEST = 12  # arrays named
WEIGHTS, GRADIENTS, ACTIVATIONS = "gathered weights", "gradients", "activations and temporaries"
WORKSPACE, GAPS, RESULTS = "workspaces of kernels", "gaps between arrays", "results beside the state"


def describe(compiled: Compiled, module: Module, collectives: Sequence[Collective]) -> dict[str, Any]:
    """The section as JSON values; all bytes are those of one device. `module` is the compiled text, parsed.

    `parts` are disjoint and sum to `total_bytes`.
    """
    device, total = compiled.cluster.device, memory.total(compiled.memory)
    limit = device.memory - device.reserve
    state = _state(compiled.program)
    of_program, warnings = _of_program(compiled, state)
    sums = {kind: sum(n for k, _, n in state if k == kind) for kind in dict.fromkeys(kind for kind, _, _ in state)}
    kinds = _Kinds(module, compiled.program, collectives)
    step = {**of_program, **_temporaries(compiled, kinds)}
    assert sum(sums.values()) + sum(step.values()) == total, (sums, step, total)
    verdict = verdict_of(total, limit)
    sizes = dict(compiled.program.plan.sizes)
    return {
        "verdict": verdict,
        "words": _words(verdict, total, compiled),
        "device_bytes": device.memory,
        "reserve_bytes": device.reserve,
        "limit_bytes": limit,
        "total_bytes": total,
        "parts": [*_parts("state", sums), *_parts("step", step)],
        "largest": _largest(state, compiled.temporaries, kinds),
        "remedies": list(memory.remedies(compiled.recipe, sizes, compiled.cluster.num_devices)),
        "warnings": warnings,
    }


def verdict_of(total: int, limit: int) -> str:
    """In words that a decision can rest on: compilers and allocators differ from version to version."""
    if abs(total - limit) <= TOO_CLOSE * limit:
        return "too close to say"
    return "fits" if total < limit else "does not fit"


def _words(verdict: str, total: int, compiled: Compiled) -> str:
    device = compiled.cluster.device
    limit, share = device.memory - device.reserve, total / (device.memory - device.reserve)
    margin = f"; within {TOO_CLOSE:.0%} of the line no answer is given" if verdict == "too close to say" else ""
    return (
        f"{verdict}: {bytes_in_words(total)} of {bytes_in_words(limit)} = {share:.0%}{margin}. The device has "
        f"{bytes_in_words(device.memory)}, of which {device.reserve_fraction:.0%} are left to NCCL, CUDA and "
        "fragmentation"
    )


def _state(program: Program) -> list[tuple[str, str, int]]:
    """(kind, name, bytes on a device) of every array that stays from step to step."""
    state = program.abstract_state
    names = [name for name, _ in params.named_leaves(program.specs)]
    structure: Any = jax.tree.structure(state.params)

    def each() -> Iterator[tuple[str, str, int]]:
        for name, leaf in zip(names, jax.tree.leaves(state.params), strict=True):
            yield "master weights", name, bytes_held(leaf)
        for name, slots in zip(names, structure.flatten_up_to(state.opt_state), strict=True):
            yield "moments", name, sum(map(bytes_held, jax.tree.leaves(slots)))
        for name, leaf in zip(names, jax.tree.leaves(state.ema), strict=False):
            yield "averaged weights", name, bytes_held(leaf)

    found = list(each())
    rest = sum(map(bytes_held, jax.tree.leaves(state))) - sum(n for _, _, n in found)
    return [*found, ("other state", "counters", rest)]


def _parts(what: str, bytes_of: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": n, "what": what} for name, n in bytes_of.items() if n]


def _of_program(compiled: Compiled, state: Sequence[tuple[str, str, int]]) -> tuple[dict[str, int], list[str]]:
    """What the program's arguments and results take beside the state, and what is odd about it."""
    stats, held = compiled.memory, sum(n for _, _, n in state)
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
        ends = lambda op: {name for c in over_data if c.op == op for name in (c.name, c.done)}
        self._gathers = ends("all-gather")
        self._reductions = ends("reduce-scatter") | ends("all-reduce")
        self._shapes = _shapes(program)

    def of(self, value: Value) -> tuple[str, Instruction | None]:
        """The kind of a temporary and the instruction that its numbers come from."""
        origin = self._origins.of(value.name, value.index)
        dtype, dims = value.shape.partition("[")[0], _dims(value.shape)
        if origin is None:
            return ACTIVATIONS, None
        if origin.opcode == "custom-call" and dtype in ("s8", "u8"):
            return WORKSPACE, origin
        if origin.name in self._gathers or "gather_weights" in origin.scope:
            return WEIGHTS, origin
        if origin.opcode == "parameter" and "state.params" in origin.scope:
            return WEIGHTS, origin  # cast or laid out anew, without a gather
        if origin.name in self._reductions or "reduce_gradients" in origin.scope or "gradient_sums" in origin.scope:
            return GRADIENTS, origin
        backward, summed = "transpose(" in origin.scope, dtype == "f32" and origin.opcode == "add"
        if dims in self._shapes and (backward or (summed and "jvp(" not in origin.scope)):
            return GRADIENTS, origin
        return ACTIVATIONS, origin


def _shapes(program: Program) -> set[tuple[int, ...]]:
    """Dims, sorted and without ones, of every parameter on a device: gathered and stored, of all layers and of one."""
    found = set()
    for _, placement in params.named_leaves(program.plan.placements, is_placement):
        for spec in (placement.gathered, placement.stored):
            split = [dim if isinstance(dim, tuple) else (dim,) if dim else () for dim in spec]
            whole = placement.spec.shape
            ways = [
                math.prod(program.plan.sizes[a] for a in dim) for dim in [*split, *[()] * (len(whole) - len(split))]
            ]
            local = [n // w for n, w in zip(whole, ways, strict=True)]
            found.add(_sorted(local))
            if placement.spec.stacked:
                found.add(_sorted(local[1:]))
    return {dims for dims in found if len(dims) > 1}


def _dims(shape: str) -> tuple[int, ...]:
    shapes = shapes_in(shape)
    return _sorted(shapes[0].dims) if len(shapes) == 1 else ()


def _sorted(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n != 1))


def _largest(
    state: Sequence[tuple[str, str, int]], temporaries: Temporaries | None, kinds: _Kinds
) -> list[dict[str, Any]]:
    """The largest arrays of the fullest moment; equal ones from one place in the model are told together."""
    rows: list[dict[str, Any]] = [
        {"name": name, "kind": kind, "bytes": n, "count": 1, "shape": ""} for kind, name, n in state
    ]
    found = [(_name(*kinds.of(v)), v.shape.partition("{")[0], v.size, kinds.of(v)[0]) for v in _named(temporaries)]
    for (name, shape, size, kind), those in itertools.groupby(sorted(found)):
        count = len(list(those))
        rows.append({"name": name, "kind": kind, "bytes": count * size, "count": count, "shape": shape})
    return sorted(rows, key=lambda row: -row["bytes"])[:LARGEST]


def _named(temporaries: Temporaries | None) -> Sequence[Value]:
    return () if temporaries is None else temporaries.fullest


def _name(kind: str, origin: Instruction | None) -> str:
    """Where in the model, and which operation: "mlp, forward: dot_general"."""
    if origin is None or not origin.scope:
        return origin.opcode if origin else "unknown"
    if origin.opcode == "parameter":
        return argument_in_words(origin.scope)
    operation = scopes.names_of(origin.scope)[-1].partition(":")[0].strip("(){} ")
    return f"{scopes.words_of(origin.scope)}: {operation.rpartition('/')[2]}"
