"""Faults inside a run: it goes back to a verified step, leaves out what it must, and is the run without them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flipping import flipped

from sharded_train import assemble, begin
from sharded_train import recipe as recipes
from sharded_train import train as training
from sharded_train.checkpoint import Checkpointer
from sharded_train.exits import Exit
from sharded_train.faults.goodput import account, read
from sharded_train.faults.health import Health
from sharded_train.models import decoder
from sharded_train.ops import embedding
from sharded_train.recipe import Recipe
from sharded_train.step import TrainState

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS = 10
SETTINGS: dict[str, Any] = {
    "model": {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
    "mesh": {"data": 4, "tensor": 2},
    "zero": {"stage": 1},
    "precision": {"recipe": "fp32"},
    "schedule": {"learning_rate": 3e-3, "warmup_steps": 2},
    "data": {"validation_fraction": 0.2},
    "train": {"num_steps": STEPS, "global_batch_size": 8, "sequence_length": 32},
    "checkpoint": {"every": 2, "keep": 9},
    "log": {"every": 1, "tensorboard": False},
    "evaluate": {"num_batches": 1},
    "faults": {"max_skipped": 2},
}


def recipe_of(text: Path, *changes: str) -> Recipe:
    data = {**SETTINGS["data"], "files": [f"{text}/*.txt"]}
    return recipes.from_dict({**SETTINGS, "data": data}, [f"--config.{c}" for c in changes])


def run(recipe: Recipe, workdir: Path) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = training.train(recipe, workdir)
    return code, output.getvalue()


def state_of(recipe: Recipe, workdir: Path, step: int = STEPS) -> tuple[Any, dict[str, Any]]:
    return Checkpointer(workdir / "checkpoints").restore(step, assemble.program_of(recipe).abstract_checkpoint)


def losses(workdir: Path) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    assert run(recipe_of(text), workdir)[0] == Exit.DONE
    return workdir


def poisoned(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool], loss: float = float("nan")) -> None:
    """The steps that take a batch of a bad number have that loss."""
    batch_of: dict[int, int] = {}
    following, look = training._next, Health.look

    def remember(batches: Any, run: begin.Run, step: int) -> Any:
        batch_of[step] = begin.batch_number(step - 1, run.left_out)
        return following(batches, run, step)

    def see(health: Health, step: int, values: dict[str, float]) -> None:
        look(health, step, {**values, "loss": loss} if is_bad(batch_of[step]) else values)

    monkeypatch.setattr(training, "_next", remember)
    monkeypatch.setattr(Health, "look", see)


def test_bad_batches_are_left_out_and_a_resume_leaves_them_out_too(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row are bad: back to the step before them. Three starts: 10 to 20 s."""
    with monkeypatch.context() as patched:
        poisoned(patched, lambda number: number in (5, 6))
        code, said = run(recipe_of(text, "train.stop_at=8"), tmp_path / "run")
    assert code == Exit.DONE
    assert "step 6 is skipped: loss not finite (loss = nan" in said
    assert "step 7: loss not finite, 2 steps in a row" in said
    assert "rolled back to step 4" in said
    assert "batches left out from now on: 5, 6" in said
    record = state_of(recipe_of(text), tmp_path / "run", 8)[1]
    assert record["skipped_batches"] == [5, 6]
    assert record["next_sample"] == 10 * 8
    assert run(recipe_of(text), tmp_path / "run")[0] == Exit.DONE

    monkeypatch.setattr(begin, "left_out_by", lambda record: (5, 6))
    assert run(recipe_of(text), tmp_path / "expected")[0] == Exit.DONE
    found, expected = (state_of(recipe_of(text), tmp_path / name) for name in ("run", "expected"))
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert found[1]["tokens_seen"] == expected[1]["tokens_seen"]
    assert losses(tmp_path / "run") == losses(tmp_path / "expected")
    assert list(losses(tmp_path / "run")) == list(range(1, STEPS + 1))
    lines = read(tmp_path / "run/goodput.jsonl")
    assert [(line["to"], line["batches"]) for line in lines if line.get("event") == "roll_back"] == [(4, [5, 6])]
    assert account(lines).seconds["redone"] > 0


