"""Whose a place for checkpoints outside of the workdir is, where no lock of a workdir hinders a second run.

A record in the place names the run, and the start of it, that saves there. The latest start has the place: the one
before finds another record there at its next save, which fails. So checkpoints of two runs never mix.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import time
from pathlib import Path

from sharded_train.checkpoint import cloud, files

NAME = "OWNER"
_MOST_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class Owner:
    """One start of a run."""

    run: str  # the same in all of its starts
    workdir: str
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)
    since: float = dataclasses.field(default_factory=time.time)  # seconds since 1970
    start: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    @property
    def words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"the run in {self.workdir}, started by process {self.pid} on {self.host} at {since}"

    def write(self, place: Path) -> None:
        if not cloud.is_address(place):
            place.mkdir(parents=True, exist_ok=True)
        files.write(place / NAME, json.dumps(dataclasses.asdict(self)).encode())


def read(place: Path) -> Owner | None:
    """Who has a place; None where nobody has claimed it, or the record cannot be read."""
    try:
        return Owner(**json.loads(files.read(place / NAME, _MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
