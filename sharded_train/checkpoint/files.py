"""Files of checkpoints: read without trust, written to outlast a power cut, renamed before they are deleted.

A directory may be an address, gs://BUCKET/PREFIX: what is done there instead is in `cloud`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
from pathlib import Path

from sharded_train.checkpoint import cloud
from sharded_train.checkpoint.errors import Damage
from sharded_train.checkpoint.names import DAMAGED, DELETING, ROLLED_BACK, SAVING, asides, is_aside, is_probe, is_step
from sharded_train.errors import ConfigError

__all__ = ["DAMAGED", "DELETING", "ROLLED_BACK", "SAVING", "is_step"]
_LEFTOVER = re.compile(rf"\d+(\.\d+)?\.({SAVING}|{DELETING}|({SAVING}\.)?orbax-checkpoint-tmp)")
_MOST_FILES, _DEEPEST = 1_000_000, 8
_PIECE = 1 << 20


def place(path: Path | str) -> Path:
    """A directory, or an address that begins with gs://. Raises ConfigError for any other address."""
    if cloud.is_address(path):
        return cloud.place(str(path))
    if "://" in str(path):
        raise ConfigError(f"{path}: wanted a path, or an address that begins with gs://")
    return Path(path).absolute()


def numbered(directory: Path) -> list[int]:
    """The steps that a directory has a folder for, ascending, whatever is in it."""
    if cloud.is_address(directory):
        return cloud.numbered(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_step(path.name) and path.is_dir())


def set_aside(directory: Path) -> list[str]:
    """Names of the checkpoints that were put aside in a directory."""
    if cloud.is_address(directory):
        return cloud.set_aside(directory)
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if is_aside(path.name) and path.is_dir())


def exists(path: Path) -> bool:
    """Whether there is a file, or a directory, whatever is in it."""
    return cloud.exists(path) if cloud.is_address(path) else path.exists()


def contents(path: Path) -> dict[str, int]:
    """The size of every file below, by its name relative to `path`.

    Raises:
        Damage: there is anything but files and directories (a link leads elsewhere, a pipe is waited for without end),
            or more than a checkpoint has.
    """
    if cloud.is_address(path):
        return cloud.contents(path, _MOST_FILES)
    found: dict[str, int] = {}
    _expect(path.lstat(), path, directory=True)
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                below = Path(entry.path)
                if stat.S_ISDIR(status.st_mode):
                    if depth == _DEEPEST:
                        raise Damage(f"{below} lies deeper than anything in a checkpoint")
                    waiting.append((below, depth + 1))
                    continue
                _expect(status, below, directory=False)
                found[below.relative_to(path).as_posix()] = status.st_size
                if len(found) > _MOST_FILES:
                    raise Damage(f"{path} has more than {_MOST_FILES:,} files")
    return found


def num_bytes(path: Path) -> int:
    """Of everything below, whatever it is."""
    if cloud.is_address(path):
        return sum(cloud.contents(path, _MOST_FILES).values())
    return sum(below.lstat().st_size for below in path.rglob("*"))


def _expect(status: os.stat_result, path: Path, *, directory: bool) -> None:
    is_kind = stat.S_ISDIR if directory else stat.S_ISREG
    if not is_kind(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "of another kind"
        raise Damage(f"{path} is {kind}, not a {'directory' if directory else 'file'}")


def read(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes. Raises Damage if it is larger, or something else."""
    if cloud.is_address(path):
        return cloud.read(path, most)
    descriptor = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Damage(f"{path} is larger than {most:,} bytes")
    return data


def sha256(path: Path) -> str:
    """Hex SHA-256 of a regular file."""
    if cloud.is_address(path):
        return cloud.sha256(path)
    with os.fdopen(_open(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> int:
    """A link is not followed, and a pipe not waited for."""
    status = path.lstat()
    _expect(status, path, directory=False)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def write(path: Path, data: bytes) -> None:
    """All of the data, on the disk, or nothing."""
    if cloud.is_address(path):
        return cloud.write(path, data)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """As `sync` for every file and directory below, the deepest first. A bucket has what it has confirmed."""
    if cloud.is_address(path):
        return
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def temporary(path: Path, attempt: int) -> Path:
    """Where the checkpoint of `path` is written until it is verified: there at once, where nothing can be renamed."""
    return path if cloud.is_address(path) else path.with_name(f"{path.name}.{attempt}.{SAVING}")


def announce(path: Path) -> None:
    """For process 0, before anything of the checkpoint at `path` is written."""
    if cloud.is_address(path):
        cloud.announce(path)


def publish(written: Path, path: Path) -> None:
    """A checkpoint with its VERIFIED record becomes that of `path`, durably."""
    if cloud.is_address(path):
        return cloud.published(path)
    rename(written, path)


def rename(path: Path, to: Path) -> None:
    """Renames within a directory, durably."""
    path.rename(to)
    sync(to.parent)


def put_aside(path: Path, suffix: str) -> Path:
    """Renames a checkpoint to a name that says why it is no candidate: `120.damaged`, or `120.damaged-2`."""
    if cloud.is_address(path):
        return cloud.put_aside(path, suffix)
    for aside in map(path.with_name, asides(path.name, suffix)):
        if not os.path.lexists(aside):
            rename(path, aside)
            return aside
    raise AssertionError("unreachable: there are names without end")


def remove(path: Path) -> None:
    """Renamed first: killed half-way through the deletion, it would still look like a checkpoint."""
    if cloud.is_address(path):
        return cloud.remove(path)
    deleting = path.with_name(f"{path.name}.{DELETING}")
    if deleting.exists():
        shutil.rmtree(deleting)
    rename(path, deleting)
    shutil.rmtree(deleting)


def remove_tree(path: Path) -> None:
    """For what is no candidate: nobody mistakes what a kill leaves of it for a checkpoint."""
    if cloud.is_address(path):
        cloud.remove_tree(path)
        return
    shutil.rmtree(path)


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed save or deletion left behind. Nothing else is ever deleted unasked."""
    if cloud.is_address(directory):
        return cloud.remove_leftovers(directory)
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # a save that was given up may still be writing there
        elif is_probe(path.name):
            path.unlink(missing_ok=True)


def try_to_write(directory: Path, index: int) -> None:
    """Raises OSError if this process, number `index`, cannot write there."""
    if cloud.is_address(directory):
        return cloud.try_to_write(directory, index)
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".probe-{index}-{os.getpid()}"
    probe.write_bytes(b"probe")
    probe.unlink(missing_ok=True)  # process 0 may be clearing up what others left


def hindrance(directory: Path) -> str | None:
    """Why a directory cannot be made, or written in, as far as that can be told without trying."""
    parent = directory
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        return f"{directory} cannot be a directory: {parent} is a file"
    return (
        None
        if os.access(parent, os.W_OK)
        else f"{directory} cannot be written: no permission in {parent}, or it is read-only"
    )


def free_bytes(directory: Path) -> int:
    """What this user may still write to the disk of a directory."""
    if cloud.is_address(directory):
        return sys.maxsize
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
