"""A profile of some steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax


class Profile:
    """A trace of the steps of `log.profile_steps`, for TensorBoard or xprof."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._steps, self._folder = steps or (0, 0), folder
        self._on = False

    def before(self, step: int, state: Any) -> None:
        """Of the updates that are made, `step` is the next; it takes `state`, and all before it are to be done."""
        wanted = self._steps[0] <= step < self._steps[1]
        if wanted != self._on:
            jax.block_until_ready(state)
            if wanted:
                jax.profiler.start_trace(self._folder)
                self._on = True
            else:
                self.__exit__()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
