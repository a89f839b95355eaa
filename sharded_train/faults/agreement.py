"""Before the first step: all processes run the same code with the same config, see one directory, compile one program.

Where they do not, a run does not fail but hang, or trains something else on each host; so it is found here and named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sharded_train
from sharded_train import config
from sharded_train.errors import ConfigError
from sharded_train.faults.group import Group

_WAIT = 10.0  # seconds for another host's new file to be seen: network file systems remember what was not there
_MOST = 10  # differences told of one process


def check(group: Group, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Raises ConfigError, on all processes, if one has another config, code or package than process 0 has.

    `settings` is what `config.to_dict` made of the recipe.
    """
    if group.count == 1:
        return
    here = {"config": dict(settings), "code": code_digest(), "packages": dict(versions)}
    text = json.dumps(here, sort_keys=True)
    if len(set(group.gather(digest(text)))) == 1:
        return
    first, *others = [json.loads(other) for other in group.gather(text)]
    raise ConfigError(
        [
            "the processes of this run are not alike (process 0 -> the other):",
            *(f"  process {i}: {line}" for i, other in enumerate(others, 1) for line in _differences(first, other)),
        ]
    )


def same_data(group: Group, described: Mapping[str, Any]) -> None:
    """Raises ConfigError, on all processes, if one has other text than process 0: each trains on its own part of it.

    `described` is what a checkpoint says of its data, with the fingerprint.
    """
    if len(set(group.gather(described["fingerprint"]))) == 1:
        return
    first, *others = [json.loads(text) for text in group.gather(json.dumps(described))]
    found = [
        f"  process {i}: {key}: {first[key]} -> {other.get(key)}"
        for i, other in enumerate(others, 1)
        for key in first
        if first[key] != other.get(key)
    ]
    raise ConfigError(
        [
            "the processes of this run have different data (process 0 -> the other):",
            *_shortened(found),
            "Do all hosts have the same files, and, where data.files are relative, the same working directory?",
        ]
    )


def same_program(group: Group, text: Callable[[], str]) -> None:
    """Raises ConfigError, on all processes, if one would compile another program; `text()` is what XLA is given."""
    if group.count == 1:
        return
    told = group.gather(digest(text()))
    odd = [str(index) for index, other in enumerate(told) if other != told[0]]
    if odd:
        raise ConfigError(
            f"process{'es' * (len(odd) > 1)} {', '.join(odd)} would compile another train step than process 0, from "
            "the same config and code: do environment variables (XLA_FLAGS, JAX_*) or devices differ between hosts?"
        )


def probe(group: Group, workdir: Path, wait: float = _WAIT) -> None:
    """Raises ConfigError, on all processes, unless every process can write in `workdir` and sees what process 0 wrote.

    Makes the directory. Takes no more than `wait` seconds when something is wrong.
    """
    if group.count == 1:
        return
    token = group.gather(secrets.token_hex(8))[0]
    files = [workdir / f".probe-{token}-{index}" for index in range(group.count)]
    try:
        with group.shared_errors():
            if group.index == 0:
                _write(files[0], token)
        with group.shared_errors():
            if group.index > 0:
                _see(files[0], wait, "what process 0 has written there")
                _write(files[group.index], token)
        with group.shared_errors():
            if group.index == 0:
                for index, file in enumerate(files):
                    _see(file, wait, f"what process {index} has written there")
    finally:
        with contextlib.suppress(OSError):
            files[group.index].unlink()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def code_digest() -> str:
    """Of every source file of this package."""
    package = Path(sharded_train.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _write(file: Path, token: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    except OSError as error:
        raise ConfigError(f"{file.parent} cannot be written from here: {error.strerror}") from error


def _see(file: Path, wait: float, what: str) -> None:
    end = time.monotonic() + wait
    while not file.exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"{file.parent} is not the same directory for all processes: {what} is not seen here after {wait:g} s; "
                "it must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def _differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = config.differences(first["config"], other["config"])
    if first["code"] != other["code"]:
        found.append(f"other source code of sharded_train: {first['code'][:12]} -> {other['code'][:12]}")
    packages = {**first["packages"], **other["packages"]}
    found += [
        f"{name}: {first['packages'].get(name)} -> {other['packages'].get(name)}"
        for name in packages
        if first["packages"].get(name) != other["packages"].get(name)
    ]
    return _shortened(found)


def _shortened(found: list[str]) -> list[str]:
    return [*found[:_MOST], *([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])]
