"""Which checkpoint a run goes on from: process 0 chooses for all; what is damaged is named, stepped over and put aside.

Nothing is renamed before a good checkpoint has been loaded: where all fail, for a reason that may lie in the machine,
everything stays as it is, and the run is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharded_train.checkpoint import files, record, restoring
from sharded_train.checkpoint.errors import Damage, DamagedData, Unreadable, is_passing, reason
from sharded_train.errors import ConfigError

if TYPE_CHECKING:
    from sharded_train.checkpoint.checkpointer import Checkpointer

ANEW = "before"  # what `--resume=never` finds is put aside under this suffix


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to go on from: steps to try, in this order; none: begin at step 0. `damaged` says of steps why they cannot.

    With `exact` the first step was asked for by its number, and those after it are rolled back.
    """

    steps: tuple[int, ...] = ()
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    exact: bool = False
    anew: bool = False

    @property
    def step(self) -> int:
        """Of the run's start, as far as it can be told before anything is loaded."""
        return self.steps[0] if self.steps else 0

    @classmethod
    def told(cls, found: list[Any]) -> Choice:
        """From what `chosen` said, or raises it."""
        kind, value = found
        if kind == "config":
            raise ConfigError(value)
        if kind == "damaged":
            raise DamagedData(value)
        if kind == "unreadable":
            raise Unreadable(value)
        steps, damaged, exact, anew = value
        return cls(tuple(steps), {int(step): why for step, why in damaged}, exact, anew)


def chosen(checkpointer: Checkpointer, resume: str) -> list[Any]:
    """For process 0: what `resume` comes to, in values that can be sent to the others (`Choice.told`).

    auto: the newest step whose record and files are as they were saved; step 0 where there has never been a checkpoint.
    must: the same, but not step 0. never: step 0. A number: that step and no other.
    """
    steps = checkpointer.numbered()[::-1]
    where = " and ".join(map(str, checkpointer.directories))
    if resume == "never":
        return ["chosen", [[], [], False, True]]
    if resume not in ("auto", "must"):
        if int(resume) not in steps:
            have = f"it has {', '.join(map(str, checkpointer.steps()))}" if checkpointer.steps() else "it has none"
            return ["config", f"--resume={resume}: {where} has no checkpoint of step {resume}; {have}"]
        return ["chosen", [[int(resume)], [], True, False]]
    damaged: list[tuple[int, str]] = []
    for i, step in enumerate(steps):
        try:
            record.check_files(checkpointer.path(step), record.read(checkpointer.path(step), step))
        except Exception as error:
            if is_passing(error):
                return ["unreadable", f"{checkpointer.path(step)} could not be read: {reason(error)}"]
            damaged.append((step, reason(error)))
            continue
        return ["chosen", [steps[i:], damaged, False, False]]
    if damaged:
        return ["damaged", _none_left(checkpointer, damaged)]
    aside = [name for path in checkpointer.directories for name in files.set_aside(path) if files.DAMAGED in name]
    if aside:
        return [
            "damaged",
            f"{where} has no checkpoint but those set aside as damaged ({', '.join(aside)}): bring one back, or begin "
            "anew with --resume=never",
        ]
    if resume == "must":
        return ["config", f"--resume=must: {where} has no checkpoint"]
    return ["chosen", [[], [], False, False]]


def resume(
    checkpointer: Checkpointer, choice: Choice, abstract_state: Any, accept: Callable[[Path, dict[str, Any]], None]
) -> tuple[int, Any, dict[str, Any]]:
    """The step, state and record of the first of `choice.steps` that is what was saved. Every process calls it.

    `accept` is asked with a checkpoint's path and record before it is loaded, and raises ConfigError if it does not fit
    the run. What was stepped over is put aside, and is told by `checkpointer.remarks`.

    Raises DamagedData if none is left.
    """
    damaged = dict(choice.damaged)
    for step in choice.steps:
        path = checkpointer.path(step)
        try:
            verified = restoring.all_agree(checkpointer.peers, path, partial(record.read, step=step))
            accept(path, verified.run)
            state = restoring.load(path, verified, abstract_state, checkpointer.peers)
        except Damage as error:
            if choice.exact:
                raise DamagedData(str(checkpointer.damaged(step, error))) from error
            damaged[step] = reason(error)
            continue
        if choice.exact and checkpointer.peers.index == 0:
            moved = checkpointer.roll_back(step)
            checkpointer.remarks += [f"rolled back to step {step}: {aside} is set aside" for aside in moved]
        elif choice.exact:
            checkpointer.roll_back(step)
        _put_aside(checkpointer, damaged)
        return step, state, verified.run
    raise DamagedData(_none_left(checkpointer, list(damaged.items())))


def begin_anew(checkpointer: Checkpointer) -> None:
    """For `--resume=never`, on process 0: what is there is put aside, directory by directory."""
    for directory in checkpointer.directories:
        if files.numbered(directory):
            aside = files.put_aside(directory, ANEW)
            checkpointer.remarks.append(f"the checkpoints that were in {directory} are in {aside}")


def _put_aside(checkpointer: Checkpointer, damaged: dict[int, str]) -> None:
    if checkpointer.peers.index == 0:
        for step, why in damaged.items():
            path = checkpointer.path(step)
            aside = files.put_aside(path, files.DAMAGED)
            checkpointer.remarks.append(f"{path} is damaged and set aside as {aside.name}: {why}")
    checkpointer.peers.first(None)


def _none_left(checkpointer: Checkpointer, damaged: list[tuple[int, str]]) -> str:
    found = "\n".join(f"  {checkpointer.path(step)} cannot be read: {why}" for step, why in damaged)
    return (
        f"no checkpoint can be used, and the run does not begin anew by itself:\n{found}\n"
        "Nothing was changed. Bring one back from a copy, or begin at step 0 with --resume=never."
    )
