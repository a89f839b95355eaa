"""Keeps off the terminal what XLA logs of a program that does not fit, which the rehearsal says in words itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

NOISE = (  # what these say is a matter of memory: the verdict has it
    "hlo_rematerialization.cc",
    "gpu_hlo_schedule.cc",
)
FILTER = """
import sys
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
    sys.stderr.flush()
    stderr = os.dup(2)
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", FILTER, *NOISE], stdin=subprocess.PIPE) as filtering:
        assert filtering.stdin is not None
        os.dup2(filtering.stdin.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            filtering.stdin.close()  # the filter ends with its input
