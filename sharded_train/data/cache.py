"""Files that can be built again: written whole or not at all, and checked before they are trusted."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharded_train.errors import ConfigError


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's contents, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*parts: Any) -> str:
    """Hex SHA-256 of values, by their JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_whole(path: Path, build: Callable[[Path], object]) -> None:
    """Make `path` hold what `build` writes to the path it is given; until all of it is there, nothing is.

    Any number of processes may do this to one path at a time: each writes a temporary file of its own and renames it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"data: cannot write {path}: {error}. Give data.cache_dir a directory with room") from error


def cached_file(path: Path, build: Callable[[Path], None], progress: Callable[[str], None]) -> str:
    """Make `path` hold what `build` writes to the path it is given, and return the SHA-256 of the contents.

    Name `path` after everything its contents follow from. Beside it lies `path.sha256`; a file that differs from
    its checksum is built again, and `progress` is told. Any number of processes may do this at a time: as all write
    the same bytes it does not matter who is last.
    """
    checksum = path.with_name(path.name + ".sha256")
    if path.exists():
        found = file_sha256(path)
        if checksum.exists() and checksum.read_text().split()[:1] == [found]:
            return found
        progress(f"{path} is damaged (its contents differ from {checksum.name}): building it again")

    def build_with_checksum(temporary: Path) -> None:
        build(temporary)
        # The checksum goes first: wherever the contents can be seen, it can be seen too.
        text = f"{file_sha256(temporary)}  {path.name}\n"
        write_whole(checksum, lambda note: note.write_text(text))

    write_whole(path, build_with_checksum)
    return checksum.read_text().split()[0]
