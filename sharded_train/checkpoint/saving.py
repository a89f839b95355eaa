"""One save, from the devices to a verified checkpoint: what happens in the background, and in which order.

    digest on the devices -> arrays to N.0.saving (Orbax) -> fsync of every file and directory -> read back, digests
    compared -> VERIFIED record, fsync -> rename to N, fsync of the parent

Whatever happens before the rename leaves a directory that is no candidate; after it the checkpoint is whole. Every
process reads back its own part. Process 0 adds the digests up, writes the record and renames; all hear the outcome. In
a bucket it is written to N at once, and the record is what makes it a candidate.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sharded_train.checkpoint import arrays, digest, files, record
from sharded_train.checkpoint.errors import Damage, reason
from sharded_train.checkpoint.leaves import by_name, num_bytes
from sharded_train.checkpoint.peers import Peers

_POLL = 0.5  # seconds between looks at the others while Orbax writes
_RESERVE = 16 << 20  # bytes to leave free on the disk, and for what a checkpoint holds beside its arrays


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that has begun; `finish` runs in a thread of its own, on every process."""

    step: int
    path: Path  # the checkpoint's, in the end
    temporary: Path
    run: dict[str, Any]
    stored: dict[str, jax.ShapeDtypeStruct]
    parts: dict[str, list[arrays.Part]]  # that this process reads back
    sums: jax.Array
    response: arrays.Response
    peers: Peers  # of this save alone

    def finish(self) -> str | None:
        """None when the checkpoint is there, else why not: the same on all processes."""
        problem: str | None = None
        partial: dict[str, digest.Digest] = {}
        try:
            self._written()
            files.sync_all(self.temporary)
            partial = arrays.digests_on_disk(self.temporary, self.stored, self.parts)
        except Exception as error:  # whatever it is, the others must hear of it
            problem = reason(error)
            self.peers.post("failed", f"{self._who()}{problem}")
        told = self.peers.gathered([problem and f"{self._who()}{problem}", partial])
        outcome = None if told is None else self._concluded(told)
        return self.peers.first(outcome)  # type: ignore[no-any-return]

    def _written(self) -> None:
        """Returns when Orbax has written everything; raises when it or another process could not."""
        while True:
            try:
                self.response.result(timeout=_POLL)
                return
            except concurrent.futures.TimeoutError:
                if (failed := self.peers.posted("failed")) is not None:
                    raise Damage(f"given up: {failed}") from None

    def _concluded(self, told: list[Any]) -> str | None:
        """On process 0, when all have said what they found."""
        problems = [problem for problem, _ in told if problem and "given up: " not in problem]
        problems += [problem for problem, _ in told if problem]
        if problems:
            return problems[0]  # type: ignore[no-any-return]
        try:
            self._publish([partial for _, partial in told])
        except Exception as error:
            return f"{self._who()}{reason(error)}"
        return None

    def _publish(self, partials: list[dict[str, digest.Digest]]) -> None:
        wanted = digest.as_digests(self.stored, self.sums)
        for name, expected in wanted.items():
            found: digest.Digest = (0, 0)
            for partial in partials:
                found = digest.added(found, (partial[name][0], partial[name][1]))
            if found != expected:
                raise Damage(
                    f"{name} was read back from {self.temporary} with the digest {digest.as_text(found)}, but has "
                    f"{digest.as_text(expected)} on the devices: a fault of memory, disk or driver between them"
                )
        leaves = {
            name: record.Leaf(leaf.dtype, tuple(leaf.shape), digest.as_text(wanted[name]))
            for name, leaf in self.stored.items()
        }
        found_files = record.describe_files(self.temporary)
        record.write(self.temporary, record.Verified(self.step, leaves, found_files, self.run, time.time()))
        files.publish(self.temporary, self.path)

    def _who(self) -> str:
        return f"process {self.peers.index} on {socket.gethostname()}: " if self.peers.count > 1 else ""


def begin(
    step: int, path: Path, attempt: int, state: Any, run: Mapping[str, Any], timeout: float, hindered: str | None = None
) -> Save | str:
    """Begins to save a state; its arrays may be donated as soon as this returns. Or why it cannot be.

    Every process calls it. That one of them cannot write, or is `hindered`, is found out here, where nobody waits for
    it yet.
    """
    peers = Peers(timeout)
    leaves = by_name(state)
    temporary = files.temporary(path, attempt)
    problem = hindered or _cannot_write(path, sum(map(num_bytes, leaves.values())), peers.index)
    for index, told in enumerate(peers.all(problem)):
        if told is not None:
            return f"process {index}: {told}" if peers.count > 1 else str(told)
    stored = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves.items()}
    parts, sums = arrays.own_parts(leaves), digest.on_devices(leaves)
    try:
        response = arrays.save_async(temporary, leaves, run, timeout)
    except Exception as error:  # told when the save is finished: the others are under way, and wait for this process
        response = concurrent.futures.Future()
        response.set_exception(error)
    return Save(step, path, temporary, dict(run), stored, parts, sums, response, peers)


def _cannot_write(path: Path, num_bytes: int, index: int) -> str | None:
    """What hinders this process to write a checkpoint there, or nothing."""
    directory = path.parent
    try:
        files.try_to_write(directory, index)
        if index == 0:
            files.announce(path)
        free = files.free_bytes(directory)
    except OSError as error:
        return f"{directory} cannot be written: {reason(error)}"
    if free < num_bytes + _RESERVE:
        return (
            f"{directory} has {free:,} bytes free, and a checkpoint takes {num_bytes:,} + {_RESERVE:,} = "
            f"{num_bytes + _RESERVE:,}: make {num_bytes + _RESERVE - free:,} bytes free"
        )
    return None
