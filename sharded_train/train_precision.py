"""What the loop does for the precision recipe: FP8's first scales, its log, and whether it is FP8 that runs."""

from __future__ import annotations

from pathlib import Path

import jax
from rich.console import Console

from sharded_train import config
from sharded_train.begin import Run
from sharded_train.calibrate import calibrated
from sharded_train.precision_log import PrecisionLog
from sharded_train.recipe import Recipe
from sharded_train.rehearse import fp8
from sharded_train.step import Batch, TrainState

EMULATED = "FP8 on CPUs is emulated: numbers are rounded to it, and multiplied in bf16"


def begun(run: Run, state: TrainState, batch: Batch) -> TrainState:
    """The state to make the first step from: FP8's scales measured on its batch, where there are none to go on with.

    A checkpoint that was saved under `recalibrate`, all else alike, has measured ones: a restart by the same command,
    and a roll-back, are the same run.
    """
    precision = run.recipe.precision
    measured = run.record.get("config", {}).get("precision") == config.to_dict(precision)
    if precision.recipe != "fp8_delayed" or (run.start_step and not precision.fp8.recalibrate):
        return state
    if run.start_step and measured:
        words = f"note: FP8's scales are those of step {run.start_step}: precision.fp8.recalibrate was done before it"
        run.console.print(words, style="yellow", soft_wrap=not run.console.is_terminal)
    else:
        with run.guard.phase("compile"):  # a program of its own, longer under way than a step
            state = calibrated(run.program, state, batch)
            jax.block_until_ready(state)
        run.startup.mark("calibration")
    return state


def log_of(recipe: Recipe, workdir: Path, start_step: int) -> PrecisionLog | None:
    """For process 0; None where nothing is to be logged."""
    every = recipe.log.precision_every
    wanted = every and recipe.precision.is_fp8 and jax.process_index() == 0
    return PrecisionLog(workdir, start_step, every) if wanted else None


def tell(recipe: Recipe, platform: str, compiled: jax.stages.Compiled, console: Console) -> None:
    """How many of the FP8 products really are that; a GPU that does otherwise does so in silence."""
    if not recipe.precision.is_fp8:
        return
    if platform == "cpu":
        console.print(EMULATED, style="dim")
        return
    found = fp8.of_text(compiled.as_text() or "")
    console.print(fp8.words(found), style="bold red" if fp8.falls_short(found) else "", markup=False, soft_wrap=True)
