"""The VERIFIED record: what a checkpoint was when it had been read back and found whole, written last.

A directory without it is no checkpoint. It lists every file with its size and SHA-256, every leaf with its dtype, shape
and digest, and what the run says of itself; the SHA-256 of all that stands beside it, so that the record vouches for
itself too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sharded_train.checkpoint import cloud, files, names
from sharded_train.checkpoint.errors import Damage

NAME = names.VERIFIED
_FORMAT = 1
_MOST_BYTES = 64 << 20  # of a record, and of any file that is not array data
_ARRAYS = "d"  # the folders that Orbax keeps array data in
_HASHED = 64 << 20  # bytes; files above it hold arrays, which have digests, and an index, which has checksums


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array as it was saved."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    digest: str  # of digest.as_text


@dataclasses.dataclass(frozen=True)
class File:
    num_bytes: int
    sha256: str | None  # None: too large to be read twice


@dataclasses.dataclass(frozen=True)
class Verified:
    """The contents of a VERIFIED record. `run` is what the run says: config, data, versions."""

    step: int
    leaves: dict[str, Leaf]
    files: dict[str, File]
    run: dict[str, Any]
    time: float  # seconds since 1970

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def write(path: Path, verified: Verified) -> None:
    """Into the checkpoint at `path`, durably."""
    body = {
        "format": _FORMAT,
        "step": verified.step,
        "time": verified.time,
        "leaves": {name: [leaf.dtype.name, list(leaf.shape), leaf.digest] for name, leaf in verified.leaves.items()},
        "files": {name: [file.num_bytes, file.sha256] for name, file in verified.files.items()},
        "run": verified.run,
    }
    files.write(path / NAME, (_text({"sha256": _sum(body), **body}) + "\n").encode())


def read(path: Path, step: int | None = None) -> Verified:
    """Of the checkpoint at `path`, which is to be that of `step`. Raises Damage when it is not what was written."""
    if not cloud.is_address(path) and (not path.is_dir() or path.is_symlink()):
        raise Damage(f"{path} is not a directory")
    try:
        data = files.read(path / NAME, _MOST_BYTES)
    except FileNotFoundError:
        raise Damage(f"it carries no {NAME} record: it was never found whole, or is not a run's") from None
    try:
        body = json.loads(data)
        claimed = body.pop("sha256")
        if claimed != _sum(body):
            raise ValueError("its checksum is another")
        if body["format"] != _FORMAT:
            raise ValueError(f"its format is {body['format']!r}, and this version reads {_FORMAT}")
        if step is not None and body["step"] != step:
            raise ValueError(f"it is that of step {body['step']!r:.40}")
        return Verified(
            step=_whole(body["step"]),
            leaves={str(name): _leaf(*leaf) for name, leaf in body["leaves"].items()},
            files={_inside(name): File(_whole(size), sha256) for name, (size, sha256) in body["files"].items()},
            run=dict(body["run"]),
            time=float(body["time"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damage(f"its {NAME} record is damaged: {error}") from error


def check_files(path: Path, verified: Verified, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Raises Damage unless the files are those of the record: all sizes, and the contents of those with a SHA-256.

    `progress` is told bytes as they are hashed.
    """
    there = files.contents(path)
    for name, file in verified.files.items():
        if name not in there:
            raise Damage(f"{path / name} is missing")
        if there[name] != file.num_bytes:
            raise Damage(f"{path / name} has {there[name]:,} bytes, {file.num_bytes:,} when it was saved")
    for name, file in verified.files.items():
        if file.sha256 is None:
            continue
        if files.sha256(path / name) != file.sha256:
            raise Damage(f"{path / name} has other contents than when it was saved")
        progress(file.num_bytes)
    for name, size in there.items():
        if size > _MOST_BYTES and not (name in verified.files and PurePosixPath(name).parent.name == _ARRAYS):
            raise Damage(f"{path / name} has {size:,} bytes, and is not the data of an array")


def describe_files(path: Path) -> dict[str, File]:
    """Every file of a checkpoint as it is."""
    sizes = {name: size for name, size in sorted(files.contents(path).items()) if name != NAME}
    return {name: File(size, files.sha256(path / name) if size <= _HASHED else None) for name, size in sizes.items()}


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _leaf(dtype: str, shape: list[int], digest: str) -> Leaf:
    if not isinstance(dtype, str) or len(dtype) > 32 or np.dtype(dtype).name != dtype or np.dtype(dtype).hasobject:
        raise ValueError(f"a leaf's dtype is {dtype!r:.40}")
    return Leaf(np.dtype(dtype), tuple(_whole(size) for size in shape), str(digest))


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r:.40} where a size or a step is expected")
    return number


def _inside(name: str) -> str:
    """A file's name that stays in the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise ValueError(f"the file {name!r:.80} is not inside the checkpoint")
    return name
