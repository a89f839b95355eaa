"""What FP8 products saw, by layer and product, in precision.jsonl of the workdir: a line for each step that is told."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sharded_train import workdir as layout
from sharded_train.checkpoint import files

NUMBERS = ("amax", "saturated", "lost", "scale")  # of each tensor; the two in the middle are shares, see `formats`


class PrecisionLog:
    """Writes every so many steps, and at the last one. Begun at step k, what an earlier run wrote beyond goes."""

    def __init__(self, workdir: Path, start_step: int, every: int):
        self._path, self._every = workdir / layout.PRECISION, every
        drop_after(self._path, start_step)

    def go_back(self, step: int) -> None:
        """What was written after `step` is taken away."""
        drop_after(self._path, step)

    def write(self, step: int, told: Mapping[str, jax.Array], *, last: bool) -> None:
        """`told` is `[layers, 4]` by "branch/weight/tensor", see `scaling.told`."""
        if not (last or step % self._every == 0):
            return
        tensors = {}
        for name, numbers in jax.device_get(dict(told)).items():
            tensors[name] = {what: _finite(numbers[:, i]) for i, what in enumerate(NUMBERS)}
        append(self._path, json.dumps({"step": step, "tensors": tensors}, allow_nan=False) + "\n")


def _finite(numbers: np.ndarray) -> list[float | None]:
    """JSON knows no infinity."""
    return [float(f"{x:.6g}") if math.isfinite(x) else None for x in numbers.tolist()]


def append(path: Path, line: str) -> None:
    """All of the line, or nothing and OSError: what is appended when the disk has room again begins a line."""
    data = line.encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def drop_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step`; a line that was being written when its process died goes too."""
    if not path.exists():
        return
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
    if kept != lines:
        files.write(path, "".join(kept).encode())


def read(workdir: Path) -> list[dict[str, Any]]:
    """The lines of a run, without one that was not written to its end."""
    lines = (workdir / layout.PRECISION).read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
