"""The loop: a run that is broken off and resumed is the same run, and what cannot go on says why."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import monitoring

from sharded_train import assemble, config, initial_weights
from sharded_train import recipe as recipes
from sharded_train import train as training
from sharded_train import workdir as workdirs
from sharded_train.checkpoint import Checkpointer, SavePolicy
from sharded_train.checkpoint.peers import Peers
from sharded_train.errors import ConfigError
from sharded_train.evaluate import evaluate
from sharded_train.exits import Exit
from sharded_train.faults.goodput import account, read
from sharded_train.faults.lock import WorkdirLock
from sharded_train.faults.progress import SUPERVISOR
from sharded_train.initial_weights import InitialWeights
from sharded_train.metrics import RunLog
from sharded_train.recipe import Recipe
from sharded_train.report import command_to_resume
from sharded_train.step import Program
from sharded_train.train import train
from sharded_train.verbs.checkpoints import checkpoints

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
    "mesh": {"data": 4, "tensor": 2},
    "zero": {"stage": 3},
    "precision": {"recipe": "fp32"},
    "schedule": {"learning_rate": 3e-3, "warmup_steps": 2},
    "data": {"validation_fraction": 0.2},
    "train": {"num_steps": STEPS, "global_batch_size": 8, "sequence_length": 32},
    "evaluate": {"every": 5, "num_batches": 2},
    "checkpoint": {"every": 5},
    "log": {"every": 1},
}


def recipe_of(text: Path, *changes: str) -> Recipe:
    return recipes.from_dict(
        {**SETTINGS, "data": {**SETTINGS["data"], "files": [f"{text}/*.txt"]}}, [f"--config.{c}" for c in changes]
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run that came to its end, or was stopped: where, and what it printed."""

    code: int
    workdir: Path
    output: str


def run(recipe: Recipe, workdir: Path, **options: Any) -> Ended:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = train(recipe, workdir, **options)
    return Ended(code, workdir, output.getvalue())


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(recipe_of(text), tmp_path_factory.mktemp("unbroken") / "run")


