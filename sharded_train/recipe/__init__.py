"""The recipe of a run: every setting, typed, frozen and checked together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from sharded_train import config
from sharded_train.checkpoint.config import CheckpointConfig
from sharded_train.config import file as config_file
from sharded_train.data.config import DataConfig
from sharded_train.errors import ConfigError
from sharded_train.faults.config import DistributedConfig, FaultsConfig, WatchdogConfig
from sharded_train.local import AttentionConfig
from sharded_train.mesh import MeshConfig
from sharded_train.models import DecoderConfig, Model
from sharded_train.optimizer import AdamW, Cosine, Optimizer, Schedule
from sharded_train.pipeline import PipelineConfig
from sharded_train.precision import PrecisionConfig
from sharded_train.recipe import attention, checks, pipeline, precision, warnings
from sharded_train.sharding import ZeroConfig
from sharded_train.step import Program, TrainConfig, build_program


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Validation during training: every so many steps (0: never), on so many batches (None: all)."""

    every: int = 0  # steps; 0: never
    num_batches: int | None = None  # of the validation text; None: all

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """A line of progress every so many steps; steps to profile, as [first, last), into the workdir."""

    every: int = 10  # steps from line to line
    profile_steps: tuple[int, int] | None = None  # [first, last) for JAX's profiler, into the workdir
    tensorboard: bool = True  # files for TensorBoard in the workdir
    precision_every: int = 50  # steps between lines of what FP8 products saw, by layer; 0: none


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything about a run. `configs/*.py` give what differs from these defaults."""

    model: Model = dataclasses.field(default_factory=DecoderConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    zero: ZeroConfig = dataclasses.field(default_factory=ZeroConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    optimizer: Optimizer = dataclasses.field(default_factory=AdamW)
    schedule: Schedule = dataclasses.field(default_factory=Cosine)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    faults: FaultsConfig = dataclasses.field(default_factory=FaultsConfig)


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a config file, changed by overrides such as "--config.train.num_steps=10"; not checked yet.

    Raises ConfigError with the file's error, or with every unknown key and wrong value.
    """
    return config.build(Recipe, config_file.run(path), overrides, lambda recipe: problems_of(recipe, None))


def from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that `config.to_dict` was given, changed by overrides; not checked yet."""
    return config.build(Recipe, values, overrides)


def check(recipe: Recipe, num_devices: int | None) -> None:
    """Raise ConfigError with every violation at once; without a number of devices, all that can be told without it."""
    if problems := problems_of(recipe, num_devices):
        raise ConfigError(problems)


def problems_of(recipe: Recipe, num_devices: int | None) -> list[str]:
    """Every violation, as `check` raises them."""
    sizes, problems = checks.axis_sizes(recipe, num_devices)
    problems += checks.out_of_range(recipe)
    problems += checks.contradictions(recipe)
    problems += checks.indivisible(recipe, sizes, num_devices)
    problems += attention.problems(recipe)
    problems += pipeline.problems(recipe, sizes)
    problems += precision.problems(recipe, sizes)
    return problems


def program_on(recipe: Recipe, mesh: Mesh) -> Program:
    """The program of a checked recipe on a mesh."""
    return build_program(
        recipe.model,
        mesh,
        zero=recipe.zero,
        precision=recipe.precision,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        train=recipe.train,
        pipeline=recipe.pipeline,
        attention=recipe.attention,
    )


def warnings_of(recipe: Recipe, num_devices: int | None) -> list[str]:
    """What a checked recipe asks for that changes nothing or costs more than it brings, in words, before the run."""
    sizes, _ = checks.axis_sizes(recipe, num_devices)
    return [
        *warnings.without_effect(recipe, sizes),
        *pipeline.warnings(recipe, sizes),
        *precision.warnings(recipe, sizes),
    ]
