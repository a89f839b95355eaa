"""What the processes of a run tell each other about checkpoints.

It goes over JAX's coordination service and not over the devices: a background thread can use it beside the training,
and one that waits can say for whom.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import jax

from sharded_train import compat
from sharded_train.checkpoint.errors import CheckpointError

_instances = itertools.count()


class Peers:
    """One conversation: all processes make them in the same order and call their methods in the same order.

    Values are what JSON can hold. Alone, everything is answered at once. Where process 0 misses an answer, that is what
    all hear in the `first` that follows: nobody comes to another outcome.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout  # seconds
        self._prefix = f"sharded_train/checkpoint/{next(_instances)}"
        self._turn = 0

    @property
    def index(self) -> int:
        return jax.process_index()

    @property
    def count(self) -> int:
        return jax.process_count()

    def first(self, value: Any) -> Any:
        """Process 0's value, on all of them."""
        if self.count == 1:
            return value
        key = self._next_key()
        if self.index == 0:
            self._set(key, [value, None])
            return value
        # Process 0 itself may be waiting for others until now.
        value, missed = self._wait(key, 0, time.monotonic() + 2 * self._timeout)
        if missed is not None:
            raise CheckpointError(missed)
        return value

    def gathered(self, value: Any) -> list[Any] | None:
        """On process 0 the values of all, in their order; None on the others, which do not wait."""
        if self.count == 1:
            return [value]
        key = self._next_key()
        if self.index:
            self._set(f"{key}/{self.index}", value)
            return None
        deadline = time.monotonic() + self._timeout
        try:
            found = [value, *(self._wait(f"{key}/{i}", i, deadline) for i in range(1, self.count))]
        except CheckpointError as error:
            self._set(self._next_key(), [None, str(error)])
            raise
        compat.coordination().key_value_delete(key)  # and all below: the digests of every save would add up there
        return found

    def all(self, value: Any) -> list[Any]:
        """The values of all, on all."""
        return self.first(self.gathered(value))  # type: ignore[no-any-return]

    def post(self, name: str, value: Any) -> None:
        """Leaves a value under a name, for `posted` to find."""
        if self.count > 1:
            self._set(f"{self._prefix}/{name}", value)

    def posted(self, name: str) -> Any:
        """The value that somebody has left under a name, if somebody has."""
        if self.count == 1:
            return None
        try:
            return json.loads(compat.coordination().key_value_try_get(f"{self._prefix}/{name}"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise CheckpointError(f"the processes' coordination service does not answer: {error}") from error

    def _next_key(self) -> str:
        self._turn += 1
        return f"{self._prefix}/turn/{self._turn}"

    def _set(self, key: str, value: Any) -> None:
        compat.coordination().key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _wait(self, key: str, index: int, deadline: float) -> Any:
        begun = time.monotonic()
        try:
            milliseconds = max(1, int(1000 * (deadline - begun)))
            return json.loads(compat.coordination().blocking_key_value_get(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            waited = time.monotonic() - begun
            raise CheckpointError(
                f"process {self.index} waited {waited:.0f} s for process {index}, which did not answer: "
                f"{str(error).splitlines()[0]}"
            ) from error
