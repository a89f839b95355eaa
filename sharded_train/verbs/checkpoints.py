"""`sharded-train checkpoints`: what a workdir has, whether it is whole, how two differ; roll back, and make room."""

from __future__ import annotations

import json as jsons
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from sharded_train import workdir as layout
from sharded_train.checkpoint import arrays, digest, files, leaves, record
from sharded_train.checkpoint.checkpointer import superseded
from sharded_train.checkpoint.errors import Damage, reason
from sharded_train.checkpoint.record import Verified
from sharded_train.config import differences
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.faults.lock import WorkdirLock
from sharded_train.verbs import checkpoints_tables as tables


def checkpoints(
    action: str,
    steps: list[str],
    workdir: Path,
    *,
    keep: int = 3,
    keep_every: int | None = None,
    set_aside: bool = False,
    json: bool = False,
) -> int:
    """Does one of `options.CHECKPOINT_ACTIONS`. The exit code: DAMAGED where `verify` has found something."""
    directories = _directories(workdir)
    found: Any
    if action in ("rollback", "prune"):
        with WorkdirLock(workdir) as lock:
            lock.take_if_there()
            layout.check_owners(workdir, directories)
            found = (
                _rollback(directories, _one(action, steps))
                if action == "rollback"
                else _prune(directories, keep, keep_every, set_aside)
            )
    elif action == "list":
        found = _list(directories)
    elif action == "show":
        found = _show(_path(directories, _one(action, steps or _newest(directories))))
    elif action == "verify":
        found = _verify([_path(directories, step) for step in steps or _all(directories)])
    else:
        if len(steps) != 2:
            raise ConfigError(f"checkpoints diff: which two? Got {len(steps)}: {' '.join(steps)}")
        found = _diff(*(_path(directories, step) for step in steps))
    if json:
        print(jsons.dumps(found, indent=2))
    else:
        getattr(tables, f"print_{action}")(found)
    return Exit.DAMAGED if action == "verify" and any(one["problem"] for one in found) else Exit.DONE


def _directories(workdir: Path) -> list[Path]:
    """Where the run in a workdir keeps its checkpoints."""
    found = [workdir / layout.CHECKPOINTS]
    if (workdir / layout.CONFIG).exists():
        settings = layout.read_recipe(workdir).checkpoint
        found = [files.place(settings.dir)] if settings.dir is not None else found
        found += [] if settings.fallback_dir is None else [files.place(settings.fallback_dir)]
    if not any(files.exists(path) for path in found):
        raise ConfigError(f"{workdir} has no checkpoints: there is no {' or '.join(map(str, found))}")
    return found


def _all(directories: list[Path]) -> list[str]:
    return [str(step) for step in sorted({step for path in directories for step in files.numbered(path)})]


def _newest(directories: list[Path]) -> list[str]:
    if not (steps := _all(directories)):
        raise ConfigError(f"there is no checkpoint yet in {' or '.join(map(str, directories))}")
    return steps[-1:]


def _one(action: str, steps: list[str]) -> str:
    if len(steps) != 1:
        raise ConfigError(f"checkpoints {action}: one step is wanted, got {len(steps)}: {' '.join(steps)}")
    return steps[0]


def _path(directories: list[Path], step: str) -> Path:
    """Of a step in the workdir, or of a directory anywhere."""
    if not files.is_step(step):
        if not files.exists(path := files.place(step)):
            raise ConfigError(f"{step} is neither a step nor the directory of a checkpoint")
        return path
    for directory in directories:
        if files.exists(directory / step):
            return directory / step
    raise ConfigError(f"there is no checkpoint of step {step}; there are {', '.join(_all(directories)) or 'none'}")


def _read(path: Path) -> Verified:
    try:
        return record.read(path)
    except Damage as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error


def _list(directories: list[Path]) -> dict[str, Any]:
    rows = []
    for step in _all(directories):
        path = _path(directories, step)
        row: dict[str, Any] = {"step": int(step), "path": str(path), "verified": False}
        try:
            verified = record.read(path, int(step))
            keys = ("tokens_seen", "mesh", "num_processes", "commit")
            row |= {"verified": True, "num_bytes": verified.num_bytes, "time": verified.time}
            row |= {key: verified.run.get(key) for key in keys}
        except (Damage, OSError) as error:
            row["problem"] = reason(error)
        rows.append(row)
    aside = [str(path / name) for path in directories for name in files.set_aside(path)]
    return {"checkpoints": rows, "set_aside": aside}


def _show(path: Path) -> dict[str, Any]:
    verified, placed = _read(path), arrays.shardings(path)
    return {
        "path": str(path),
        "step": verified.step,
        "time": verified.time,
        "num_bytes": verified.num_bytes,
        "run": verified.run,
        "leaves": {
            name: {
                "array": leaves.describe(leaf),
                "num_bytes": leaves.num_bytes(leaf),
                "sharding": placed.get(name),
                "digest": leaf.digest,
            }
            for name, leaf in verified.leaves.items()
        },
        "files": {name: file.num_bytes for name, file in verified.files.items()},
    }


