"""The recipe of a run: every setting, typed, frozen and checked together."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sharded_train.data.config import DataConfig
from sharded_train.mesh import MeshConfig
from sharded_train.models.decoder import DecoderConfig
from sharded_train.optimizer import SGD, AdamW, ScheduleConfig
from sharded_train.precision import PrecisionConfig
from sharded_train.sharding import ZeroConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The step and how many of them. Batch sizes are global: they do not change with the mesh."""

    num_steps: int = 1000
    stop_at: int | None = None  # stop and save at this step, the schedule unchanged
    global_batch_size: int = 32  # rows a step
    sequence_length: int = 256  # tokens a row
    num_microbatches: int = 1  # parts each device's rows are worked through in
    seed: int = 0
    clip_norm: float | None = 1.0  # of the whole gradient; None: never
    remat: Literal["none", "selective", "full"] = "none"
    z_loss: float = 0.0
    label_smoothing: float = 0.0


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Validation during training: every so many steps (0: never), on so many batches (None: all)."""

    every: int = 0
    num_batches: int | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every so many steps (0: only at the end) and how many of the last to keep."""

    every: int = 0
    keep: int = 3


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """A line of progress every so many steps; steps to profile, as [first, last), into the workdir."""

    every: int = 10
    profile_steps: tuple[int, int] | None = None
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything about a run. `configs/*.py` give what differs from these defaults."""

    model: DecoderConfig = DecoderConfig()
    mesh: MeshConfig = MeshConfig()
    zero: ZeroConfig = ZeroConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: AdamW | SGD = AdamW()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
