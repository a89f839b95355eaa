"""From a recipe to what a run is made of: the program on this machine's devices, the text, the state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from sharded_train import gpu_flags, scaling_resumed
from sharded_train import recipe as recipes
from sharded_train import workdir as layout
from sharded_train.checkpoint import Checkpointer, CheckpointError, files
from sharded_train.checkpoint.resuming import Choice
from sharded_train.data.loader import num_train_steps
from sharded_train.data.prepare import TextData, prepare
from sharded_train.errors import ConfigError
from sharded_train.mesh import AXES, build_mesh
from sharded_train.recipe import Recipe
from sharded_train.recipe.precision import on_device
from sharded_train.step import Program, TrainState


def program_of(recipe: Recipe) -> Program:
    """The program of a recipe on all devices. Raises ConfigError with everything that does not fit them."""
    try:
        recipes.check(recipe, jax.device_count())
    except ConfigError as error:
        raise ConfigError([*error.problems, *more_devices(recipe)]) from error
    device = jax.devices()[0]
    if device.platform == "gpu" and (problems := on_device(recipe, device.device_kind, str(device.compute_capability))):
        raise ConfigError(problems)
    gpu_flags.check(device.platform)
    return recipes.program_on(recipe, build_mesh(recipe.mesh))


def more_devices(recipe: Recipe) -> list[str]:
    """What mends a recipe that only the number of devices does not fit: on a CPU, more virtual ones."""
    fixed = math.prod(size for axis in AXES if (size := getattr(recipe.mesh, axis)) > 0)
    if jax.devices()[0].platform != "cpu" or jax.process_count() > 1:
        return []
    for number in sorted({8, *(fixed * i for i in range(1, 9))}, key=lambda n: (n != 8, n)):
        try:
            recipes.check(recipe, number)
            return [f"on a CPU: --cpu-devices={number} makes {number} virtual devices of it, which this mesh fits"]
        except ConfigError:
            pass
    return []


def last_step_of(recipe: Recipe) -> int:
    """The step that this start of the run ends at."""
    return recipe.train.num_steps if recipe.train.stop_at is None else recipe.train.stop_at


def text_of(recipe: Recipe, workdir: Path, progress: Callable[[str], None]) -> TextData:
    """The text of a recipe, cached in the workdir. Raises ConfigError if there is too little of it."""
    data = prepare(
        recipe.data,
        vocab_size=recipe.model.vocab_size,
        sequence_length=recipe.train.sequence_length,
        seed=recipe.train.seed,
        cache_dir=workdir / layout.DATA,
        progress=progress,
    )
    epochs, rows, batch = recipe.data.num_epochs, len(data.train), recipe.train.global_batch_size
    if num_train_steps(rows, batch, epochs) < recipe.train.num_steps:
        raise ConfigError(
            f"data.num_epochs = {epochs} of {rows:,} rows are {num_train_steps(rows, batch, epochs):,} steps of "
            f"train.global_batch_size = {batch} rows, but train.num_steps = {recipe.train.num_steps:,}: "
            "lower num_steps, raise num_epochs, or leave it out for as many as the steps need"
        )
    if problems := data.train.shortfalls(recipe.train.num_steps * batch):
        raise ConfigError(
            [f"{problem}: lower train.num_steps, or change weights or num_epochs" for problem in problems]
        )
    return data


def checkpointer_of(recipe: Recipe, workdir: Path) -> Checkpointer:
    """The checkpoints of a run, in its workdir or where its config says, and in the fallback directory if there is one.

    Raises ConfigError for an address that is none.
    """
    settings = recipe.checkpoint
    return Checkpointer(
        settings.dir or workdir / layout.CHECKPOINTS,
        settings.keep,
        keep_every=settings.keep_every,
        fallback=settings.fallback_dir,
        timeout=60 * settings.timeout_minutes,
    )


def places_of(recipe: Recipe) -> list[Path]:
    """Where its config says that checkpoints are: places that the workdir's lock does not guard."""
    settings = recipe.checkpoint
    return [files.place(place) for place in (settings.dir, settings.fallback_dir) if place is not None]


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A state to go on from, as the program wants it, and what was saved with it."""

    step: int
    state: TrainState
    record: dict[str, Any]


def resume(
    program: Program, checkpointer: Checkpointer, choice: Choice, data: TextData, *, other_data: bool = False
) -> Resumed:
    """The state of the first of the chosen checkpoints that is what was saved.

    Raises ConfigError if a checkpoint is another model's, or was trained on other data than `data` (unless `other_data`
    allows it); DamagedData if none is left.
    """
    accept = lambda path, record: _check_data(path, record, data, other_data)
    step, state, record = checkpointer.resume(choice, scaling_resumed.wanted(program), accept)
    _check_step(checkpointer, step, state)
    state = scaling_resumed.taken_up(program, state)
    if step:
        scaling_resumed.check_seen(program, state, checkpointer.path(step))
    return Resumed(step, state, record)


def restore(
    program: Program, checkpointer: Checkpointer, step: int, data: TextData, *, other_data: bool = False
) -> tuple[TrainState, dict[str, Any]]:
    """The state after `step` steps and the record saved with it. As `resume`, of this step alone; nothing is moved."""
    _check_data(checkpointer.path(step), checkpointer.record(step), data, other_data)
    return to_read(program, checkpointer, step)


def to_read(program: Program, checkpointer: Checkpointer, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The state of a checkpoint, not to be trained on, and its record."""
    state, record = checkpointer.restore(step, scaling_resumed.wanted(program, to_train=False))
    _check_step(checkpointer, step, state)
    return scaling_resumed.taken_up(program, state), record


def _check_step(checkpointer: Checkpointer, step: int, state: TrainState) -> None:
    if (held := int(state.step) + int(state.skipped)) != step:
        raise CheckpointError(f"{checkpointer.path(step)} holds the state of step {held}, not of {step}")


def _check_data(path: Path, record: dict[str, Any], data: TextData, other_data: bool) -> None:
    there, here = record.get("data"), data_record(data)
    if not isinstance(there, dict) or type(record.get("tokens_seen")) is not int:
        raise ConfigError(f"{path} is not the checkpoint of a training run: it does not say what data it has seen")
    if there.get("fingerprint") != here["fingerprint"] and not other_data:
        raise ConfigError(
            [
                f"{path} was trained on other data than this run would go on with (there -> here):",
                *(f"  {key}: {there.get(key)} -> {here.get(key)}" for key in here if there.get(key) != here.get(key)),
                "Bring the data back, choose another --workdir, or go on with --accept-config-change.",
            ]
        )


def data_record(data: TextData) -> dict[str, Any]:
    """What a checkpoint says of its data."""
    return {"fingerprint": data.fingerprint, **data.description}
