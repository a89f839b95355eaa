"""Lines that libraries write from C++ whatever is set, and that say nothing: they need not be shown to people."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOISE = re.compile(
    rb"cudart_stub\.cc"  # the CUDA plugin on a machine without a GPU
    rb"|All log messages before absl::InitializeLog\(\)"
    # Gloo greets all its peers; where they are not all there the numbers differ, and that is no noise.
    rb"|is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\s*$"
)
_START = b"[Gloo] Rank "
_PIECES = re.compile(
    # Possessive: a long row of digits that is none of Gloo's would else be tried in every way to cut it.
    rb"(?:\[Gloo\] Rank |\d++| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*+\s*"
)


def is_noise(line: bytes) -> bool:
    """Whether nobody misses the line."""
    return _NOISE.search(line) is not None


class NoiseFilter:
    """Finds noise in the lines of one process, whose Gloo threads write their greetings into one another's."""

    def __init__(self) -> None:
        self._owed = 0  # ends of lines of greetings that have begun

    def drops(self, line: bytes) -> bool:
        """Whether the next line is noise."""
        if _PIECES.fullmatch(line) is None:
            self._owed = 0
            return is_noise(line)
        begun = line.count(_START)
        if begun <= 1 and self._owed == 0:
            return is_noise(line)
        self._owed = max(0, self._owed + begun - 1)
        return True


def has_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed, with or without CUDA."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


def has_driver() -> bool:
    """Whether there is a driver of NVIDIA's, /dev/dxg being WSL's."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


@contextlib.contextmanager
def quiet_plugin() -> Iterator[None]:
    """Drops the lines by which the CUDA plugin of jax 0.10 says, each time it is loaded, that there is no GPU.

    They are written from C++ before any setting could silence them. All else that is written meanwhile comes after.
    """
    if not has_plugin() or has_driver():
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            with stderr_to(held.fileno()):
                yield
        finally:
            held.seek(0)
            os.write(2, b"".join(line for line in held if not is_noise(line)))


@contextlib.contextmanager
def stderr_to(descriptor: int) -> Iterator[None]:
    """What is written to stderr meanwhile, from C++ too, goes to a file that is open."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
