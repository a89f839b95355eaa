"""Runs under FP8: broken off and resumed they are the same run, and scales are never lost in silence."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sharded_train import precision_log
from sharded_train import recipe as recipes
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.generate import generate
from sharded_train.recipe import Recipe
from sharded_train.train import train

pytestmark = pytest.mark.usefixtures("compiled_once")

SETTINGS: dict[str, Any] = {
    "model": {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64},
    "mesh": {"data": 8},
    "zero": {"stage": 1},
    "precision": {"recipe": "fp8_delayed"},
    "data": {"validation_fraction": 0.2},
    "schedule": {"warmup_steps": 1},
    "train": {"num_steps": 4, "global_batch_size": 8, "sequence_length": 32},
    "log": {"every": 1, "precision_every": 1, "tensorboard": False},
}


def recipe_of(text: Path, *changes: str) -> Recipe:
    files = {"data": {**SETTINGS["data"], "files": [f"{text}/*.txt"]}}
    return recipes.from_dict({**SETTINGS, **files}, [f"--config.{c}" for c in changes])


def losses(workdir: Path) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def phases(workdir: Path) -> list[str]:
    """What took time, over all lives of a run."""
    lines = map(json.loads, (workdir / "goodput.jsonl").read_text().splitlines())
    return [line["phase"] for line in lines if "phase" in line]


def test_a_run_in_fp8_goes_on_with_its_scales(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CASES 19: bit for bit with the state; without it an error that says what to do, or measured anew."""
    whole, halves, from_bf16 = (tmp_path / name for name in ("whole", "halves", "from_bf16"))
    assert train(recipe_of(text), whole) == Exit.DONE
    assert "calibration" in capsys.readouterr().out
    train(recipe_of(text, "train.stop_at=2"), halves)
    capsys.readouterr()
    assert train(recipe_of(text), halves) == Exit.DONE
    assert "calibration" not in capsys.readouterr().out
    assert [phases(whole).count("compile"), phases(halves).count("compile")] == [2, 3]  # calibrating is no step
    assert losses(halves) == losses(whole)
    assert precision_log.read(halves) == precision_log.read(whole)
    told = precision_log.read(whole)
    assert [line["step"] for line in told] == [1, 2, 3, 4]
    assert set(told[0]["tensors"]["mlp/up/x"]) == {"amax", "saturated", "lost", "scale"}
    assert len(told[0]["tensors"]["mlp/up/x"]["amax"]) == 2
    assert max(share for name, of in told[0]["tensors"].items() if name.endswith("/g") for share in of["lost"]) < 0.2
    train(recipe_of(text, "train.stop_at=2", "precision.recipe=bf16"), from_bf16)
    with pytest.raises(ConfigError, match="recalibrate=true"):
        train(recipe_of(text), from_bf16, accept_config_change=True)
    capsys.readouterr()
    again, anew = recipe_of(text, "precision.fp8.recalibrate=true"), shutil.copytree(from_bf16, tmp_path / "anew")
    assert train(again, from_bf16, accept_config_change=True) == Exit.DONE
    assert "calibration" in capsys.readouterr().out
    for stop_at in (3, 4):  # the same command after a stop is the same run
        part = dataclasses.replace(again, train=dataclasses.replace(again.train, stop_at=stop_at))
        assert train(part, anew, accept_config_change=True) in (Exit.DONE, Exit.PREEMPTED)
    assert "FP8's scales are those of step 3" in capsys.readouterr().out
    assert losses(anew) == losses(from_bf16)
    assert abs(losses(from_bf16)[4] - losses(whole)[4]) < 0.02
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "top_k": None, "num_samples": 1, "seed": 0}
    assert generate(recipe_of(text, "precision.recipe=bf16"), whole, prompt="mesh", json=True, **options) == 0
