"""Checkpoints in a bucket, gs://BUCKET/PREFIX, where nothing can be renamed: what `files` is for directories.

An object is there whole, or it is not, and all see the same. So the VERIFIED record is written last, into the
checkpoint itself, and is what makes it one. Two objects beside a checkpoint say what is going on with it, and outlast a
kill: `40.saving` from before anything of it is written until it is verified, `40.deleting` from before anything of it
is deleted until all of it is. What is put aside is copied, inside the bucket, and then deleted.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from sharded_train.checkpoint import names
from sharded_train.checkpoint.errors import Damage
from sharded_train.errors import ConfigError
from sharded_train.exits import Unanswered

_PIECE = 16 << 20  # bytes read at once
_SILENCE = 5.0  # seconds without an answer that somebody who waits is told of
_T = TypeVar("_T")


def is_address(path: Path | str) -> bool:
    return str(path).startswith(names.SCHEME)


def place(text: str) -> Path:
    """A place in a bucket: an epath, which is a Path as far as names go; what it holds is asked for here alone."""
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{text}: gs:// needs gcsfs, which is not installed: pip install 'sharded-train[gcs]'")
    if wrong := names.misnamed(text):
        raise ConfigError(f"{text}: {wrong}")
    from etils import epath

    _store()  # before anybody else asks for one
    return cast(Path, epath.Path(text.rstrip("/")))


def kvstore(path: Path) -> dict[str, Any]:
    """For TensorStore."""
    bucket, _, inside = _key(path).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{inside}/"}


def numbered(directory: Path) -> list[int]:
    folders, objects = _children(directory)
    return sorted(int(name) for name in folders if names.is_step(name) and not _is_unfinished(directory, name, objects))


def set_aside(directory: Path) -> list[str]:
    return sorted(name for name in _children(directory)[0] if names.is_aside(name))


def exists(path: Path) -> bool:
    """Whether there is an object, or anything below, that is not about to go."""
    if names.is_step(path.name):
        return int(path.name) in numbered(path.parent)
    return bool(_ask(path, lambda store: store.exists(_key(path))))


def contents(path: Path, most: int) -> dict[str, int]:
    found = _ask(path, lambda store: store.find(_key(path), detail=True))
    below = f"{_key(path)}/"
    sizes = {name.removeprefix(below): one["size"] for name, one in found.items() if name.startswith(below)}
    if not sizes:
        raise FileNotFoundError(f"{path} is not there")
    if len(sizes) > most:
        raise Damage(f"{path} has more than {most:,} objects")
    return sizes


def read(path: Path, most: int) -> bytes:
    size = _ask(path, lambda store: store.info(_key(path)))["size"]
    if size > most:
        raise Damage(f"{path} is larger than {most:,} bytes")
    return b"".join(_pieces(path, size))


def sha256(path: Path) -> str:
    size = _ask(path, lambda store: store.info(_key(path)))["size"]
    summed = hashlib.sha256()
    for piece in _pieces(path, size):
        summed.update(piece)
    return summed.hexdigest()


def write(path: Path, data: bytes) -> None:
    _ask(path, lambda store: store.pipe_file(_key(path), data))


def announce(path: Path) -> None:
    """Before anything of the checkpoint at `path` is written."""
    write(_beside(path, names.SAVING), b"")


def published(path: Path) -> None:
    """After the VERIFIED record of the checkpoint at `path` has been."""
    _delete(_beside(path, names.SAVING))


def put_aside(path: Path, suffix: str) -> Path:
    """Copies what is at `path` to a name that says why it is no candidate, and deletes it here. Checkpoints of a
    directory go one by one: each is whole, here or there, whenever this is killed.
    """
    there = _children(path.parent)[0]
    aside = path.with_name(next(name for name in names.asides(path.name, suffix) if name not in there))
    parts = [("",)] if names.is_step(path.name) else [(str(step),) for step in numbered(path)]
    for part in parts:
        _copy(path.joinpath(*part), aside.joinpath(*part))
        remove(path.joinpath(*part))
    return aside


def remove(path: Path) -> None:
    """Said first: killed half-way through the deletion, it would still look like a checkpoint."""
    write(_beside(path, names.DELETING), b"")
    _delete(path / names.VERIFIED)
    remove_tree(path)
    _delete(_beside(path, names.DELETING))


def remove_tree(path: Path) -> bool:
    """Deletes everything below; whether there was anything."""
    try:
        _ask(path, lambda store: store.rm(f"{_key(path)}/", recursive=True))
    except FileNotFoundError:
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed save or deletion left behind. Nothing else is ever deleted unasked."""
    _, objects = _children(directory)
    for name in objects:
        step, _, what = name.partition(".")
        if names.is_step(step) and what in (names.SAVING, names.DELETING):
            if _is_unfinished(directory, step, objects) and remove_tree(directory / step) and what == names.SAVING:
                continue  # until nothing comes any more: a save that was given up may still be writing there
            _delete(directory / name)
        elif names.is_probe(name):
            _delete(directory / name)


