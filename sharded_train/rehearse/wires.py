"""What crosses which wire? Every collective of one step, read from the compiled program.

Bytes on the wire are those that each device sends, as nccl-tests counts them (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
With a group of n devices and B bytes of the whole buffer (of a gather its result, of a scatter its input):

    all-gather, reduce-scatter, all-to-all   B (n - 1) / n
    all-reduce                               2 B (n - 1) / n
    permute, broadcast                       B

A pair of start and done is worth what is computed between them: `spans` names the matrix products that the schedule
puts there, those within fusions, loops and calls included. A collective that XLA marks as synchronous spans none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from jax.sharding import Mesh

from sharded_train.rehearse.hlo import Computation, Instruction, Module, Shape, unquoted
from sharded_train.rehearse.hlo_groups import pairs_of, parse_groups
from sharded_train.rehearse.hlo_walk import Run, walk
from sharded_train.rehearse.origins import Origins
from sharded_train.rehearse.pace import Pace
from sharded_train.rehearse.wires_places import Groups, Link, Places, place_groups, place_pairs
from sharded_train.rehearse.wires_totals import as_number, totals, warnings
from sharded_train.rehearse.wires_where import (
    Shares,
    Spans,
    argument_of,
    mean_times,
    name_loops,
    scope_near,
    turn_of,
    words_of,
)

# Bytes on the wire of each device over those of the whole buffer, for a group of n.
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
    "collective-broadcast": lambda n: float(n > 1),
}
MOVERS = re.compile(r"nccl|nvshmem|collective|all_?(reduce|gather|to_?all)|permute|broadcast", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Member:
    """One array of a collective, of which XLA may have combined several: what a device gives and what it gets."""

    given: Shape
    got: Shape
    parameter: str = ""  # whose shard it is, of a gather of weights

    @property
    def dtype(self) -> str:
        return self.given.dtype

    @property
    def bytes(self) -> int:
        """Of the whole buffer."""
        return max(self.given.bytes, self.got.bytes)

    def __str__(self) -> str:
        shapes = f"{self.given} -> {self.got}" if self.given != self.got else str(self.given)
        return f"{self.parameter} {shapes}".lstrip()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, `times` a step; in a pipeline so often on the mean device.

    `certain` says that this is so whatever numbers the program works on, and not a bound or a guess. `axes` are those
    of the mesh that differ within a group; `per_host` is how many of a group one host has at most. `loops` are (what
    one turn is, turns) from the outside in, turns None where unknown (counted as one); `branches` the conditionals that
    it stands in, in words. `done` is the instruction of `computation` that waits for it, its own name where that is
    itself. `place` says in words where in the model it comes from, `note` what is odd about it.
    """

    name: str
    op: str
    axes: tuple[str, ...]
    link: Link
    group_size: int
    num_groups: int
    per_host: int
    members: tuple[Member, ...]
    times: int | Fraction
    certain: bool
    loops: tuple[tuple[str, int | None], ...]
    branches: tuple[str, ...]
    computation: str
    done: str
    asynchronous: bool
    spans: tuple[str, ...]
    place: str
    scope: str
    source: str
    note: str = ""

    @property
    def dtype(self) -> str:
        """That of all members, or theirs joined by "+"."""
        return "+".join(sorted({member.dtype for member in self.members}))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return sum(member.bytes for member in self.members)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in one run."""
        return self.payload_bytes * FACTORS[self.op](self.group_size)


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An instruction that moves bytes between devices, or may, and is not understood."""

    name: str
    opcode: str
    why: str
    times: int
    bytes: int
    scope: str


def describe(module: Module, mesh: Mesh, pace: Pace | None = None) -> dict[str, Any]:
    """The section as JSON values, bytes being those of one device; `mesh` is the one that was compiled for.

    With the pace of a pipeline they are the mean device's, what stages pass over counting as often as they do it.
    """
    places = Places.of(mesh)
    found, unknown = collectives(module, places, pace)
    return {
        "mesh": dict(places.sizes),
        "collectives": [_facts(collective) for collective in found],
        "totals": totals(found),
        "not_understood": [dataclasses.asdict(each) for each in unknown],
        "warnings": warnings(found, unknown, places.host_size),
    }


def collectives(module: Module, places: Places, pace: Pace | None = None) -> tuple[list[Collective], list[Unknown]]:
    """All collectives that run, in schedule order, and what may be one and is not understood.

    Without the pace of a pipeline each branch counts as though it was always taken.

    Raises:
        ValueError: if the program is not one for the devices of the mesh.
    """
    if module.num_devices != places.num_devices:
        raise ValueError(f"the program is for {module.num_devices} devices, the mesh has {places.num_devices}")
    runs = list(walk(module))
    reader = _Reader(module, places, name_loops(runs, pace), Origins(module), {} if pace is None else pace.shares())
    found: list[Collective] = []
    unknown: list[Unknown] = []
    for run in runs:
        try:
            if collective := reader.read(run):
                found.append(collective)
        except (ValueError, KeyError) as error:
            unknown.append(_unknown(run, error))
    return found, unknown


