"""The settings of what guards a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """For how long the processes of a run wait for each other, whole seconds."""

    heartbeat_seconds: int = 100  # a process that was not heard of for so long is taken for dead, and all stop
    initialization_seconds: int = 300  # for all processes to come together
    shutdown_seconds: int = 300  # for all processes to come to the end


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """Deadlines in seconds; when one passes, all stacks are printed and the process ends with code 70. 0: none."""

    startup: float = 3600.0  # devices, data and the first state
    compile: float = 3600.0  # the train step
    step: float = 1800.0  # from one step to the next, an evaluation between them included
    save: float = 1800.0  # while the loop waits for a checkpoint
    restore: float = 3600.0  # of a checkpoint
