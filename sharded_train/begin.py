"""All that a run needs before its first step: refused, restored or initialised, and claimed, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from sharded_train import assemble, attention_check, config, initial_weights, report
from sharded_train import workdir as layout
from sharded_train.checkpoint import Checkpointer, SavePolicy, cloud
from sharded_train.checkpoint.owner import Owner
from sharded_train.data.loader import batch_number
from sharded_train.data.prepare import TextData
from sharded_train.errors import ConfigError
from sharded_train.faults import agreement, elastic
from sharded_train.faults.group import Group, everyone
from sharded_train.faults.guard import Guard
from sharded_train.faults.health import Diverged, RollBack
from sharded_train.faults.inspection import Inspection
from sharded_train.faults.lock import WorkdirLock
from sharded_train.faults.once import Once
from sharded_train.recipe import Recipe
from sharded_train.show import describe
from sharded_train.step import Program, TrainState


@dataclasses.dataclass(frozen=True)
class Start:
    """How a start of the command wants to begin."""

    accept_config_change: bool
    resume: str
    initial: initial_weights.InitialWeights | None


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from step to step."""

    recipe: Recipe
    workdir: Path
    program: Program
    data: TextData
    checkpointer: Checkpointer
    saves: SavePolicy
    console: Console
    guard: Guard
    facts: dict[str, Any]  # of show.describe
    startup: report.StartUp
    start_step: int
    last_step: int
    record: Mapping[str, Any]  # of the checkpoint that it goes on from
    tokens_seen: int  # before start_step
    left_out: tuple[int, ...]  # numbers of batches that no step takes
    inspection: Inspection


def begin(
    recipe: Recipe, workdir: Path, start: Start, console: Console, guard: Guard, stack: contextlib.ExitStack
) -> tuple[Run, TrainState] | None:
    """All that a step needs; None if there is none to do. Whatever can be refused is refused here, before anything
    is written.
    """
    startup = report.StartUp()
    group = everyone()
    lock = stack.enter_context(WorkdirLock(workdir))
    with group.shared_errors():
        layout.check(workdir, recipe, accept_config_change=start.accept_config_change)
        if group.index == 0:
            lock.take_if_there()
    agreement.check(group, config.to_dict(recipe), report.versions())
    checkpointer = assemble.checkpointer_of(recipe, workdir)
    stack.enter_context(contextlib.closing(checkpointer))
    places = assemble.places_of(recipe)
    _check_places(group, checkpointer, places)
    once = Once(workdir)
    choice, last_step = checkpointer.choose(once.resume(start.resume)), assemble.last_step_of(recipe)
    known = (workdir / layout.CONFIG).exists()  # else checkpoint.dir may be another run's
    if not start.accept_config_change:
        with group.shared_errors():
            if group.index == 0:
                layout.check_owners(workdir, [] if choice.steps and not known else places)
            if choice.steps and not known:
                layout.check_record(checkpointer.path(choice.step), checkpointer.record(choice.step), recipe)
    if choice.steps and recipe.faults.elastic:
        recipe, adapted = elastic.adapted(recipe, checkpointer.record(choice.step), jax.device_count())
        if adapted:
            console.print(f"note: {adapted}", markup=False, style="yellow", soft_wrap=not console.is_terminal)
    program = assemble.program_of(recipe)
    if program.attending.implementation == "cudnn":
        window = min(filter(None, recipe.model.windows), default=None)
        attention_check.check(recipe.model.dim_per_head, recipe.precision.compute_dtype, window)
    if start.initial is not None and not choice.steps:
        with group.shared_errors():
            initial_weights.check(program, start.initial)
    startup.mark("devices")
    if choice.step >= last_step:
        console.print(f"{workdir} is at step {choice.step} already: there is nothing to do up to step {last_step}.")
        report.how_to_go_on(console, recipe, workdir, choice.step)
        return None
    with layout.unwritten_if_refused(workdir):
        agreement.probe(group, workdir)
        data = assemble.text_of(recipe, workdir, lambda text: console.print(text, style="dim", markup=False))
        agreement.same_data(group, assemble.data_record(data))
        startup.mark("data")
        start_step, record = 0, {"tokens_seen": 0}
        if choice.steps:
            if known:
                layout.keep_compiled(workdir)  # what checks the digests is compiled too
            with guard.phase("restore"):
                resumed = assemble.resume(program, checkpointer, choice, data, other_data=start.accept_config_change)
                jax.block_until_ready(resumed.state)
            start_step, state, record = resumed.step, resumed.state, resumed.record
        elif start.initial is None:
            state = program.init(recipe.train.seed)
        else:
            state = initial_weights.load(program, recipe.train.seed, start.initial, checkpointer.peers)
        jax.block_until_ready(state)  # what follows measures this machine's peak
        startup.mark("state")
    if choice.anew:
        checkpointer.begin_anew()
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        lock.take()
        once.done(start.resume)
        checkpointer.claim(Owner(layout.named(workdir), str(workdir.absolute())), places)
        layout.claim(workdir, recipe, data.tokenizer.backend.to_str())
    guard.claimed(workdir, lock)
    layout.keep_compiled(workdir)
    facts = describe(recipe, jax.devices())
    saves = SavePolicy(checkpointer, recipe.checkpoint)
    run = Run(
        recipe,
        workdir,
        program,
        data,
        checkpointer,
        saves,
        console,
        guard,
        facts,
        startup,
        start_step,
        last_step,
        record,
        record["tokens_seen"],
        left_out_by(record),
        Inspection(recipe.faults, program.mesh, program.abstract_state, group),
    )
    return run, state


