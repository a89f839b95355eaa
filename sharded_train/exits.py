"""How a command ends: exit codes that a supervisor, a batch system or a script can act on."""

from __future__ import annotations

import enum
import signal


class Unanswered(OSError):
    """A store does not answer, or `said_no`: that says nothing about what it holds. The command tells the advice."""

    ADVICE = "Is the network up, is the bucket's name right, and may these credentials read it? Then run this again."

    def __init__(self, message: str, said_no: bool = False):
        super().__init__(message)
        self.said_no = said_no


class Exit(enum.IntEnum):
    """The exit codes of every verb. From 64 on the numbers are near those of sysexits.h, which mean the like."""

    DONE = 0  # what was asked for is done: a restart has nothing to do
    FAILED = 1  # it cannot go on, and why is on stderr: a restart would come to the same
    CONFIG = 2  # what was asked for cannot be done; nothing was begun
    DAMAGED = 65  # there are checkpoints, and none of them can be trusted
    IN_USE = 69  # another run has the workdir
    WATCHDOG = 70  # a deadline passed: the stacks of all threads are on stderr
    RETRYABLE = 71  # something broke that a restart may cure: a peer lost, an error of the machine
    SAVE_FAILED = 74  # checkpoints could not be written, several times in a row
    PREEMPTED = 75  # a signal came; the state is saved, and the same command goes on from there
    REPEATED = 77  # the supervisor gave up: too many restarts, or the same step failed again and again
    INTERRUPTED = 130  # stopped at once, by Ctrl-C or a second signal

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "cannot go on",
    Exit.CONFIG: "cannot be done as asked",
    Exit.DAMAGED: "no checkpoint can be trusted",
    Exit.IN_USE: "another run has the workdir",
    Exit.WATCHDOG: "a deadline passed",
    Exit.RETRYABLE: "a fault that a restart may cure",
    Exit.SAVE_FAILED: "checkpoints cannot be written",
    Exit.PREEMPTED: "stopped by a signal and saved",
    Exit.REPEATED: "failed again and again",
    Exit.INTERRUPTED: "stopped at once",
}


class Failure(RuntimeError):
    """What ends a command for a reason that its message tells, with `code`."""

    code = Exit.FAILED


# After these a restart would come to the same, or is not wanted.
FINAL: frozenset[int] = frozenset(
    {Exit.DONE, Exit.FAILED, Exit.CONFIG, Exit.DAMAGED, Exit.IN_USE, Exit.SAVE_FAILED, Exit.PREEMPTED}
    | {Exit.REPEATED, Exit.INTERRUPTED}
)


def is_final(code: int) -> bool:
    """Whether a process that ended with `code` (negative: of that signal) is not to be started again."""
    return code in FINAL


def in_words(code: int) -> str:
    """Such as "code 70: a deadline passed", "killed by SIGKILL", "code 134: aborted in C++"."""
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    if code in set(Exit):
        return f"code {code}: {Exit(code).meaning}"
    if code == 128 + signal.SIGABRT:
        return f"code {code}: aborted in C++"
    return f"code {code}: killed by {_signal_name(code - 128)}" if 128 < code < 160 else f"code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
