"""The training loop: restore or initialise, then step after step, with metrics, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from sharded_train import assemble, config, initial_weights, memory, report, train_precision
from sharded_train import workdir as layout
from sharded_train.begin import Run, Start, begin, rolled_back
from sharded_train.checkpoint import Checkpointer
from sharded_train.data.loader import Batches, Loader, batch_number
from sharded_train.errors import ConfigError
from sharded_train.evaluate import Validation, in_words, validate
from sharded_train.exits import Exit, Failure
from sharded_train.faults import agreement
from sharded_train.faults.group import everyone
from sharded_train.faults.guard import Guard
from sharded_train.faults.health import Diverged, RollBack
from sharded_train.faults.lock import InUse
from sharded_train.generate import Sampling, sample_text
from sharded_train.metrics import MetricsWriter, ProgressTable, RunLog
from sharded_train.peak import peak_of
from sharded_train.profiling import Profile
from sharded_train.recipe import Recipe
from sharded_train.show import describe
from sharded_train.step import Batch, TrainState
from sharded_train.stopping import StopRequest
from sharded_train.tables import bytes_in_words


def train(
    recipe: Recipe,
    workdir: Path,
    *,
    accept_config_change: bool = False,
    resume: str = "auto",
    initial: initial_weights.InitialWeights | None = None,
) -> int:
    """Trains to `train.num_steps` (or `train.stop_at`), from the last checkpoint in `workdir` if there is one.

    `resume` is "auto", "never", "must" or a step, see `checkpoint.resuming`; `initial` says where the weights of step 0
    come from, if not from the seed.

    Returns the exit code (`exits.Exit`): DONE when that step is reached and saved, PREEMPTED when a signal came and the
    state was saved; others when the run cannot go on, for a reason told on stderr. What is wrong with recipe, data or
    workdir raises ConfigError before anything is compiled or written.
    """
    with Guard(recipe.watchdog, report.process_began()) as guard:
        guard.code = _train(recipe, workdir, Start(accept_config_change, resume, initial), guard)
        return guard.code


def _train(recipe: Recipe, workdir: Path, start: Start, guard: Guard) -> int:
    console = report.console_of_process()
    try:
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            begun = begin(recipe, workdir, start, console, guard, stack)
            if begun is None:
                return Exit.DONE
            run, state = begun
            log = _log_of(run, stack)
            train_step = None if stop.early else _compiled(run)
            if train_step is None or stop.early:
                console.print("stopped by a signal before the first step: there is nothing to save", markup=False)
                return Exit.PREEMPTED
            stack.enter_context(stop.interrupts())
            while True:
                try:
                    return _end(run, *_loop(run, train_step, state, log, stop))
                except RollBack as found:
                    fault = found.with_traceback(None)  # which holds the state that is to be given up
                log.health.rolled_back(fault)
                run, state = rolled_back(run, fault)
                log.go_back(run.start_step, run.tokens_seen)
    except InUse as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.IN_USE
    except Failure as error:
        problem, code = str(error), error.code
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        problem = memory.explain(str(error).splitlines()[0], recipe, describe(recipe, jax.devices()))
        code = Exit.FAILED
    print(f"error: {problem}", file=sys.stderr)
    return code


def _compiled(run: Run) -> jax.stages.Compiled:
    program = run.program
    run.guard.enter("compile")
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    agreement.same_program(everyone(), lambda: lowered.as_text())
    train_step = lowered.compile()
    train_precision.tell(run.recipe, run.program.platform, train_step, run.console)
    memory.check(train_step, jax.local_devices()[0], run.recipe, run.facts)
    run.startup.mark("compile")
    return train_step


def _loop(
    run: Run, train_step: jax.stages.Compiled, state: TrainState, log: RunLog, stop: StopRequest
) -> tuple[TrainState, int, Validation | None]:
    """The state, step and validation at the end. In the turn of `step` k the k-th update is made."""
    recipe, program, waiting = run.recipe, run.program, run.inspection.waiting
    run.guard.enter("step")
    run.inspection.begin(run.start_step)
    found = None
    with _batches(run) as batches, _profile(run) as profile, _last_good(run.checkpointer):
        for step in range(run.start_step + 1, run.last_step + 1):
            profile.before(step - 1, state)
            batch = Batch(**_next(batches, run, step))
            if step == run.start_step + 1:
                state = train_precision.begun(run, state, batch)
            state, metrics = train_step(state, batch)
            with waiting():
                log.add(step, metrics, batches.seconds_waited)  # looks at those of step - 1, while this step runs
                if program.platform == "cpu":
                    log.flush()  # of two steps at once virtual devices could wait for each other
            run.guard.step_done(step)
            run.inspection.look(step, state, log.note)
            due, stopping, last = run.saves.due(step), stop.agreed(), step == run.last_step
            if stopping or last or due:
                log.flush()  # a state is saved only after the loss before it, and its weights, have been looked at
                if not program.is_finite(state.params):
                    raise log.health.weights_broken(step)
                with log.pace.excluded(), waiting(), run.guard.phase("save"):
                    run.saves.save(step, program.to_checkpoint(state), _record(run, step, log.tokens_seen))
            if last or (recipe.evaluate.due(step) and not stopping):
                log.flush()
                with log.pace.excluded(), waiting(), run.guard.phase("evaluate"):
                    found = validate(program, state.evaluated, run.data, recipe)
                    log.validation(step, found.loss, found.bits_per_byte, in_words(step, found, run.data))
            if stopping:
                run.console.print(f"stopped by a signal after step {step}", markup=False)
                break
    return state, step, found


def _log_of(run: Run, stack: contextlib.ExitStack) -> RunLog:
    """Prints what the run is, and makes what will tell of its steps."""
    facts = run.facts
    peak = peak_of(jax.local_devices()[0], run.recipe.precision.compute_dtype)
    if jax.process_index() == 0:
        run.console.print(report.panel(run.recipe, facts, run.data, peak, run.workdir, run.start_step))
    for warning in facts["warnings"]:
        run.console.print(f"note: {warning}", markup=False, style="yellow")
    writer = None
    if jax.process_index() == 0:
        writer = MetricsWriter(run.workdir, run.start_step, tensorboard=run.recipe.log.tensorboard)
        stack.enter_context(contextlib.closing(writer))
    run.startup.mark("report")

    def tell_start() -> None:
        run.startup.mark("first step")
        run.console.print(run.startup.words(), style="dim", soft_wrap=not run.console.is_terminal)

    return RunLog(
        writer,
        ProgressTable(run.console, run.last_step, jax.device_count()),
        every=run.recipe.log.every,
        last_step=run.last_step,
        tokens_per_step=facts["tokens_per_step"],
        flops_per_step=facts["flops_per_step_total"],
        peak=peak.per_device * jax.device_count(),
        tokens_seen=run.tokens_seen,
        read_threads=run.recipe.data.read_threads,
        tell_start=tell_start,
        faults=run.recipe.faults,
        precision=train_precision.log_of(run.recipe, run.workdir, run.start_step),
    )


def _end(run: Run, state: TrainState, step: int, found: Validation | None) -> int:
    """Waits for the checkpoint and says what there is now."""
    with run.guard.phase("save"):
        run.saves.finish(step, lambda: run.program.to_checkpoint(state))
    run.guard.enter("evaluate")
    if found is not None and step == run.last_step:
        sampling = Sampling(max_tokens=min(100, run.recipe.train.sequence_length - 1), temperature=0.8)
        (sample,) = sample_text(run.program, state.evaluated, run.data.tokenizer, "", sampling)
        run.console.print("a sample, from the start of a document:")
        run.console.print(report.printable(sample), markup=False, style="italic", soft_wrap=True)
    if most := memory.peak(jax.local_devices()):
        used, there = map(bytes_in_words, most)
        run.console.print(f"memory: at most {used} of {there} were in use on a device of process 0", markup=False)
    path, typed = run.checkpointer.path(step), run.workdir / layout.CHECKPOINTS / str(step)
    run.console.print(f"checkpoint: {typed if typed.absolute() == path else path}", markup=False, soft_wrap=True)
    report.how_to_go_on(run.console, run.recipe, run.workdir, step)
    return Exit.PREEMPTED if step < run.last_step else Exit.DONE


def _batches(run: Run) -> Loader:
    train = run.recipe.train
    return Loader(
        run.data.train,
        batch_shape=(train.global_batch_size, train.sequence_length),
        sharding=run.program.batch_sharding,
        seed=train.seed,
        start_step=run.start_step,
        num_threads=run.recipe.data.read_threads,
        num_epochs=run.recipe.data.num_epochs,
        token_order=run.program.token_order,
        max_documents=run.program.attending.max_documents,
        left_out=run.left_out,
    )


def _next(batches: Batches, run: Run, step: int) -> dict[str, jax.Array]:
    """The batch of `step`. With batches left out the data may end before the run does."""
    batch = next(batches, None)
    if batch is None:
        left_out = f"{len(run.left_out)} batches were left out after faults"
        raise ConfigError(f"the data ends before step {step}: {left_out}; lower train.num_steps or raise num_epochs")
    return batch


def _record(run: Run, step: int, tokens_seen: int) -> dict[str, Any]:
    """What the state does not say: the next samples are those of `step`, so the data's position is the step."""
    return {
        "step": step,
        "tokens_seen": tokens_seen,
        "next_sample": batch_number(step, run.left_out) * run.recipe.train.global_batch_size,
        "skipped_batches": list(run.left_out),
        "data": assemble.data_record(run.data),
        "config": config.to_dict(run.recipe),
        "mesh": dict(run.program.mesh.shape),
        "num_processes": jax.process_count(),
        "versions": report.versions(),
        "commit": report.commit(),
    }


def _profile(run: Run) -> Profile:
    return Profile(run.workdir / layout.PROFILE, run.recipe.log.profile_steps)


@contextlib.contextmanager
def _last_good(checkpointer: Checkpointer) -> Iterator[None]:
    """Says what is left when a run diverges."""
    try:
        yield
    except Diverged as error:
        checkpointer.wait()
        steps = checkpointer.steps()
        left = f"the last checkpoint is {checkpointer.path(steps[-1])}" if steps else "there is no checkpoint"
        if steps and steps[-1] == error.step - 1:
            before = f"go on from {checkpointer.path(steps[-2])}" if len(steps) > 1 else "start again"
            left += f", of the step before: if a resume from it diverges too, move it away and {before}"
        raise Diverged(error.step, f"{error.what}; this state is not saved, {left}") from None
