"""What happens to checkpoints on disks, done on purpose: for tests/faults and benchmarks/soak.py."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

PAGE = 4096  # bytes


def flip_bit(path: Path, rng: random.Random) -> str:
    """Of one byte of a file."""
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at}"


def zero_page(path: Path, rng: random.Random) -> str:
    """A page that holds anything but zeros: a block that the disk has lost."""
    data = bytearray(path.read_bytes())
    pages = [start for start in range(0, len(data), PAGE) if any(data[start : start + PAGE])]
    start = rng.choice(pages)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)
    return f"page at {start}"


def truncate(path: Path, rng: random.Random) -> str:
    """To any length that it does not have."""
    length = rng.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"to {length} bytes"


def delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return ""


DAMAGES: dict[str, Callable[[Path, random.Random], str]] = {
    "bit flip": flip_bit,
    "zeroed page": zero_page,
    "truncation": truncate,
    "deletion": delete,
}


def kinds_of_files(checkpoint: Path) -> dict[str, list[Path]]:
    """Every file of a checkpoint by its kind: the name, without what is different each time."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        inside = path.relative_to(checkpoint)
        kind = f"{inside.parent}/*" if inside.parent.name == "d" else str(inside)
        kinds.setdefault(kind, []).append(path)
    return kinds


def damage(checkpoint: Path, kind_of_file: str, kind: str, rng: random.Random) -> str | None:
    """Damages a file of a kind; what was done, or None where it cannot be (an empty file has no bits)."""
    path = rng.choice(kinds_of_files(checkpoint)[kind_of_file])
    if kind != "deletion" and path.stat().st_size == 0:
        return None
    return f"{path.relative_to(checkpoint)}: {kind} {DAMAGES[kind](path, rng)}".rstrip()
