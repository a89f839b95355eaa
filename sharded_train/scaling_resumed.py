"""The precision recipe's part of a checkpoint's state, where the run that takes it up has another recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharded_train.checkpoint.leaves import by_name, nested
from sharded_train.errors import ConfigError
from sharded_train.step import Program, TrainState

PREFIX = "scaling/"


def wanted(program: Program, *, to_train: bool = True) -> Callable[[Path, Mapping[str, Any]], TrainState]:
    """From a checkpoint's path and leaves, by name, to the state to load: the program's, but for what it has of scales.

    FP8's scales are not made up: where the checkpoint lacks them, training raises ConfigError, unless
    `precision.fp8.recalibrate` says that they shall be measured.
    """

    def of(path: Path, stored: Mapping[str, Any]) -> TrainState:
        state, precision = program.abstract_checkpoint, program.precision
        kept = {name.removeprefix(PREFIX): x for name, x in stored.items() if name.startswith(PREFIX)}
        if shapes(kept) == shapes(by_name(state.scaling)):
            return state
        if precision.recipe == "fp8_delayed" and to_train and not precision.fp8.recalibrate:
            has = "scales of other products, or histories of another length," if kept else "no scales of FP8"
            raise ConfigError(
                f"{path} has {has} that precision.recipe = fp8_delayed could go on with: it was saved under another "
                "recipe. Measure them from the next batch with --config.precision.fp8.recalibrate=true, or choose "
                "precision.recipe = fp8_current, which needs none."
            )
        whole = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state.step.sharding) for n, x in kept.items()}
        return state.replace(scaling=nested(whole) if whole else None)  # type: ignore[no-any-return]

    return of


def taken_up(program: Program, state: TrainState) -> TrainState:
    """A loaded state as the program has it: scales that are not its own give way to fresh ones."""
    if shapes(by_name(state.scaling)) == shapes(by_name(program.abstract_checkpoint.scaling)):
        return program.from_checkpoint(state)
    lies = jax.tree.map(lambda x: x.sharding, program.abstract_state.scaling)
    fresh = jax.jit(program.fresh_scaling, out_shardings=lies)()
    return program.from_checkpoint(state.replace(scaling=None)).replace(scaling=fresh)  # type: ignore[no-any-return]


def check_seen(program: Program, state: TrainState, path: Path) -> None:
    """Raises ConfigError if layers that are now in FP8 were in bf16 before: of them there is no history."""
    if program.precision.recipe != "fp8_delayed" or program.precision.fp8.recalibrate or program.fp8 is None:
        return
    weights = [state.scaling["layers"][branch][name]["w"]["history"] for branch, name, _ in program.fp8.entries()]
    there = program.fp8.in_fp8
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    lacking = jax.jit(lambda *all_: there & ~jnp.concatenate(all_, 1).any(1), out_shardings=everywhere)(*weights)
    if layers := sorted(program.fp8.order[i] for i in np.flatnonzero(lacking)):
        raise ConfigError(
            f"{path} has no scales of layers {', '.join(map(str, layers))}, which were in bf16 when it was saved "
            "(precision.fp8.bf16_layers). Measure all anew from the next batch with "
            "--config.precision.fp8.recalibrate=true, or leave these layers in bf16."
        )


def shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in leaves.items()}
