"""The settings of what guards a run."""

from __future__ import annotations

import dataclasses
from typing import Literal


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
    compile: float = 3600.0  # the train step, and the program that measures FP8's first scales
    step: float = 1800.0  # from one step to the next, an evaluation between them included
    save: float = 1800.0  # while the loop waits for a checkpoint
    restore: float = 3600.0  # of a checkpoint


@dataclasses.dataclass(frozen=True)
class FaultsConfig:
    """What a run looks for while it trains, and what it does when it finds it."""

    max_skipped: int = (
        5  # steps in a row without a finite loss and gradient, then roll back; 0: the first one ends the run
    )
    max_rollbacks: int = 3  # without a step beyond where the first of them was, then the run ends
    spike_window: int = 64  # losses that a loss is compared with; 0: no spikes are looked for
    spike_zscore: float = 6.0  # median absolute deviations (x 1.4826) above the median that make a spike
    spike_action: Literal["log", "roll_back"] = "log"  # roll_back: to before it, and its batch is left out
    check_every: int = 100  # steps between comparisons of replicas, and of processes' times; 0: never
    elastic: bool = True  # on other data ranks, as many microbatches as keep the rows that a device works on at once