def test_a_nan_in_one_microbatch_of_one_rank_is_skipped_by_all_and_left_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the compiled step: row 5 of 8, the second microbatch of rank 2 of 4, holds a token that is none, which
    becomes NaN; in batches 5 and 6. Two starts: 10 to 20 s.
    """

    def lookup(rows: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.where((ids == -1)[..., None], jnp.nan, embedding.lookup(rows, ids))

    following, compiled = training._next, training._compiled
    skipped: list[int] = []

    def poison(batches: Any, run: begin.Run, step: int) -> Any:
        batch = following(batches, run, step)
        if begin.batch_number(step - 1, run.left_out) not in (5, 6):
            return batch
        tokens = np.array(batch["tokens"])
        tokens[5, 3] = -1
        return {**batch, "tokens": jax.device_put(tokens, batch["tokens"].sharding)}

    def watched(run: begin.Run) -> Any:
        step_of = compiled(run)

        def train_step(state: TrainState, batch: Any) -> Any:
            before = jax.tree.map(np.array, (state.params, state.opt_state))
            number, num_skipped = int(state.step) + int(state.skipped) + 1, int(state.skipped)
            is_bad = bool((np.array(batch.tokens) == -1).any())
            state, metrics = step_of(state, batch)
            assert int(state.skipped) == num_skipped + is_bad
            if is_bad:
                skipped.append(number)
                jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
            return state, metrics

        return train_step

    monkeypatch.setattr(decoder, "lookup", lookup)
    monkeypatch.setattr(training, "_compiled", watched)
    recipe = recipe_of(text, "train.num_microbatches=2")
    with monkeypatch.context() as patched:
        patched.setattr(training, "_next", poison)
        code, said = run(recipe, tmp_path / "run")
    assert code == Exit.DONE
    assert skipped == [6, 7]
    assert re.search(r"step 6 is skipped: loss.* not finite \(loss = nan", said), said
    assert re.search(r"step 7: loss.* not finite, 2 steps in a row", said), said
    assert "rolled back to step 4" in said
    assert "batches left out from now on: 5, 6" in said

    monkeypatch.setattr(begin, "left_out_by", lambda record: (5, 6))
    assert run(recipe, tmp_path / "expected")[0] == Exit.DONE
    found, expected = (state_of(recipe, tmp_path / name) for name in ("run", "expected"))
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert found[1]["skipped_batches"] == [5, 6]
    assert losses(tmp_path / "run") == losses(tmp_path / "expected")


def test_what_roll_backs_do_not_mend_ends_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned(monkeypatch, lambda number: number >= 5)
    code, said = run(recipe_of(text, "faults.max_rollbacks=2"), tmp_path / "run")
    assert code == Exit.FAILED
    assert said.count("rolled back to step 4") == 2
    assert "2 roll-backs did not bring the run beyond this step" in capsys.readouterr().err


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned(monkeypatch, lambda number: number < 3)
    assert run(recipe_of(text), tmp_path / "run")[0] == Exit.FAILED
    assert "there is no checkpoint of an earlier step to roll back to" in capsys.readouterr().err


def test_a_flipped_bit_in_a_replica_is_found_and_undone(
    text: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one device's norm gain, after step 6, which is saved with it; replicas are compared at steps 4 and 8."""
    compiled = training._compiled
    flips: list[int] = []

    def with_flip(run: begin.Run) -> Any:
        step_of = compiled(run)

        def train_step(state: TrainState, batch: Any) -> Any:
            state, metrics = step_of(state, batch)
            if int(state.step) == 6 and not flips:
                flips.append(6)
                gain = state.params["final_norm"]
                gain = jax.tree.map(lambda x: flipped(x, [3], 0, 20), gain)
                state = dataclasses.replace(state, params={**state.params, "final_norm": gain})
            return state, metrics

        return train_step

    monkeypatch.setattr(training, "_compiled", with_flip)
    recipe = recipe_of(text, "faults.check_every=4", "checkpoint.every=3")
    code, said = run(recipe, tmp_path / "run")
    assert (code, flips) == (Exit.DONE, [6])
    assert "step 8: what devices should hold alike differs: " in said
    assert "params/final_norm" in said
    assert f"{jax.devices()[3]} of process 0" in said
    assert "rolled back to step 3" in said
    found, expected = state_of(recipe, tmp_path / "run"), state_of(recipe, unbroken)
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    assert found[1]["skipped_batches"] == []
