"""Keeps off the terminal what XLA logs of a program that does not fit, which the rehearsal says in words itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from sharded_train.noise import stderr_to

NOISE = (  # what these say is a matter of memory: the verdict has it
    "hlo_rematerialization.cc",
    "gpu_hlo_schedule.cc",
)
FILTER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the compiler, whose words still pass
noise = [words.encode() for words in sys.argv[1:]]
for line in sys.stdin.buffer:
    if not any(words in line for words in noise):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Drops the lines of NOISE that are written to stderr meanwhile, from C++ too; all others pass at once.

    A process of its own filters, so that also the last words of a compiler that aborts arrive.
    """
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", FILTER, *NOISE], stdin=subprocess.PIPE) as filtering:
        assert filtering.stdin is not None
        try:
            with stderr_to(filtering.stdin.fileno()):
                yield
        finally:
            filtering.stdin.close()  # the filter ends with its input
