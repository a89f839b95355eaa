"""Reads the text of an optimised, scheduled HLO program, as jax's `compiled.as_text()` prints it (jax 0.10.2, 0.12).

A *module* holds *computations*, one of them the entry; a computation holds instructions, in the order in which they are
launched when the module says `is_scheduled=true`. An instruction has a result (an array, or a tuple of them, here the
tuple of its leaves), an opcode, operands and attributes, of which `calls`, `body`, `condition`, `branch_computations`
and `to_apply` name other computations. The grammar is that of XLA's parser (openxla/xla, xla/hlo/parser); what is
not read as it expects raises ValueError with the line, so that nothing is dropped.

Attributes are split only when asked for: a program has far more instructions than anybody looks at.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "tf32": 32}
CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation", "branch_computations")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array on one device: its dtype as HLO names it ("bf16", "f8e4m3fn"), its dims, their bounds where dynamic."""

    dtype: str
    dims: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of all entries, types of less than a byte packed."""
        return -(-self.size * bits_of(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `shapes` are the leaves of its result, `operands` names in its computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses where that is no list of operands: "5" of constant(5)
    raw_attributes: str = dataclasses.field(repr=False)
    frames: Mapping[str, str] = dataclasses.field(repr=False, default_factory=dict)  # by stack_frame_id

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attribute values as written, by name; of one that stands twice, the first."""
        return split_attributes(self.raw_attributes)

    @functools.cached_property
    def scope(self) -> str:
        """Where in the traced program it comes from: jax's op_name, such as "jit(step)/while/body/mlp/dot_general"."""
        return unquoted(self._metadata.get("op_name", ""))

    @functools.cached_property
    def source(self) -> str:
        """File, line and function it was traced from, where the text tells it."""
        if "stack_frame_id" in self._metadata:
            return self.frames.get(self._metadata["stack_frame_id"], "")
        file = unquoted(self._metadata.get("source_file", ""))
        return f"{file}:{self._metadata.get('source_line', '?')}" if file else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it names, whatever for."""
        found = []
        for key in CALLS:
            if value := self.attributes.get(key):
                found += re.findall(r"[^\s{},%]+", value)
        return tuple(found)

    @functools.cached_property
    def _metadata(self) -> Mapping[str, str]:
        written = self.attributes.get("metadata", "")
        return {match[1]: match[2] for match in re.finditer(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s}]+)', written)}


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in schedule order; `root` names the one that is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that make the operands."""
        return [self.instructions[name] for name in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program for one of `num_partitions` x `num_replicas` devices."""

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    num_replicas: int
    scheduled: bool

    @property
    def num_devices(self) -> int:
        """Devices that run the program together."""
        return self.num_partitions * self.num_replicas

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction names: the body of a fusion, of a loop, its branches."""
        return [self.computations[name] for name in instruction.called]


def bits_of(dtype: str) -> int:
    """Bits of one entry of an HLO dtype: "bf16" 16, "f8e5m2" 8, "s4" 4, "pred" a byte. Raises ValueError if unknown."""
    if dtype in BITS:
        return BITS[dtype]
    if match := re.match(r"[a-z]+(\d+)", dtype):
        return int(match[1])
    raise ValueError(f"HLO text: unknown dtype {dtype!r}")


def parse(text: str) -> Module:
    """The module that `text` prints.

    Raises:
        ValueError: where the text does not read as HLO, with the line.
    """
    header, _, _ = text.partition("\n")
    if not (name := re.match(r"HloModule ([^\s,]+)", header)):
        raise ValueError(f"HLO text begins with HloModule and a name, this with {header[:80]!r}")
    lines = re.sub(r"/\*index=\d+\*/", "", text).split("\n")
    frames = _frames(lines)
    computations: dict[str, Computation] = {}
    entry = ""
    for head, body in _blocks(lines):
        instructions: dict[str, Instruction] = {}
        root = ""
        for line in body:
            instruction, is_root = _instruction(line, frames)
            instructions[instruction.name] = instruction
            root = instruction.name if is_root else root
        computation = head.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0].split("(", 1)[0]
        computations[computation] = Computation(computation, instructions, root or next(reversed(instructions)))
        entry = computation if head.startswith("ENTRY ") else entry
    if not entry:
        raise ValueError(f"HLO module {name[1]}: there is no ENTRY computation")
    partitions, replicas = (re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count"))
    counts = (int(partitions[1]) if partitions else 1, int(replicas[1]) if replicas else 1)
    return Module(name[1], computations, entry, *counts, scheduled="is_scheduled=true" in header)


def split_attributes(text: str) -> dict[str, str]:
    """`a=b, c={d, "e,"}` by name, split at the commas that stand in no bracket and no string."""
    found: dict[str, str] = {}
    depth = start = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}()\[\],]', text):
        char = token[0]
        if char in "{([":
            depth += 1
        elif char in "})]":
            depth -= 1
        elif char == "," and depth == 0:
            _add_attribute(found, text[start : token.start()])
            start = token.end()
    _add_attribute(found, text[start:])
    return found


