"""What is looked at every so many steps, by all processes together: replicas, and who is late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from sharded_train.faults.config import FaultsConfig
from sharded_train.faults.group import Group
from sharded_train.faults.health import RollBack
from sharded_train.faults.late import Lateness
from sharded_train.faults.replicas import Replicas


class Inspection:
    """Of one life of a run. `state` is always of the shapes and on the mesh of `abstract_state`."""

    def __init__(self, config: FaultsConfig, mesh: Mesh, abstract_state: Any, group: Group):
        self._every, self._group = config.check_every, group
        self._replicas = Replicas(mesh, abstract_state)
        self._lateness = Lateness()
        self._good: int | None = None  # the last step at which the replicas were alike

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside is to wait for the devices, or work of all together: it makes nobody late."""
        return self._lateness.waiting()

    def begin(self, step: int) -> None:
        """The loop begins, or goes on, after `step`."""
        self._good = step
        self._lateness.restart(step)

    def look(self, step: int, state: Any, tell: Callable[[str], None]) -> None:
        """Looks, if that is due. Raises RollBack if replicas differ: to where they were alike."""
        if not self._every or step % self._every:
            return
        jax.block_until_ready(state)
        if self._group.count > 1:
            for line in self._lateness.told(self._group, step):
                tell(line)
        found = self._replicas.differences(state)
        if found:
            why = "what devices should hold alike differs: " + "; ".join(found)
            raise RollBack(step, (self._good or 0) + 1, (), why)
        self._good = step
