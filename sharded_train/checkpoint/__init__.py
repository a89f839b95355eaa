"""Checkpoints that can be trusted: the policy around Orbax, and the proof. See docs/checkpoints.md."""

from sharded_train.checkpoint.checkpointer import Checkpointer
from sharded_train.checkpoint.config import CheckpointConfig
from sharded_train.checkpoint.errors import CheckpointError, DamagedData, NotSaved, Unreadable
from sharded_train.checkpoint.policy import SavePolicy

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "DamagedData",
    "NotSaved",
    "SavePolicy",
    "Unreadable",
]
