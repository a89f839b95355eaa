"""What can be wrong with checkpoints, told apart by what is to be done about it."""

from __future__ import annotations

import errno

from sharded_train.exits import Exit, Failure, Unanswered

_PASSING = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}

_PASSING_WORDS = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
_CLIENTS = {"gcsfs", "aiohttp", "google"}  # what they raise is about the way to the data


class CheckpointError(Failure):
    """A checkpoint could not be written or read; the message names it, the reason and what to do."""


class NotSaved(CheckpointError):
    """Saves failed so often that the run must not go on; what is on disk is as it was."""

    code = Exit.SAVE_FAILED


class Unreadable(CheckpointError):
    """Checkpoints could not be read for a reason that lies in the machine or on the way: they may be as they should."""

    code = Exit.RETRYABLE


class DamagedData(CheckpointError):
    """There are checkpoints and none of them can be used: nobody but a person may decide to do without."""

    code = Exit.DAMAGED


class Damage(ValueError):
    """A checkpoint is not what was verified: it can be stepped over."""


def is_passing(error: BaseException) -> bool:
    """Whether the cause lies in the machine and not in the files: no permission, no memory, no answer."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, Unanswered) or type(error).__module__.partition(".")[0] in _CLIENTS:
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return isinstance(error, MemoryError) or any(word in str(error) for word in _PASSING_WORDS)


def reason(error: BaseException) -> str:
    """The first cause of an error: Orbax wraps it in layers that say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = str(error).split(" [tensorstore_spec")[0].split(" [source locations")[0]
    if isinstance(error, Damage):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
