"""Lines that libraries write from C++ whatever is set, and that say nothing: they need not be shown to people."""

from __future__ import annotations

import re

_NOISE = re.compile(
    rb"cudart_stub\.cc"  # the CUDA plugin on a machine without a GPU
    rb"|All log messages before absl::InitializeLog\(\)"
    # Gloo greets all its peers; where they are not all there the numbers differ, and that is no noise.
    rb"|is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\s*$"
)


def is_noise(line: bytes) -> bool:
    """Whether nobody misses the line."""
    return _NOISE.search(line) is not None
