"""The settings of checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from sharded_train.checkpoint import names


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is made, where, how many are kept, and what is done when it cannot be written."""

    dir: str | None = (
        None  # where they are, if not in the workdir: an absolute path, or gs://BUCKET/PREFIX; of one run alone
    )
    every: int = 0  # steps; 0: only at the end, and at a signal
    every_minutes: float | None = None  # as well, or instead; process 0's clock decides
    keep: int = 3  # the last so many
    keep_every: int | None = None  # and those of steps that are multiples of this, for good
    fallback_dir: str | None = (
        None  # an absolute path on another disk, or gs://BUCKET/PREFIX: to save to when the workdir fails on and on
    )
    max_failures: int = 5  # saves that fail in a row before the fallback is used, or the run ends
    retry_seconds: float = 15.0  # before the second try; doubled for each further one
    timeout_minutes: float = 10.0  # for processes to wait for each other's part of a save or restore

    def problems(self) -> Iterator[str]:
        """What is wrong with the places, in words; nobody is asked whether they are there."""
        places = {f"checkpoint.{name}": getattr(self, name) for name in ("dir", "fallback_dir")}
        given = {key: text for key, text in places.items() if text is not None}
        yield from (f"{key} = {text!r}: {wrong}" for key, text in given.items() if (wrong := names.misnamed(text)))
        if len(given) == 2 and len({os.path.normpath(text) for text in given.values()}) == 1:
            yield f"{' = '.join(given)} = {self.dir}: a fallback is for when that fails; name another, or none"
