"""Files of checkpoints: read without trust, written to outlast a power cut, renamed before they are deleted."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from sharded_train.checkpoint.errors import Damage

SAVING = "saving"  # ours while a checkpoint is written and verified
DELETING = "deleting"  # ours while one is removed
DAMAGED = "damaged"  # set aside, never deleted
ROLLED_BACK = "rolled_back"  # set aside by a roll-back to an earlier step
_LEFTOVER = re.compile(rf"\d+(\.\d+)?\.({SAVING}|{DELETING}|({SAVING}\.)?orbax-checkpoint-tmp)")
_PROBE = re.compile(r"\.probe-\d+-\d+")
_MOST_FILES, _DEEPEST = 1_000_000, 8
_PIECE = 1 << 20


def is_step(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= 18 and str(int(name)) == name


def numbered(directory: Path) -> list[int]:
    """The steps that a directory has a folder for, ascending, whatever is in it."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_step(path.name) and path.is_dir())


def set_aside(directory: Path) -> list[str]:
    """Names of the checkpoints that were put aside in a directory."""
    if not directory.is_dir():
        return []
    pattern = re.compile(rf"\d+\.({DAMAGED}|{ROLLED_BACK})(-\d+)?")
    return sorted(path.name for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_dir())


def contents(path: Path) -> dict[str, int]:
    """The size of every file below, by its name relative to `path`.

    Raises:
        Damage: there is anything but files and directories (a link leads elsewhere, a pipe is waited for without end),
            or more than a checkpoint has.
    """
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


def _expect(status: os.stat_result, path: Path, *, directory: bool) -> None:
    is_kind = stat.S_ISDIR if directory else stat.S_ISREG
    if not is_kind(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "of another kind"
        raise Damage(f"{path} is {kind}, not a {'directory' if directory else 'file'}")


def read(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes. Raises Damage if it is larger, or something else."""
    descriptor = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Damage(f"{path} is larger than {most:,} bytes")
    return data


def sha256(path: Path) -> str:
    """Hex SHA-256 of a regular file."""
    with os.fdopen(_open(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> int:
    """A link is not followed, and a pipe not waited for."""
    status = path.lstat()
    _expect(status, path, directory=False)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def write(path: Path, data: bytes) -> None:
    """All of the data, on the disk, or nothing."""
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
    """As `sync` for every file and directory below, the deepest first."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def rename(path: Path, to: Path) -> None:
    """Renames within a directory, durably."""
    path.rename(to)
    sync(to.parent)


def put_aside(path: Path, suffix: str) -> Path:
    """Renames a checkpoint to a name that says why it is no candidate: `120.damaged`, or `120.damaged-2`."""
    for aside in _names(path, suffix):
        if not os.path.lexists(aside):
            rename(path, aside)
            return aside
    raise AssertionError("unreachable: there are names without end")


def _names(path: Path, suffix: str) -> Iterator[Path]:
    yield path.with_name(f"{path.name}.{suffix}")
    yield from (path.with_name(f"{path.name}.{suffix}-{i}") for i in itertools.count(2))


def remove(path: Path) -> None:
    """Renamed first: killed half-way through the deletion, it would still look like a checkpoint."""
    deleting = path.with_name(f"{path.name}.{DELETING}")
    if deleting.exists():
        shutil.rmtree(deleting)
    rename(path, deleting)
    shutil.rmtree(deleting)


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed save or deletion left behind. Nothing else is ever deleted unasked."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # a save that was given up may still be writing there
        elif _PROBE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def try_to_write(directory: Path, index: int) -> None:
    """Raises OSError if this process, number `index`, cannot write there."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".probe-{index}-{os.getpid()}"
    probe.write_bytes(b"probe")
    probe.unlink(missing_ok=True)  # process 0 may be clearing up what others left


def free_bytes(directory: Path) -> int:
    """What this user may still write to the disk of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
