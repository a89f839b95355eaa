"""Which devices a collective joins, from the forms in which HLO text writes them.

Devices are numbered by their place in the mesh that the program was compiled for, flattened: partition p of the
program is `mesh.devices.flat[p]`.
"""

from __future__ import annotations

import math
import re

import numpy as np

from sharded_train.rehearse.hlo import Instruction


def groups_of(instruction: Instruction, num_devices: int) -> np.ndarray:
    """The groups `[groups, size]` of a collective, members in their order.

    Read are lists `{{0,1},{2,3}}`, iota lists `[2,4]<=[4,2]T(1,0)` (the numbers 0, 1, ... in the second shape,
    transposed, as the first), named ones `mesh['data'=4,'tensor'=2] {'data'}` with split axes `'data':(2)2` and
    `device_ids`, and `{}` (all devices).

    Raises:
        ValueError: for any other form, for groups of several sizes, and for a permutation, which has no groups.
    """
    written = instruction.attributes.get("replica_groups")
    if written is None:
        raise ValueError(f"{instruction.name}: {instruction.opcode} without replica_groups")
    return parse_groups(written, num_devices)


def parse_groups(written: str, num_devices: int) -> np.ndarray:
    """`groups_of` for the text of the attribute."""
    written = written.strip()
    if written in ("{}", "{{}}"):
        return np.arange(num_devices).reshape(1, -1)
    if written.startswith("{{"):
        rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]*)\}", written)]
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"replica groups of several sizes: {written[:200]}")
        return np.array(rows)
    if written.startswith("["):
        return _iota(written)
    if named := re.fullmatch(r"@?mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*)\))? \{(?P<over>.*)\}", written):
        return _named(named["axes"], named["ids"], named["over"])
    raise ValueError(f"replica groups in a form that is not known: {written[:200]}")


def pairs_of(instruction: Instruction) -> np.ndarray:
    """(source, target) `[pairs, 2]` of a collective-permute."""
    written = instruction.attributes["source_target_pairs"]
    return np.array([_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", written)]).reshape(-1, 2)


def _iota(written: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: arange over the source shape, transposed, in the target shape."""
    if not (match := re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", written)):
        raise ValueError(f"replica groups in a form that is not known: {written[:200]}")
    target = _numbers(match[1])
    source = _numbers(match[2]) if match[2] else target
    numbers = np.arange(math.prod(source)).reshape(source)
    return (numbers.transpose(_numbers(match[3])) if match[3] else numbers).reshape(target)


def _named(axes: str, ids: str | None, over: str) -> np.ndarray:
    """Groups along the axes `over` of a mesh; `'a':(2)4` is the part of size 4 of axis a, with 2 before it."""
    sizes = {match[1]: int(match[2]) for match in re.finditer(r"'([^']+)'=(\d+)", axes)}
    parts = [
        (m[1], int(m[2] or 1), int(m[3] or sizes[m[1]])) for m in re.finditer(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    shape: list[int] = []
    picked: dict[tuple[str, int], int] = {}  # (axis, size before it) -> dim of the mesh with its axes split up
    for axis, size in sizes.items():
        before = 1
        for start, part in sorted((start, part) for name, start, part in parts if name == axis):
            shape.append(start // before)
            picked[axis, start] = len(shape)
            shape.append(part)
            before = start * part
        shape.append(size // before)
    if math.prod(shape) != math.prod(sizes.values()):
        raise ValueError(f"replica groups: {over} do not divide the mesh {axes}")
    numbers = _mesh_ids(ids, math.prod(shape)).reshape(shape)
    dims = [picked[axis, start] for axis, start, _ in parts]
    grouped = np.moveaxis(numbers, dims, range(len(shape) - len(dims), len(shape)))
    return grouped.reshape(-1, math.prod(part for _, _, part in parts))


def _mesh_ids(written: str | None, size: int) -> np.ndarray:
    if not written:
        return np.arange(size)
    return _iota(written) if written.startswith("[") and "T" in written else np.array(_numbers(written.strip("[]")))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
