"""What a device holds while a function that is not ours runs: the section "memory" of an audit.

Arguments and results come from the compiled program, all else from XLA's buffer assignment at its fullest moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sharded_train import memory
from sharded_train.devices import Device
from sharded_train.rehearse import scopes
from sharded_train.rehearse.buffers import Temporaries, Value
from sharded_train.rehearse.hlo import Module
from sharded_train.rehearse.memory import GAPS, LARGEST, WORKSPACE, section_of
from sharded_train.rehearse.origins import Origins, argument_in_words
from sharded_train.rehearse.transplant import Transplanted, bytes_on_device
from sharded_train.rehearse.wires import Collective

ARGUMENT, GATHERED, SUMMED, TEMPORARY = "arguments", "gathered", "summed over devices", "temporaries"
RESULTS = "results, in memory of their own"


def describe(
    device: Device,
    stats: Any,
    temporaries: Temporaries | None,
    module: Module,
    collectives: Sequence[Collective],
    program: Transplanted,
) -> dict[str, Any]:
    """The section as JSON values, like `rehearse.memory.describe`'s; `stats` are jaxlib's CompiledMemoryStats."""
    total, limit = memory.total(stats), device.memory - device.reserve
    kinds = _Kinds(module, collectives)
    found = {kind: 0 for kind in (GATHERED, SUMMED, TEMPORARY, WORKSPACE, GAPS)}
    for value in temporaries.fullest if temporaries else ():
        found[kinds.of(value)[0]] += value.size
    found[GAPS if temporaries else TEMPORARY] += stats.temp_size_in_bytes - sum(found.values())
    found[RESULTS] = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts: list[dict[str, Any]] = [{"name": ARGUMENT, "bytes": int(stats.argument_size_in_bytes), "what": "arguments"}]
    parts += [{"name": name, "bytes": int(n), "what": "call"} for name, n in found.items() if n]
    assert sum(part["bytes"] for part in parts) == total, (parts, total)
    warnings = []
    if program.donated > stats.alias_size_in_bytes + 0.001 * program.donated:
        warnings.append("arguments that are donated are not all reused for results: their shapes or shardings differ")
    if temporaries is None:
        warnings.append("XLA left no buffer assignment: temporaries are told as one sum, arrays of it are not named")
    largest = _largest(program, temporaries, kinds)
    return section_of(total, limit, device, parts=parts, largest=largest, remedies=[], warnings=warnings)


class _Kinds:
    """Tells what a temporary is."""

    def __init__(self, module: Module, collectives: Sequence[Collective]) -> None:
        self._origins = Origins(module)
        self._ops = {name: each.op for each in collectives for name in (each.name, each.done)}

    def of(self, value: Value) -> tuple[str, str, str]:
        """The kind of a temporary, the operation that made it, and where that stands."""
        found = self._origins.element(value.name, value.index) or self._origins.element(value.within, value.index)
        if found is None:
            return TEMPORARY, value.name, ""
        origin = found[0]
        if origin.opcode == "parameter":
            return TEMPORARY, argument_in_words(origin), "laid out anew"
        if origin.opcode == "custom-call" and value.shape.partition("[")[0] in ("s8", "u8"):
            return WORKSPACE, origin.opcode, scopes.words_of(origin.scope)
        op = self._ops.get(origin.name, "")
        kind = GATHERED if op == "all-gather" else SUMMED if op in ("all-reduce", "reduce-scatter") else TEMPORARY
        name = op or scopes.names_of(origin.scope)[-1].partition(":")[0] or origin.opcode
        return kind, name, scopes.words_of(origin.scope) if origin.scope else ""


def _largest(program: Transplanted, temporaries: Temporaries | None, kinds: _Kinds) -> list[dict[str, Any]]:
    """The largest arrays of the fullest moment; equal ones that one operation makes are told together."""
    arrays = [v for v in temporaries.fullest if not v.shape.startswith("(")] if temporaries else []
    found = [(*kinds.of(v), v.shape.partition("{")[0], v.size) for v in arrays]
    for name, leaf in program.arguments.items():
        assert leaf.sharding is not None
        local = ",".join(map(str, leaf.sharding.shard_shape(leaf.shape)))
        shape = f"{leaf.dtype.name.replace('float', 'f')}[{local}]"
        found.append((ARGUMENT, name, "as it is given", shape, bytes_on_device(leaf)))
    rows: list[dict[str, Any]] = []
    for (kind, name, where, shape, size), those in itertools.groupby(sorted(found)):
        count = len(list(those))
        row: Mapping[str, Any] = {"name": name, "kind": kind, "where": where, "shape": shape, "count": count}
        rows.append({**row, "bytes": count * size})
    return sorted(rows, key=lambda row: -row["bytes"])[:LARGEST]
