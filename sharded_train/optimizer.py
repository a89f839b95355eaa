"""Optimizers and learning-rate schedules, chosen in the config by their type."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay on matrices only."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with heavy-ball momentum when asked for."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up to the peak, then half a cosine down to `final_fraction` of it at `decay_steps`."""

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    decay_steps: int | None = None  # None: train.num_steps
    final_fraction: float = 0.1