def try_to_write(directory: Path, index: int) -> None:
    probe = directory / f".probe-{index}-{os.getpid()}"
    write(probe, b"probe")
    _delete(probe)


def _is_unfinished(directory: Path, step: str, objects: set[str]) -> bool:
    if f"{step}.{names.DELETING}" in objects:
        return True
    return f"{step}.{names.SAVING}" in objects and not exists(directory / step / names.VERIFIED)


def _children(directory: Path) -> tuple[set[str], set[str]]:
    """The names of folders and of objects right below; none where there is nothing."""
    try:
        found = _ask(directory, lambda store: store.ls(_key(directory), detail=True))
    except FileNotFoundError:
        return set(), set()
    folders, objects = set[str](), set[str]()
    for one in found:
        name = one["name"].rstrip("/").rpartition("/")[2]
        (folders if one["type"] == "directory" else objects).add(name)
    return folders, objects


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    for start in range(0, size, _PIECE):
        part = {"start": start, "end": min(size, start + _PIECE)}
        yield _ask(path, lambda store, part=part: store.cat_file(_key(path), **part))  # type: ignore[misc]


def _copy(path: Path, to: Path) -> None:
    """Every object below, inside the bucket; the VERIFIED record last."""
    for name in sorted(contents(path, 1 << 62), key=lambda name: (name == names.VERIFIED, name)):
        names_of_both = f"{_key(path)}/{name}", f"{_key(to)}/{name}"
        _ask(path, lambda store, both=names_of_both: store.cp_file(*both))  # type: ignore[misc]


def _delete(path: Path) -> None:
    try:
        _ask(path, lambda store: store.rm_file(_key(path)))
    except FileNotFoundError:
        return


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _key(path: Path) -> str:
    """BUCKET/NAME, as gcsfs has it."""
    return str(path).removeprefix(names.SCHEME)


def _ask(path: Path, do: Callable[[Any], _T]) -> _T:
    """What the store answers. Raises Unanswered where it does not: that says nothing about the objects."""
    text = f"note: {path}: no answer for {_SILENCE:g} s; it is asked again for up to a minute"
    waiting = threading.Timer(_SILENCE, print, [text], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        return do(_store())
    except (FileNotFoundError, Damage):
        raise
    except Exception as error:
        from gcsfs.retry import is_retriable

        said_no = not (is_retriable(error) or isinstance(error, TimeoutError))
        raise Unanswered(f"{path}: {type(error).__name__}: {error}", said_no) from None
    finally:
        waiting.cancel()


@functools.cache
def _store() -> Any:
    """The client, which Orbax has another of: neither may remember listings, which are out of date at once."""
    import fsspec

    log = logging.getLogger("gcsfs")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)  # else it prints tracebacks of what Unanswered tells
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