class _Reader:
    """Reads the collectives of one module; what many of them share is worked out once."""

    def __init__(self, module: Module, places: Places, turns: dict[str, str], origins: Origins, shares: Shares) -> None:
        self._module, self._places, self._turns, self._origins = module, places, turns, origins
        self._shares = shares
        self._spans = Spans(module)
        self._groups: dict[str, Groups] = {}

    def read(self, run: Run) -> Collective | None:
        """The collective that an instruction starts, None if it starts none; ValueError if it is not understood."""
        instruction, computation = run.instruction, run.computation
        if run.wrapper is not None and run.wrapper.opcode == "async-start" and _operation(instruction):
            return None  # its wrapper stands for it
        inner = self._inner(instruction)
        if (op := _operation(inner)) is None:
            if reason := _suspicion(instruction):
                raise ValueError(reason)
            return None
        groups = self._place(op, inner)
        done, note = _done(computation, instruction), groups.note
        hidden = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.raw_attributes
        if done is None:
            note = "; ".join(filter(None, [note, "what waits for it stands in another computation"]))
        members = self._members(computation, instruction, inner, done)
        parameters = [member.parameter for member in members if member.parameter]
        gradients = op == "reduce-scatter" and {"data", "sequence", "replica"}.issuperset(groups.axes)
        times, certain = mean_times(run, self._shares)
        scope, source = inner.scope or scope_near(computation, instruction), inner.source or instruction.source
        return Collective(
            name=instruction.name,
            op=op,
            axes=groups.axes,
            link=groups.link,
            group_size=groups.size,
            num_groups=groups.count,
            per_host=groups.per_host,
            members=members,
            times=times,
            certain=certain,
            loops=tuple((turn_of(loop, self._turns), loop.trips) for loop in run.loops),
            branches=tuple(f"{b.conditional}, branch {b.index + 1} of {b.count}" for b in run.branches),
            computation=computation.name,
            done=done.name if done else "",
            asynchronous=hidden,
            spans=self._spans.between(computation, instruction.name, done.name) if hidden and done else (),
            place=words_of(scope, source, parameters, gradients),
            scope=scope,
            source=source,
            note=note,
        )

    def _inner(self, instruction: Instruction) -> Instruction:
        """What a generic asynchronous start runs, where that is one collective; else the instruction."""
        if instruction.opcode != "async-start":
            return instruction
        inner = [each for called in self._module.called(instruction) for each in called if _operation(each)]
        if len(inner) > 1:
            raise ValueError(f"one asynchronous start of {len(inner)} collectives")
        return inner[0] if inner else instruction

    def _members(
        self, computation: Computation, start: Instruction, inner: Instruction, done: Instruction | None
    ) -> tuple[Member, ...]:
        names = (
            start.operands[:1] if inner.opcode == "ragged-all-to-all" else start.operands
        )  # offsets and sizes follow
        given = [computation.instructions[name].shapes[0] for name in names]
        got = done.shapes if done else inner.shapes[-len(given) :]
        if len(given) != len(got):
            raise ValueError(f"{len(given)} arrays go in and {len(got)} come out")
        gathers = inner.opcode.startswith("all-gather")
        parameters = [argument_of(self._module, self._origins, name) if gathers else "" for name in names]
        return tuple(Member(*each) for each in zip(given, got, parameters, strict=True))

    def _place(self, op: str, instruction: Instruction) -> Groups:
        permutes = op == "collective-permute"
        written = instruction.attributes["source_target_pairs" if permutes else "replica_groups"]
        if written not in self._groups:
            self._groups[written] = (
                place_pairs(pairs_of(instruction), self._places)
                if permutes
                else place_groups(parse_groups(written, self._places.num_devices), self._places)
            )
        return self._groups[written]


def _operation(instruction: Instruction) -> str | None:
    """The collective that an instruction does or starts."""
    op = instruction.opcode.removesuffix("-start")
    return op if op in FACTORS else None


def _suspicion(instruction: Instruction) -> str:
    """Why an instruction that is no collective we know may move bytes between devices."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")):
        return ""  # its start stands for it
    if opcode in ("send", "recv"):
        return f"{opcode} is not counted"
    if opcode == "custom-call" and MOVERS.search(target := unquoted(instruction.attributes["custom_call_target"])):
        return f"a call of {target}"
    raw = instruction.raw_attributes
    if re.search(r"\b(replica_groups|source_target_pairs|channel_id)=", raw):
        return f"{opcode} is no collective that is known"
    return ""


def _done(computation: Computation, start: Instruction) -> Instruction | None:
    """What waits for a start: itself where it is no start, None where that does not stand in its computation."""
    if not start.opcode.endswith("-start"):
        return start
    following = {start.name}
    for each in computation:
        if following.intersection(each.operands[:1]):
            if each.opcode.endswith("-done"):
                return each
            if each.opcode.endswith("-update"):
                following.add(each.name)
    return None


def _unknown(run: Run, error: Exception) -> Unknown:
    instruction = run.instruction
    why = f"without {error}" if isinstance(error, KeyError) else str(error)
    size = sum(shape.bytes for shape in instruction.shapes)
    return Unknown(instruction.name, instruction.opcode, why, run.times, size, instruction.scope)


def _facts(collective: Collective) -> dict[str, Any]:
    kept = {key: value for key, value in vars(collective).items() if key not in ("computation", "done")}
    return {
        **kept,
        "axes": list(collective.axes),
        "dtype": collective.dtype,
        "members": [str(member) for member in collective.members],
        "payload_bytes": collective.payload_bytes,
        "wire_bytes": collective.wire_bytes,
        "times": as_number(collective.times),
        "loops": [{"turn": turn, "turns": turns} for turn, turns in collective.loops],
        "branches": list(collective.branches),
        "spans": list(collective.spans),
    }