def _verify(paths: list[Path]) -> list[dict[str, Any]]:
    """Of each what is wrong with it, or None."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for path in paths:
            task = bar.add_task(f"verifying {path.name}", total=None)
            try:
                verified = record.read(path, int(path.name) if files.is_step(path.name) else None)
                hashed = sum(file.num_bytes for file in verified.files.values() if file.sha256 is not None)
                bar.update(task, total=hashed + sum(map(leaves.num_bytes, verified.leaves.values())))
                check_all(path, verified, lambda done, task=task: bar.advance(task, done))  # type: ignore[misc]
                problem = None
            except Damage as error:
                problem = reason(error)
            except OSError as error:
                raise ConfigError(f"{path} could not be read: {error}") from error
            found.append({"path": str(path), "problem": problem})
    return found


def check_all(path: Path, verified: Verified, progress: Callable[[int], None]) -> None:
    """Raises Damage unless files and arrays are what was saved. `progress` is told bytes as they are done."""
    record.check_files(path, verified, progress)
    arrays.check_layout(path, verified.leaves)
    for name, sums in arrays.digests_on_disk(path, verified.leaves, progress=progress).items():
        if digest.as_text(sums) != verified.leaves[name].digest:
            raise Damage(f"{name} in {path} is not what was saved")


def _diff(a: Path, b: Path) -> dict[str, Any]:
    first, second = _read(a), _read(b)
    for path, verified in ((a, first), (b, second)):
        try:
            arrays.check_layout(path, verified.leaves)
        except Damage as error:
            raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    same = [n for n, x in first.leaves.items() if n in second.leaves and _alike(x, second.leaves[n])]
    configs = [one.run.get("config") or {} for one in (first, second)]
    return {
        "paths": [str(a), str(b)],
        "only": {
            str(a): [f"{n}: {leaves.describe(x)}" for n, x in first.leaves.items() if n not in same],
            str(b): [f"{n}: {leaves.describe(x)}" for n, x in second.leaves.items() if n not in same],
        },
        "config": differences(*configs),
        "leaves": {
            name: None
            if first.leaves[name].digest == second.leaves[name].digest
            else _difference(a, b, name, first.leaves[name])
            for name in same
        },
    }


def _alike(x: Any, y: Any) -> bool:
    return leaves.describe(x) == leaves.describe(y)


def _difference(a: Path, b: Path, name: str, leaf: Any) -> dict[str, float]:
    """Of two leaves of one shape: how many elements differ, by how much at most, and relative to the first's norm."""
    differing, largest, squares, norm = 0, 0.0, 0.0, 0.0
    for start, values in arrays.pieces(a, name, leaf):
        part = tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))
        others = np.empty_like(values)
        for at, piece in arrays.pieces(b, name, leaf, [part]):
            inside = tuple(slice(i - s, i - s + n) for i, s, n in zip(at, start, piece.shape, strict=True))
            others[inside] = piece
        differing += int((values != others).sum())
        x, y = values.astype(np.float64), others.astype(np.float64)
        largest = max(largest, float(np.abs(x - y).max(initial=0)))
        squares, norm = squares + float(((x - y) ** 2).sum()), norm + float((x**2).sum())
    return {
        "differing": differing,
        "of": math.prod(leaf.shape),
        "largest": largest,
        "relative": math.sqrt(squares / norm) if norm else math.inf,
    }


def _rollback(directories: list[Path], step: str) -> dict[str, Any]:
    path = _path(directories, step)
    verified = _read(path)
    try:
        record.check_files(path, verified)
    except Damage as error:
        raise ConfigError(f"{path} is damaged: {reason(error)}; choose another step") from error
    later = [number for number in _all(directories) if int(number) > verified.step]
    moved = [str(files.put_aside(_path(directories, number), files.ROLLED_BACK)) for number in later]
    return {"step": verified.step, "set_aside": moved}


def _prune(directories: list[Path], keep: int, keep_every: int | None, set_aside: bool) -> dict[str, Any]:
    """The newest verified one always stays, and what is not verified is never touched."""
    listed = _list(directories)
    verified = [row["step"] for row in listed["checkpoints"] if row["verified"]]
    paths = [_path(directories, str(step)) for step in superseded(verified, keep, keep_every)]
    paths += [files.place(path) for path in listed["set_aside"]] if set_aside else []
    freed = 0
    for path in paths:
        freed += files.num_bytes(path)
        if files.is_step(path.name):
            files.remove(path)
        else:
            files.remove_tree(path)
    return {"deleted": list(map(str, paths)), "num_bytes": freed}
