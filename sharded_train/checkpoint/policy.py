"""When a run saves, and what it does when a save fails: what the training loop asks every step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from sharded_train.checkpoint.checkpointer import Checkpointer
from sharded_train.checkpoint.config import CheckpointConfig
from sharded_train.checkpoint.errors import CheckpointError, NotSaved

# Process 0 decides in the turn of step n, before it starts step n + 1, for step n + 2. Another process asks in its turn
# of n + 2 only after it has seen the metrics of n + 1, which process 0 had to start: so all hear in time.
_LEAD = 2


def note(text: str) -> None:
    """What hinders one process hinders all, and each says so where its other troubles stand."""
    print(f"note: {text}", file=sys.stderr, flush=True)


class SavePolicy:
    """Says which steps are saved and sees to it that they are. Every process makes one and asks it at every step.

    All processes hear the same outcome of every save, in the same order, before the next one begins: what follows from
    it (how many failed, where to save to) is the same on all without a word. `tell` is given a line for people.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        tell: Callable[[str], None] = note,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._checkpointer, self._config, self._tell, self._clock = checkpointer, config, tell, clock
        self._begun_at = clock()
        self._failures = 0
        self._retry_at = 0.0
        self._given_up: str | None = None
        self._last_record: dict[str, Any] = {}
        self._decisions = 0
        self._decided: tuple[int, str | None] | None = None
        self._saving: int | None = None
        self._saved: int | None = None
        self._look(wait=False)  # tells what was found while the run was resumed

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Tells of a save that has failed since.

        Raises NotSaved, on all processes at the same step, when saves have failed too often.
        """
        self._look(wait=False)
        every = self._config.every
        asked = self._agreed(step)
        return asked or (every > 0 and step % every == 0)

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Begins to save; a failure is told, and tried again at a later step."""
        self._look(wait=True)
        self._begun_at, self._last_record, self._saved = self._clock(), run, None
        try:
            self._checkpointer.save(step, state, run)
            self._saving = step
        except CheckpointError as error:
            self._failed(error)

    def settle(self) -> None:
        """Returns when no save is under way; one that has failed is told of, and counts."""
        self._look(wait=True)

    def finish(self, step: int, state: Callable[[], Any]) -> None:
        """Returns when `step`, which `save` was called for last, is saved, however often it has to be tried.

        Raises NotSaved when that is too often.
        """
        self._look(wait=True)
        while self._saved != step:
            if self._given_up is not None:
                raise NotSaved(self._given_up)
            time.sleep(max(0.0, self._retry_at - self._clock()))
            self.save(step, state(), self._last_record)
            self._look(wait=True)

    def _look(self, *, wait: bool) -> None:
        """Hears how the save under way has ended, if it has."""
        try:
            self._checkpointer.wait() if wait else self._checkpointer.check()
        except CheckpointError as error:
            self._saving = None
            self._failed(error)
        if self._saving is not None and not self._checkpointer.is_saving:
            self._saved, self._saving = self._saving, None
            if self._failures:
                self._tell(f"the checkpoint of step {self._saved} is written, after {self._failures} that failed")
            self._failures = 0
        while self._checkpointer.remarks:
            self._tell(self._checkpointer.remarks.pop(0))

    def _failed(self, error: CheckpointError) -> None:
        self._failures += 1
        most, directory = self._config.max_failures, self._checkpointer.saves_to
        delay = 0.0 if self._failures == 1 else self._config.retry_seconds * 2 ** (self._failures - 2)
        self._retry_at = self._clock() + delay
        what = f"{error}\n  (failure {self._failures} of at most {most} in a row"
        if self._failures < most:
            again = "at the next step" if not delay else f"in {delay:g} s"
            self._tell(f"{what}; tried again {again}. Checkpoints before it are as they were.)")
        elif self._checkpointer.use_fallback():
            self._failures, self._retry_at = 0, 0.0
            self._tell(f"{what}; from now on checkpoints go to {self._checkpointer.saves_to}.)")
        else:
            self._given_up = f"{error}\n{self._failures} saves in a row have failed in {directory}: the run ends here"

    def _agreed(self, step: int) -> bool:
        """Whether process 0 has decided to save after `step`, or, for all to raise here, to stop."""
        peers = self._checkpointer.peers
        if peers.count == 1:
            self._decided = (step, self._given_up) if self._wanted() else None
        elif peers.index == 0 and self._decided is None and self._wanted():
            self._decided = step + _LEAD, self._given_up
            peers.post(f"decision/{self._decisions}", self._decided)
        elif self._decided is None and (found := peers.posted(f"decision/{self._decisions}")) is not None:
            self._decided = found[0], found[1]
        if self._decided is None or self._decided[0] > step:
            return False
        (at, why), self._decided = self._decided, None
        self._decisions += 1
        assert at == step, f"process {peers.index} heard in the turn of step {step} what was decided for step {at}"
        if why is not None:
            raise NotSaved(why)
        return True

    def _wanted(self) -> bool:
        """Whether process 0's clock or the failures so far ask for a save, or for the end, now."""
        if self._given_up is not None:
            return True
        if self._checkpointer.is_saving:
            return False
        if self._failures:
            return self._clock() >= self._retry_at
        minutes = self._config.every_minutes
        return minutes is not None and self._clock() - self._begun_at >= 60 * minutes
