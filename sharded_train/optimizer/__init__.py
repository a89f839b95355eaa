"""Optimizers and learning-rate schedules, chosen in the config by their type.

An optimizer is a frozen dataclass of its options that knows, for one parameter at a time, which arrays it keeps
(`slots`) and how a gradient becomes a direction (`direction`). `state` places them and makes the update.
"""

from __future__ import annotations

from sharded_train.optimizer.adafactor import Adafactor
from sharded_train.optimizer.elementwise import SGD, AdamW, Lion
from sharded_train.optimizer.muon import Muon
from sharded_train.optimizer.schedules import (
    WSD,
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Schedule,
    learning_rate,
)

Optimizer = AdamW | SGD | Lion | Adafactor | Muon

__all__ = [
    "SGD",
    "WSD",
    "Adafactor",
    "AdamW",
    "Constant",
    "Cosine",
    "InverseSqrt",
    "Linear",
    "Lion",
    "Muon",
    "Optimizer",
    "Schedule",
    "learning_rate",
]