def _check_places(group: Group, checkpointer: Checkpointer, places: Sequence[Path]) -> None:
    """Raises ConfigError if no place can be written by all processes; where another one can, it is told.

    The workdir is looked at with all that lies in it.
    """
    refused: list[ConfigError] = []
    for place in places:
        try:
            with group.shared_errors():
                checkpointer.check_place(place)
            if not cloud.is_address(place):
                agreement.probe(group, place)
        except ConfigError as error:
            refused.append(error)
            checkpointer.remarks.append(f"no checkpoint can be saved there: {'; '.join(error.problems)}")
    if len(refused) == len(checkpointer.directories):
        raise ConfigError([problem for error in refused for problem in error.problems])


def rolled_back(run: Run, fault: RollBack) -> tuple[Run, TrainState]:
    """The run, and its state, at the newest verified step below `fault.before`; saves go on from there.

    The batches of the offending steps are left out from now on. Raises Diverged if there is no such step.
    """
    with run.guard.phase("restore"):
        run.saves.settle()
        step = run.checkpointer.peers.first(
            max((step for step in run.checkpointer.steps() if step < fault.before), default=None)
        )
        if step is None:
            raise Diverged(fault.step, f"{fault.why}; there is no checkpoint of an earlier step to roll back to")
        choice = run.checkpointer.choose(str(step))
        resumed = assemble.resume(run.program, run.checkpointer, choice, run.data, other_data=True)
        jax.block_until_ready(resumed.state)
    numbers = [batch_number(step - 1, run.left_out) for step in fault.left_out]
    run.guard.event("roll_back", to=step, batches=numbers, why=str(fault))
    run.console.print(f"{fault}: rolled back to step {step}", markup=False, style="bold red", soft_wrap=True)
    if numbers:
        told = f"batches left out from now on: {', '.join(map(str, numbers))}"
        run.console.print(told, markup=False, style="bold red", soft_wrap=True)
    tokens_seen = resumed.record["tokens_seen"]
    changes: dict[str, Any] = {"start_step": step, "record": resumed.record, "tokens_seen": tokens_seen}
    return dataclasses.replace(run, left_out=tuple(sorted({*run.left_out, *numbers})), **changes), resumed.state


def left_out_by(record: Mapping[str, Any]) -> tuple[int, ...]:
    """The batches that a checkpoint's run had left out."""
    return tuple(int(number) for number in record.get("skipped_batches", ()))