@pytest.fixture(scope="module")
def half(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(recipe_of(text, "train.stop_at=5"), tmp_path_factory.mktemp("half") / "run")


def copy_of(ended: Ended, folder: Path) -> Path:
    return Path(shutil.copytree(ended.workdir, folder / "run"))


def state_of(ended: Ended, step: int) -> tuple[Any, dict[str, Any]]:
    """The state and the record of a checkpoint, by the recipe in its workdir, on this machine's 8 devices."""
    program = assemble.program_of(workdirs.read_recipe(ended.workdir))
    return Checkpointer(ended.workdir / "checkpoints").restore(step, program.abstract_state)


def metrics_of(workdir: Path, key: str) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def test_no_step_is_timed_as_if_it_took_no_time(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step's metrics were once looked at right after those of the step before: 63,000 % MFU."""
    add = RunLog.add

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        add(*arguments)

    monkeypatch.setattr(RunLog, "add", slowly)
    ended = run(recipe_of(text, "train.stop_at=3"), tmp_path / "run")
    rates = [rate for rate in metrics_of(ended.workdir, "tokens_per_second").values() if rate]
    assert len(rates) == 2
    assert max(rates) < 8 * 32 / 0.05


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, as it is and when it was written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


# ---- a resumed run is the same run --------------------------------------------------------------------------------


def test_ten_steps_are_five_and_a_resume_and_five_bitwise(
    text: Path, unbroken: Ended, half: Ended, tmp_path: Path
) -> None:
    resumed = run(recipe_of(text), copy_of(half, tmp_path))
    assert (unbroken.code, half.code, resumed.code) == (Exit.DONE, Exit.DONE, Exit.DONE)
    (state, record), (expected, expected_record) = state_of(resumed, STEPS), state_of(unbroken, STEPS)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert record["tokens_seen"] == expected_record["tokens_seen"] > 0
    for key in ("loss", "grad_norm", "learning_rate", "validation_loss", "validation_bits_per_byte"):
        assert metrics_of(resumed.workdir, key) == metrics_of(unbroken.workdir, key)
    assert list(metrics_of(resumed.workdir, "loss")) == list(range(1, STEPS + 1))


def test_a_signal_finishes_the_step_and_saves_it(
    text: Path, unbroken: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunLog.add

    def kill_in_step_3(log: RunLog, step: int, metrics: Any, seconds_waited: float) -> None:
        add(log, step, metrics, seconds_waited)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(RunLog, "add", kill_in_step_3)
    stopped = run(recipe_of(text), tmp_path / "run")
    monkeypatch.undo()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert stopped.code == Exit.PREEMPTED
    assert "3 of 10 steps are done. To go on:" in stopped.output
    assert Checkpointer(stopped.workdir / "checkpoints").steps() == [3]
    resumed = run(recipe_of(text), stopped.workdir)
    jax.tree.map(np.testing.assert_array_equal, state_of(resumed, STEPS)[0], state_of(unbroken, STEPS)[0])


@pytest.mark.parametrize(
    ("module", "name", "code", "at", "saved"),
    [
        (assemble, "resume", Exit.PREEMPTED, 5, [5]),  # while it is restored
        (training, "_compiled", Exit.PREEMPTED, 5, [5]),
        (SavePolicy, "save", Exit.PREEMPTED, 7, [5, 6, 7]),  # of step 6: the next step is the last
        (SavePolicy, "finish", Exit.DONE, 8, [6, 7, 8]),  # while the last save is waited for
    ],
)
def test_a_signal_at_another_time_loses_nothing(
    text: Path,
    half: Ended,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    code: int,
    at: int,
    saved: list[int],
) -> None:
    """From step 5 to step 8, saved at every step. Outside of the loop, Ctrl-C still ends it at once."""
    function = getattr(module, name)
    signals = iter([signal.SIGTERM])

    def kill(*args: Any, **options: Any) -> Any:
        for number in signals:  # once
            os.kill(os.getpid(), number)
        return function(*args, **options)

    monkeypatch.setattr(module, name, kill)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped = run(recipe_of(text, "train.stop_at=8", "checkpoint.every=1"), copy_of(half, tmp_path))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert stopped.code == code
    assert ("stopped by a signal before the first step" in stopped.output) == (at == 5)
    assert Checkpointer(stopped.workdir / "checkpoints").steps() == saved
    assert max(metrics_of(stopped.workdir, "loss")) == at


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ({"data": 2}, 0),
        pytest.param({"data": 1}, 0, marks=pytest.mark.slow),
        pytest.param({"data": 2, "pipeline": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2, "pipeline": 2}, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resume_on_another_number_of_devices_goes_the_same_way(
    text: Path, unbroken: Ended, half: Ended, tmp_path: Path, mesh: dict[str, int], stage: int
) -> None:
    """CASES 25. Takes about 10 s: a process of its own, since the devices of this one are 8."""
    workdir = copy_of(half, tmp_path)
    settings = {**SETTINGS, "mesh": mesh, "zero": {"stage": stage}}
    (ended,) = run_processes(text, tmp_path, settings, workdir, [f"--cpu-devices={math.prod(mesh.values())}"])
    assert "The run of 10 steps is complete." in ended
    losses, expected = metrics_of(workdir, "loss"), metrics_of(unbroken.workdir, "loss")
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-6)
    state = Checkpointer(workdir / "checkpoints").restore(STEPS, assemble.program_of(recipe_of(text)).abstract_state)[0]
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(unbroken, STEPS)[0]), strict=True):
        assert np.linalg.norm(leaf - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.slow  # two processes start and compile everything, on as few cores as there are: 20 to 50 s
def test_two_processes_train_as_one_does(text: Path, unbroken: Ended, tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
    where = [
        ["--cpu-devices=4", f"--coordinator=localhost:{port}", "--num-processes=2", f"--process-id={i}"]
        for i in range(2)
    ]
    first, second = run_processes(text, tmp_path, SETTINGS, tmp_path / "run", *where)
    assert "The run of 10 steps is complete." in first
    assert "The run of 10 steps is complete." not in second  # process 0 speaks for all
    for key in ("loss", "validation_loss"):
        losses, expected = metrics_of(tmp_path / "run", key), metrics_of(unbroken.workdir, key)
        assert losses.keys() == expected.keys()
        np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-6)


def run_processes(
    text: Path, folder: Path, settings: Mapping[str, Any], workdir: Path, *where: Sequence[str]
) -> list[str]:
    """Runs the command once for each list of options, all at the same time, and returns what they printed."""
    settings = {**settings, "data": {**settings["data"], "files": [f"{text}/*.txt"]}}
    (folder / "config.py").write_text(f"def get_config():\n    return {settings!r}\n")
    command = [sys.executable, "-m", "sharded_train", "train", f"--config={folder}/config.py", f"--workdir={workdir}"]
    environment = {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    processes = [
        subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for options in where
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [Exit.DONE] * len(where), "\n\n".join(outputs)
    return outputs


# ---- what a run leaves and says ------------------------------------------------------------------------------------


def test_what_is_printed(unbroken: Ended, half: Ended) -> None:
    for said in (
        "data 4 × tensor 2 = 8 × cpu",
        "ZeRO 3",
        "byte bigram",
        "causal",
        "measured here with a float32 product",
        "start-up ",
        "compile",
        "  1/10 ",
        " 10/10 ",
        "validation after 10 steps, on 2 of ",
        "a sample, from the start of a document:",
        "checkpoints/10",
        "The run of 10 steps is complete.",
        "--config.train.num_steps=20 --accept-config-change",
    ):
        assert said in unbroken.output
    assert "5 of 10 steps are done. To go on:" in half.output
    assert all(character.isprintable() or character in "\n\t" for character in unbroken.output)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["--config=c.py", "--workdir=a b"], ["--config=c.py", "--workdir=a b"]),
        (["--config.train.stop_at=5", "--config=c.py", "--accept-config-change"], ["--config=c.py"]),
        (["--config.train.stop_at", "5", "--config.train.num_steps", "9", "--config=c.py"], ["--config=c.py"]),
        (["--config", "c.py", "--config.train.num_steps=9"], ["--config", "c.py"]),
        (["--resume", "must", "--config=c.py", "--resume=5"], ["--config=c.py"]),
    ],
)
def test_the_line_that_is_offered_to_go_on(
    typed: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/bin/sharded-train", "train", *typed])
    monkeypatch.setattr(shutil, "which", lambda name: f"/env/bin/{name}")
    command = command_to_resume(Path("unused"), "--config.train.num_steps=20", "--accept-config-change")
    end = ["--config.train.num_steps=20", "--accept-config-change"]
    assert shlex.split(command) == ["sharded-train", "train", *offered, *end]
    monkeypatch.setattr(shutil, "which", lambda name: None)  # the environment is not activated
    assert command_to_resume(Path("unused")).startswith("/env/bin/sharded-train train ")
    monkeypatch.setattr(sys, "argv", ["/src/sharded_train/__main__.py", "train", *typed])
    assert command_to_resume(Path("unused")).startswith("python -m sharded_train train ")


def test_the_line_under_a_supervisor_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--config=c.py", "--coordinator=localhost:4", "--num-processes=2", "--process-id=0"]
    monkeypatch.setattr(sys, "argv", ["/src/sharded_train/__main__.py", "train", *argv])
    monkeypatch.setenv(SUPERVISOR, "1")
    assert command_to_resume(Path("unused")) == "python -m sharded_train launch ... -- train --config=c.py"


def test_what_the_record_says(text: Path, unbroken: Ended) -> None:
    _, record = state_of(unbroken, STEPS)
    assert record["step"] == STEPS
    assert record["config"] == config.to_dict(recipe_of(text))
    assert record["mesh"] == {"pipeline": 1, "data": 4, "sequence": 1, "tensor": 2}
    assert record["num_processes"] == 1
    assert record["versions"]["jax"] == jax.__version__
    assert 0 < record["tokens_seen"] <= STEPS * 8 * 32
    assert record["data"]["fingerprint"]
    assert record["next_sample"] == STEPS * 8
    assert record["commit"] is None or len(record["commit"]) in (40, 41)


def test_metrics_hold_every_key(unbroken: Ended) -> None:
    lines = [json.loads(line) for line in (unbroken.workdir / "metrics.jsonl").read_text().splitlines()]
    training = {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "data_wait", "skipped"}
    assert [set(line) for line in lines if "loss" in line] == [training] * STEPS
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10]
    assert all(line["tokens_per_second"] > 0 for line in lines if line["step"] > 1 and "loss" in line)


def test_evaluate_finds_what_training_found(unbroken: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(unbroken.workdir)
    assert evaluate(workdirs.read_recipe(unbroken.workdir), unbroken.workdir, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == STEPS
    assert found["validation_loss"] == metrics_of(unbroken.workdir, "validation_loss")[STEPS]
    assert found["byte_bigram_bits_per_byte"] > found["gzip_bits_per_byte"] > 0
    assert contents(unbroken.workdir) == before


def test_a_profile_is_written_when_it_is_asked_for(text: Path, half: Ended, tmp_path: Path) -> None:
    ended = run(recipe_of(text, "log.profile_steps=6,8", "log.tensorboard=false"), copy_of(half, tmp_path))
    assert ended.code == Exit.DONE
    assert list((ended.workdir / "profile").rglob("*.xplane.pb"))


# ---- what cannot go on ---------------------------------------------------------------------------------------------


def test_at_the_last_step_there_is_nothing_to_do(text: Path, unbroken: Ended) -> None:
    before = contents(unbroken.workdir)
    again = run(recipe_of(text), unbroken.workdir)
    assert again.code == Exit.DONE
    assert "is at step 10 already: there is nothing to do" in again.output
    assert contents(unbroken.workdir) == before


def test_a_run_that_diverges_stops_and_saves_nothing_of_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("schedule.learning_rate=1e30", "schedule.warmup_steps=0", "checkpoint.every=1", "optimizer.type=sgd")
    recipe = recipe_of(text, *changes, "faults.max_skipped=0")
    assert train(recipe, tmp_path / "run") == Exit.FAILED
    said = capsys.readouterr().err
    saved = Checkpointer(tmp_path / "run/checkpoints").steps()
    losses = metrics_of(tmp_path / "run", "loss")
    last = max(losses)
    assert losses[last] is None
    assert saved == list(range(1, last))
    assert f"error: step {last}: loss" in said
    assert f"the last checkpoint is {tmp_path}/run/checkpoints/{last - 1}, of the step before" in said
    assert "move it away" in said


def test_running_out_of_memory_is_explained(
    text: Path, half: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    monkeypatch.setattr(RunLog, "flush", fail)
    assert train(recipe_of(text), copy_of(half, tmp_path)) == Exit.FAILED
    said = capsys.readouterr().err
    assert "error: out of memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes." in said
    assert "config.train.remat=selective" in said


def damage(path: Path) -> None:
    files = [path for path in (path / "state").rglob("*") if path.is_file()]
    os.truncate(max(files, key=lambda path: path.stat().st_size), 100)


def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_is_used(
    text: Path, unbroken: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = copy_of(unbroken, tmp_path)
    damage(workdir / "checkpoints/10")
    (workdir / "checkpoints/99").mkdir()  # no checkpoint at all
    before = contents(workdir / "checkpoints/10")
    assert train(recipe_of(text), workdir) == Exit.DONE
    said = capsys.readouterr().err
    assert f"note: {workdir}/checkpoints/10 is damaged and set aside as 10.damaged: " in said
    assert f"{workdir}/checkpoints/99 is damaged and set aside as 99.damaged: it carries no VERIFIED record" in said
    assert contents(workdir / "checkpoints/10.damaged").keys() == before.keys()
    again = Ended(0, workdir, "")
    jax.tree.map(np.testing.assert_array_equal, state_of(again, STEPS)[0], state_of(unbroken, STEPS)[0])


@pytest.mark.parametrize("resume", ["auto", "must", "10"])
def test_when_no_checkpoint_can_be_used_nothing_begins_anew(
    text: Path, unbroken: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str
) -> None:
    workdir = copy_of(unbroken, tmp_path)
    for step in (5, 10):
        damage(workdir / "checkpoints" / str(step))
    before = contents(workdir)
    recipe = recipe_of(text, "train.num_steps=12")
    assert train(recipe, workdir, accept_config_change=True, resume=resume) == Exit.DAMAGED
    assert f"{workdir}/checkpoints/10 cannot be read: " in capsys.readouterr().err
    assert contents(workdir) == before


def test_resume_from_a_step_sets_aside_those_after_it_and_saves_go_on(
    text: Path, unbroken: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = copy_of(unbroken, tmp_path)
    assert train(recipe_of(text), workdir, resume="5") == Exit.DONE
    assert "goes on from step 5" in capsys.readouterr().out
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "10.rolled_back", "5"]
    again = Ended(0, workdir, "")
    jax.tree.map(np.testing.assert_array_equal, state_of(again, STEPS)[0], state_of(unbroken, STEPS)[0])
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; it has 5, 10"):
        train(recipe_of(text), workdir, resume="7")


def test_resume_never_keeps_what_there_is_and_must_wants_something(
    text: Path, half: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = copy_of(half, tmp_path)
    assert train(recipe_of(text, "train.stop_at=1"), workdir, resume="never") == Exit.DONE
    assert "begins with seed 0" in capsys.readouterr().out
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["1"]
    assert [path.name for path in (workdir / "checkpoints.before").iterdir()] == ["5"]
    with pytest.raises(ConfigError, match="has no checkpoint"):
        train(recipe_of(text), tmp_path / "new", resume="must")


def test_weights_of_another_run_are_where_a_run_begins_all_or_by_name(text: Path, half: Ended, tmp_path: Path) -> None:
    program = assemble.program_of(
        recipe_of(text, "mesh.data=2", "mesh.tensor=4", "zero.stage=1", "train.ema_decay=0.9")
    )
    taken, fresh = state_of(half, 5)[0], program.init(1)

    def load(only: tuple[str, ...] | None = None, without: tuple[str, ...] | None = None) -> Any:
        return initial_weights.load(program, 1, InitialWeights(half.workdir, only, without), Peers(60))

    state = load()
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.ema), (taken.params, taken.params))
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, fresh.opt_state)
    assert int(state.step) == 0
    some = load(without=("embed*",))
    jax.tree.map(np.testing.assert_array_equal, some.params["layers"], taken.params["layers"])
    np.testing.assert_array_equal(some.params["embedding"], fresh.params["embedding"])
    with pytest.raises(ConfigError, match=r"no weight is named lairs/\*: the weights are "):
        load(only=("lairs/*",))
    with pytest.raises(ConfigError, match=r"there is no checkpoint"):
        initial_weights.load(program, 1, InitialWeights(tmp_path), Peers(60))
    larger = assemble.program_of(recipe_of(text, "model.vocab_size=304"))
    with pytest.raises(ConfigError) as caught:
        initial_weights.load(larger, 1, InitialWeights(half.workdir / "checkpoints/5"), Peers(60))
    assert "params/embedding: float32[300,32] in the checkpoint, float32[304,32] in this run" in str(caught.value)
    assert "--init-except=NAMES" in str(caught.value)


def test_other_data_is_refused(text: Path, half: Ended, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    workdir = copy_of(half, tmp_path)
    (workdir / "config.json").write_text((workdir / "config.json").read_text().replace(str(text), f"{tmp_path}/text"))
    (tmp_path / "text/0.txt").write_text("something else\n")
    with pytest.raises(ConfigError, match=r"checkpoints/5 was trained on other data") as caught:
        train(recipe_of(tmp_path / "text"), workdir)
    assert "fingerprint" in str(caught.value)
    assert "--accept-config-change" in str(caught.value)


REFUSED: dict[str, tuple[list[str], str]] = {
    "another seed": (["train.seed=1"], r"another config \(there -> here\):\s*config.train.seed: 0 -> 1\n"),
    "another model": (["model.d_model=64"], "config.model.d_model: 32 -> 64"),
    "too many devices": (["mesh.data=8"], "8"),
    "no such files": (["data.files=nothing/*.txt", "data.num_epochs=1"], "nothing/"),
    "a batch that does not divide": (["train.global_batch_size=6"], "train.global_batch_size: 8 -> 6"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_leaves_the_workdir_as_it_was(text: Path, half: Ended, tmp_path: Path, why: str) -> None:
    changes, said = REFUSED[why]
    before = contents(half.workdir)
    with pytest.raises(ConfigError, match=said):
        train(recipe_of(text, *changes), half.workdir)
    assert contents(half.workdir) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.files=nothing/*.txt", "nothing/"),
        ("data.num_epochs=1", r"data.num_epochs = 1 of .* rows are .* steps .* train.num_steps = 1,000"),
        ("model.vocab_size=200", "200"),
        ("mesh.data=3", "3"),
    ],
)
def test_what_is_refused_makes_no_workdir(text: Path, tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(recipe_of(text, "train.num_steps=1000", change), tmp_path / "new/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "helps"), [("train.seed=1", True), ("model.d_ff=128", False), ("optimizer.type=lion", False)]
)
def test_accepting_a_change_is_offered_where_it_helps(text: Path, tmp_path: Path, change: str, helps: bool) -> None:
    recipe = recipe_of(text)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps(config.to_dict(recipe)))
    with pytest.raises(ConfigError, match="or go on in this one with --accept-config-change"):
        workdirs.check(tmp_path / "run", recipe_of(text, change))  # there is no state that would not fit
    (tmp_path / "run/checkpoints/5").mkdir()
    with pytest.raises(ConfigError) as caught:
        workdirs.check(tmp_path / "run", recipe_of(text, change))
    assert ("go on in this one" in str(caught.value)) == helps
    assert ("arrays of other names or shapes" in str(caught.value)) != helps


def test_a_mesh_that_the_cpu_has_too_few_devices_for_is_told_how_to_have_more(text: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble.program_of(recipe_of(text, "mesh.data=16", "mesh.tensor=1", "train.global_batch_size=16"))
    assert "--cpu-devices=16" in str(caught.value)
    for rows, said in ((16, ["--cpu-devices=8"]), (7, [])):  # more devices do not help with rows
        found = assemble.more_devices(recipe_of(text, "mesh.tensor=2", f"train.global_batch_size={rows}"))
        assert [line.split()[3] for line in found] == said


def test_a_workdir_that_somebody_else_uses(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file"):
        workdirs.check(tmp_path / "file", recipe_of(text))
    (tmp_path / "logs/slurm").mkdir(parents=True)
    workdirs.check(tmp_path / "logs", recipe_of(text))  # files of others are no hindrance
    (tmp_path / "logs/checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"holds checkpoints but no config.json"):
        workdirs.check(tmp_path / "logs", recipe_of(text))
    (tmp_path / "logs/config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        workdirs.check(tmp_path / "logs", recipe_of(text))
    (tmp_path / "logs/config.json").write_text('{"train": {"momentun": 1}}')
    with pytest.raises(ConfigError, match=r"written by another version"):
        workdirs.check(tmp_path / "logs", recipe_of(text))


@pytest.mark.parametrize(
    "change",
    [
        "mesh.tensor=1",
        "zero.stage=0",
        "train.num_microbatches=2",
        "train.remat=full",
        "train.overlap=true",
        "pipeline.schedule=gpipe",
        "attention.context=ring",
        "train.stop_at=3",
        "log.every=7",
        "evaluate.every=1",
        "checkpoint.keep=9",
        "data.read_threads=0",
        "data.cache_dir=elsewhere",
        "model.attention=xla",
    ],
)
def test_what_may_change(text: Path, half: Ended, change: str) -> None:
    workdirs.check(half.workdir, recipe_of(text, change))


def test_a_change_is_accepted_when_told_so(text: Path, half: Ended) -> None:
    workdirs.check(half.workdir, recipe_of(text, "train.num_steps=20"), accept_config_change=True)


def test_a_new_workdir_does_not_take_over_the_checkpoints_of_another_run(
    text: Path, half: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is refused before anything takes time."""
    there = f"checkpoint.dir={copy_of(half, tmp_path) / workdirs.CHECKPOINTS}"
    other = recipe_of(text, there, "schedule.learning_rate=0.5")
    monkeypatch.setattr(assemble, "program_of", None)
    with pytest.raises(
        ConfigError, match=r"another config \(there -> here\):\s*config.schedule.learning_rate: .*-> 0.5"
    ):
        train(other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_weights_that_are_not_there_are_told_before_the_data_is_prepared(
    text: Path, half: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "text_of", None)
    with pytest.raises(ConfigError, match=f"--init-from={tmp_path}/nothing: there is no checkpoint"):
        train(recipe_of(text), tmp_path / "run", initial=InitialWeights(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="no weight is named lairs"):
        train(recipe_of(text), tmp_path / "run", initial=InitialWeights(half.workdir, ("lairs/*",)))
    assert not (tmp_path / "run").exists()


def test_a_place_for_checkpoints_is_one_runs(
    text: Path, half: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new workdir goes on with those of its own config; then the one before is refused, and so is any other run."""
    place = tmp_path / "place"
    shutil.copytree(half.workdir / workdirs.CHECKPOINTS, place)
    at = lambda step, *changes: recipe_of(text, f"checkpoint.dir={place}", f"train.stop_at={step}", *changes)
    assert train(at(6), tmp_path / "one") == Exit.DONE
    assert train(at(7), tmp_path / "two") == Exit.DONE
    monkeypatch.setattr(assemble, "program_of", None)
    theirs = (
        rf"{place} is that of the run in {tmp_path}/two, started by process {os.getpid()} on .*--accept-config-change"
    )
    with pytest.raises(ConfigError, match=theirs):
        train(at(8), tmp_path / "one")
    for step in place.glob("[0-9]*"):  # what has saved nothing yet is not to be saved to by another either
        shutil.rmtree(step)
    with pytest.raises(ConfigError, match=theirs):
        train(at(8, "train.seed=3"), tmp_path / "three")
    assert not (tmp_path / "three").exists()
    with pytest.raises(ConfigError, match=theirs):
        checkpoints("prune", [], tmp_path / "one")


@pytest.mark.parametrize("there_is_another", [False, True])
def test_a_place_for_checkpoints_that_cannot_be_written_is_named_at_the_start(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], there_is_another: bool
) -> None:
    (tmp_path / "file").write_text("")
    places = [f"checkpoint.dir={tmp_path}/file/checkpoints"]
    places += [f"checkpoint.fallback_dir={tmp_path}/second"] if there_is_another else []
    recipe = recipe_of(text, *places, "train.stop_at=1", "checkpoint.max_failures=1", "evaluate.every=0")
    words = f"{tmp_path}/file/checkpoints cannot be a directory: {tmp_path}/file is a file"
    if there_is_another:
        assert train(recipe, tmp_path / "run") == Exit.DONE
        assert f"note: no checkpoint can be saved there: {words}" in capsys.readouterr().err
        assert Checkpointer(tmp_path / "second").steps() == [1]
    else:
        with pytest.raises(ConfigError, match=words):
            train(recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_saved(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is that of the weights before it: here the last update breaks them, and no loss follows."""
    monkeypatch.setattr(Program, "is_finite", property(lambda self: lambda tree: False))
    assert train(recipe_of(text, "train.stop_at=1", "faults.max_skipped=0"), tmp_path / "run") == Exit.FAILED
    assert "step 1: weights not finite after it; this state is not saved" in capsys.readouterr().err
    assert Checkpointer(tmp_path / "run/checkpoints").steps() == []


@pytest.mark.parametrize("name", ["checkpoints", "data", "tensorboard"])
def test_files_in_the_way_are_refused(text: Path, half: Ended, tmp_path: Path, name: str) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    shutil.copy(half.workdir / "config.json", workdir)
    (workdir / name).write_text("in the way")
    with pytest.raises(ConfigError, match=f"{name} is a file"):
        train(recipe_of(text), workdir)


class Watched:
    """A train step that looks at what happens between its calls."""

    def __init__(self, step: Any):
        self.step: Any = step
        self.last: Any = None
        self.events: list[str] = []
        self.between: list[tuple[bool, list[str]]] = []
        monitoring.register_event_duration_secs_listener(lambda event, *_, **__: self.events.append(event))

    def lower(self, *args: Any) -> Watched:
        self.step = self.step.lower(*args)
        return self

    def compile(self) -> Watched:
        self.step = self.step.compile()
        return self

    def memory_analysis(self) -> Any:
        return self.step.memory_analysis()

    def __call__(self, state: Any, batch: Any) -> Any:
        if self.last is not None:
            self.between.append((state is self.last, [event for event in self.events if "compile" in event]))
        self.events.clear()
        self.last, metrics = self.step(state, batch)
        guard("disallow" if len(self.between) < 2 else "allow")
        return self.last, metrics


def guard(transfers: str) -> None:
    """Batches still come to the devices; what is asked for explicitly, as the metrics are, may leave them."""
    jax.config.update("jax_transfer_guard_device_to_host", transfers)
    jax.config.update("jax_transfer_guard_device_to_device", transfers)


def test_a_step_costs_one_dispatch_and_no_wait(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step to the last nothing is compiled, nothing moves between host and devices unasked, and the
    state goes into a step as the last one has returned it.
    """
    made = Program.train_step.func  # type: ignore[attr-defined]
    watched: list[Watched] = []

    def train_step(self: Program) -> Watched:
        watched.append(Watched(made(self)))
        return watched[-1]

    monkeypatch.setattr(Program, "train_step", property(train_step))
    try:
        changes = ("train.num_steps=4", "evaluate.every=0", "checkpoint.every=0", "schedule.warmup_steps=1")
        assert run(recipe_of(text, *changes), tmp_path / "run").code == Exit.DONE
    finally:
        guard("allow")
        monitoring.clear_event_listeners()
    assert watched[0].between == [(True, [])] * 3


def test_a_workdir_in_use_is_refused_and_stays_as_it_is(
    text: Path, half: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = copy_of(half, tmp_path)
    with WorkdirLock(workdir) as lock:
        lock.take_if_there()
        before = contents(workdir)
        assert train(recipe_of(text), workdir) == Exit.IN_USE
        assert contents(workdir) == before
    assert f"error: {workdir} is in use by another run" in capsys.readouterr().err


def test_where_the_time_went_is_written(half: Ended) -> None:
    found = account(read(half.workdir / "goodput.jsonl"))
    assert (found.lives, found.faults, found.last_step, found.running) == (1, 0, 5, False)
    assert all(found.seconds[kind] > 0 for kind in ("productive", "startup", "compile", "save"))
