"""Whether what a rehearsal writes can be written, asked before anything is compiled."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

STDOUT = Path("-")


def problems_of(outputs: Mapping[str, Path]) -> list[str]:
    """What is wrong with the paths of outputs, which are by option ("json", "html", ...). Leaves files as they are."""
    problems = []
    seen: dict[str, str] = {}
    for kind, path in outputs.items():
        if path == STDOUT:
            problems += [] if kind == "json" else [f"--{kind}=-: only --json can go to stdout"]
            continue
        first = seen.setdefault(_file_of(path) or kind, kind)
        if first != kind:
            problems.append(f"--{kind}={path}: is the file of --{first}, too; give each its own")
        elif problem := _problem_of(path):
            problems.append(f"--{kind}={path}: {problem}")
    return problems


def _file_of(path: Path) -> str:
    """Equal for two names of one file, links among them; empty for a device or a pipe, which may take several."""
    try:
        found = path.stat()
    except OSError:
        return os.path.realpath(path)
    return f"{found.st_dev}:{found.st_ino}" if stat.S_ISREG(found.st_mode) else ""


def _problem_of(path: Path) -> str:
    try:
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            return f"there is no folder {folder} to write it into"
        if path.is_dir():
            return "is a folder; give a file"
        _try(path)
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return ""


def _try(path: Path) -> None:
    """Raise OSError where `path` cannot be written to."""
    exists = path.exists()
    if exists and not path.is_file():
        if path.is_char_device():  # /dev/full refuses only what is written
            path.write_bytes(b"\n")
        return  # a pipe waits for its reader
    with path.open("ab"):
        pass
    if not exists:
        Path(os.path.realpath(path)).unlink()