def unquoted(text: str) -> str:
    """The value of a string as HLO text writes it, in double quotes; anything else as it is."""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text


def shapes_in(text: str) -> tuple[Shape, ...]:
    """The leaves of a type as written: `(bf16[2,4]{1,0:T(8)S(1)}, (s32[], token[]))` has three."""
    return tuple(
        Shape(match[1], tuple(int(dim.lstrip("<=")) for dim in match[2].split(",")) if match[2] else ())
        for match in re.finditer(r"\b([a-z]\w*)\[([\d,<=]*)\]", text)
    )


def _add_attribute(found: dict[str, str], text: str) -> None:
    key, equals, value = text.strip().partition("=")
    if equals:
        found.setdefault(key, value)


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The head of each computation and its lines, an instruction that goes over several lines being joined."""
    head: str | None = None
    body: list[str] = []
    for line in lines:
        if head is None:
            if line.endswith("{") and line.startswith(("%", "ENTRY ")):
                head, body = line, []
        elif line.startswith("}"):
            yield head, body
            head = None
        elif re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line):
            body.append(line)
        elif line.strip():
            if not body:
                raise ValueError(f"HLO text: no instruction: {line.strip()[:200]!r}")
            body[-1] += " " + line.strip()
    if head is not None:
        raise ValueError(f"HLO text ends within the computation {head[:80]!r}")


_LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def _instruction(line: str, frames: Mapping[str, str]) -> tuple[Instruction, bool]:
    """The instruction of a line, and whether it is the root."""
    start = _LINE.match(line)
    assert start, line  # _blocks looked
    type_end = _closing(line, start.end()) if line[start.end()] == "(" else line.find(" ", start.end())
    opcode = _OPCODE.match(line, type_end)
    if not opcode:
        raise ValueError(f"HLO text: no opcode where one should stand: {line.strip()[:200]!r}")
    end = _closing(line, opcode.end() - 1)
    inner = line[opcode.end() : end - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    shapes = shapes_in(line[start.end() : type_end])
    literal = "" if operands else inner
    return Instruction(start[2], opcode[1], shapes, operands, literal, line[end:].lstrip(", "), frames), bool(start[1])


def _closing(line: str, start: int) -> int:
    """One past the parenthesis that closes the one at `start`."""
    depth = 0
    for token in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(line, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    raise ValueError(f"HLO text: a parenthesis that is never closed: {line.strip()[:200]!r}")


def _frames(lines: list[str]) -> dict[str, str]:
    """ "file:line in function" by stack_frame_id, from the tables that stand above the computations."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in lines:
        if line.startswith(("%", "ENTRY ")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif row := re.match(r"(\d+) (.+)", line):
            table[row[1]] = row[2]
    places = {
        key: _place(row, tables.get("FileNames", {}), tables.get("FunctionNames", {}))
        for key, row in tables.get("FileLocations", {}).items()
    }
    return {key: places.get(_field(row, "file_location_id"), "") for key, row in tables.get("StackFrames", {}).items()}


def _place(row: str, files: Mapping[str, str], functions: Mapping[str, str]) -> str:
    file = unquoted(files.get(_field(row, "file_name_id"), ""))
    return f"{file}:{_field(row, 'line')} in {unquoted(functions.get(_field(row, 'function_name_id'), '?'))}"


def _field(row: str, name: str) -> str:
    match = re.search(rf"\b{name}=(\d+)", row)
    return match[1] if match else ""
