"""The checkpoints of a run: what is saved where, which of them count, and which go."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sharded_train.checkpoint import cloud, files, record, restoring, resuming, saving
from sharded_train.checkpoint import owner as owners
from sharded_train.checkpoint.errors import CheckpointError, Damage, reason
from sharded_train.checkpoint.owner import Owner
from sharded_train.checkpoint.peers import Peers
from sharded_train.checkpoint.record import Verified
from sharded_train.checkpoint.resuming import Choice
from sharded_train.errors import ConfigError
from sharded_train.exits import Unanswered

_SEEN = 120.0  # seconds: network file systems remember for up to a minute what was not there


class Checkpointer:
    """The checkpoints of one directory, and of a second one that is used when the first cannot be written.

    Every process calls every method, from its main thread, in the same order. A save runs in the background; the state
    may be donated as soon as `save` returns. Its failure is raised, with the reason, by the next `check`, `wait` or
    `save`. `timeout` (seconds) is how long processes wait for each other.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int = 3,
        *,
        keep_every: int | None = None,
        fallback: Path | str | None = None,
        timeout: float = 600,
    ):
        assert keep >= 1, f"keep={keep}: the newest checkpoint is always kept"
        self.directory = files.place(directory)
        self.fallback = None if fallback is None else files.place(fallback)
        self.saves_to = self.directory
        self.peers = Peers(timeout)
        self.remarks: list[str] = []  # what went wrong beside a save, to be told once
        self._keep, self._keep_every, self._timeout = keep, keep_every, timeout
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[str | None]] | None = None
        self._attempts = 0
        self._owners: dict[Path, Owner] = {}

    @property
    def directories(self) -> list[Path]:
        return [self.directory] if self.fallback is None else [self.directory, self.fallback]

    def check_place(self, directory: Path) -> None:
        """Raises ConfigError where a place for checkpoints cannot be written from here, before hours of work need it.

        Raises Unanswered where a bucket may answer later. On a disk nothing is made.
        """
        if cloud.is_address(directory):
            try:
                files.try_to_write(directory, self.peers.index)
            except OSError as error:
                if isinstance(error, Unanswered) and not error.said_no:
                    raise
                raise ConfigError(f"{directory} cannot be written from here: {reason(error)}") from error
        elif problem := files.hindrance(directory):
            raise ConfigError(problem)

    def claim(self, owner: Owner, places: Iterable[Path]) -> None:
        """For process 0: from now on these places are the owner's, and saves fail where they have become another's."""
        for place in places:
            with contextlib.suppress(OSError):  # one that cannot be written now may be when it is needed
                owner.write(place)
                self._owners[place] = owner

    def steps(self) -> list[int]:
        """Steps with a verified checkpoint, ascending, as this process sees the directories."""
        return [step for step in self.numbered() if _is_verified(self.path(step), step)]

    def numbered(self) -> list[int]:
        """Steps that there is a directory for, ascending, whatever is in it."""
        return sorted({step for directory in self.directories for step in files.numbered(directory)})

    def latest_step(self) -> int | None:
        """The newest step that there is a directory for, as process 0 sees it: all processes get the same answer."""
        return self.peers.first(max(self.numbered(), default=None))  # type: ignore[no-any-return]

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self._found(step) or self.saves_to / str(step)

    def verified(self, step: int) -> Verified:
        """The record of a checkpoint. Raises CheckpointError when it has none that can be read."""
        if not files.exists(self.path(step)):
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}")
        try:
            return record.read(self.path(step), step)
        except Damage as error:
            raise self.damaged(step, error) from error

    def record(self, step: int) -> dict[str, Any]:
        """What the run said of itself when it saved `step`."""
        return self.verified(step).run

    def restore(self, step: int | None, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state of `step` (None: the newest) and its record, placed as the shardings of `abstract_state` say.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
            ConfigError: the checkpoint's leaves, shapes or dtypes are not those of `abstract_state`.
            CheckpointError: there is no such checkpoint, or it is damaged; nothing is moved.
        """
        if step is None:
            step = self.latest_step()
        if step is None:
            raise CheckpointError(f"{self.directory} has no checkpoint")
        found = self.verified(step)
        try:
            return restoring.load(self.path(step), found, abstract_state, self.peers), found.run
        except Damage as error:
            raise self.damaged(step, error) from error

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Begins to write `state` and the record `run` as the checkpoint of `step`, after a save under way."""
        self.wait()
        self._attempts += 1
        hindered = self._hindered(step) if self.peers.index == 0 else None
        try:
            begun = saving.begin(step, self.saves_to / str(step), self._attempts, state, run, self._timeout, hindered)
        except CheckpointError:
            raise
        except Exception as error:
            raise self._not_written(step, reason(error)) from error
        if isinstance(begun, str):
            raise self._not_written(step, begun)
        self._pending = step, self._worker.submit(self._finish, begun)

    def check(self) -> None:
        """Raises if the save that ended last has failed. Cheap: call it at every step."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    @property
    def is_saving(self) -> bool:
        return self._pending is not None

    def wait(self) -> None:
        """Waits until the save under way is on disk, verified, and the checkpoints it replaces are gone."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        if (problem := future.result()) is not None:
            raise self._not_written(step, problem)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def roll_back(self, step: int) -> list[Path]:
        """Puts aside the checkpoints after `step`, so that saves go on from there; where they are now, on process 0."""
        later = [number for number in self.numbered() if number > step] if self.peers.index == 0 else []
        moved = [files.put_aside(self.path(number), files.ROLLED_BACK) for number in later]
        self.peers.first(len(moved))
        return moved

    def damaged(self, step: int, error: Exception) -> CheckpointError:
        """That a checkpoint cannot be read, why, and what to do."""
        path = self.path(step)
        before = max((other for other in self.steps() if other < step), default=None)
        advice = (
            "There is no checkpoint before it."
            if before is None
            else f"The one before it is that of step {before}. To resume from there, move this one away:\n"
            f"  {'gcloud storage mv' if cloud.is_address(path) else 'mv'} {path} {path}.{files.DAMAGED}"
        )
        return CheckpointError(f"{path} cannot be read: {reason(error)}\n{advice}")

    def use_fallback(self) -> bool:
        """From now on saves go to the second directory; whether there is one that was not in use."""
        if self.fallback is None or self.saves_to == self.fallback:
            return False
        self.saves_to = self.fallback
        return True

    def choose(self, resume: str) -> Choice:
        """What `--resume` means here: "auto", "never", "must" or a step. See `resuming.chosen`.

        Returns when this process sees the first of the checkpoints that process 0 chose from.
        """
        told = self.peers.first(resuming.chosen(self, resume) if self.peers.index == 0 else None)
        choice = resuming.Choice.told(told)
        deadline = time.monotonic() + _SEEN
        while choice.steps and self._found(choice.step) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"process {self.peers.index} on {socket.gethostname()} does not see {self.path(choice.step)} after "
                    f"{_SEEN:g} s, and process 0 does: do all hosts share the directory?"
                )
            time.sleep(0.2)
        return choice

    def resume(
        self, choice: Choice, abstract_state: Any, accept: Callable[[Path, dict[str, Any]], None]
    ) -> tuple[int, Any, dict[str, Any]]:
        """The step, state and record to go on from. See `resuming.resume`."""
        return resuming.resume(self, choice, abstract_state, accept)

    def begin_anew(self) -> None:
        """For a run that begins at step 0 where there are checkpoints: they are put aside, together."""
        if self.peers.index == 0:
            resuming.begin_anew(self)
        self.peers.first(None)

    def _found(self, step: int) -> Path | None:
        paths = [directory / str(step) for directory in self.directories]
        return next((path for path in paths if files.exists(path)), None)

    def _hindered(self, step: int) -> str | None:
        """What process 0 finds in the way of a save; the others hear it from there, as they may see another place."""
        try:
            if (path := self._found(step)) is not None:
                return f"{path} is already there: move it away to save step {step} again"
            ours = self._owners.get(self.saves_to)
            if ours is not None and (now := owners.read(self.saves_to)) is not None and now != ours:
                return f"{self.saves_to} is by now that of {now.words}: give each run a place of its own"
            files.remove_leftovers(self.saves_to)
        except OSError as error:
            return f"what is left of other saves in {self.saves_to} cannot be removed: {reason(error)}"
        return None

    def _finish(self, save: saving.Save) -> str | None:
        """In the background: the new checkpoint is verified first, only then do old ones go."""
        problem = save.finish()
        if save.peers.index == 0:
            try:
                if problem is None:
                    self._prune()
                else:
                    files.remove_leftovers(save.path.parent)  # on a full disk its room is needed
            except OSError as error:
                self.remarks.append(f"checkpoints that are not needed any more cannot be removed: {reason(error)}")
        return problem

    def _prune(self) -> None:
        for step in superseded(self.steps(), self._keep, self._keep_every):
            files.remove(self.path(step))
        for directory in self.directories:
            files.remove_leftovers(directory)

    def _not_written(self, step: int, problem: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} was not written to {self.saves_to / str(step)}: {problem}"
        )


def superseded(steps: list[int], keep: int, keep_every: int | None) -> list[int]:
    """Which of the verified steps go: all but the last `keep` and the multiples of `keep_every`."""
    return [step for step in steps[:-keep] if not (keep_every and step % keep_every == 0)]


def _is_verified(path: Path, step: int) -> bool:
    try:
        record.read(path, step)
    except (Damage, OSError):  # whatever is wrong with it, it is not ours to delete or to recommend
        return False
    return True
