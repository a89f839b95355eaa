"""The processes of a run talking to each other: short texts, and errors of one that are told by all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from sharded_train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Group:
    """This process among `count`. `gather` takes a text of each, and gives every process all of them, in order."""

    index: int
    count: int
    gather: Callable[[str], list[str]]

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """What any process raises inside as a ConfigError all raise at the end, so that none waits for it in vain.

        Nothing inside may wait for other processes.
        """
        if self.count == 1:
            yield
            return
        problems: list[str] = []
        try:
            yield
        except ConfigError as error:
            problems = error.problems
        told = [json.loads(text) for text in self.gather(json.dumps([socket.gethostname(), problems]))]
        if problems:
            raise ConfigError(problems)
        others = [
            f"process {index} on {host}: {problem}" for index, (host, found) in enumerate(told) for problem in found
        ]
        if others:
            raise ConfigError(others)


def everyone() -> Group:
    """All processes of this run."""
    return Group(jax.process_index(), jax.process_count(), _gather)


def _gather(text: str) -> list[str]:
    data = np.frombuffer(text.encode(), np.uint8)
    if jax.process_count() == 1:
        return [text]
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
    padded = np.pad(data, (0, int(sizes.max()) - len(data)))
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
