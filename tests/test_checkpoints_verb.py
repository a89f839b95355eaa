"""`sharded-train checkpoints` on a workdir of toy checkpoints: what it says, and what it leaves alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.__main__ import main
from sharded_train.checkpoint import Checkpointer
from sharded_train.exits import Exit


def state_of(step: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    w = jnp.arange(32 * 40, dtype=jnp.float32).reshape(32, 40).at[3, 4].add(step)
    return {"params": {"w": put(w, "data"), "b": put(jnp.ones(3, jnp.bfloat16))}, "step": put(jnp.int32(step))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir with checkpoints of steps 1 to 5."""
    workdir = tmp_path_factory.mktemp("workdir")
    with contextlib.closing(Checkpointer(workdir / "checkpoints", keep=9)) as checkpointer:
        for step in range(1, 6):
            run = {"tokens_seen": step * 1000, "mesh": {"data": 2, "tensor": 1}, "num_processes": 2, "commit": "c0ffee"}
            run["data"] = {"fingerprint": "f" * 64, "train": {"num_documents": 234, "num_bytes": 10**6}}
            checkpointer.save(step, state_of(step), {**run, "note": "\x1b[2J[bold]", "config": {"a": step}})
    return workdir


@pytest.fixture
def workdir(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def names(workdir: Path) -> list[str]:
    return sorted(os.listdir(workdir / "checkpoints"))


def asked(capsys: pytest.CaptureFixture[str], *argv: str, code: int = Exit.DONE) -> str:
    assert main(["checkpoints", *argv]) == code
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = Exit.DONE) -> Any:
    return json.loads(asked(capsys, *argv, "--json", code=code))


def test_list(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "checkpoints/9").mkdir()
    (workdir / "checkpoints/3").rename(workdir / "checkpoints/3.damaged")
    lines = asked(capsys, "list", f"--workdir={workdir}").splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["1", "2", "4", "5", "9"]
    assert "verified" in lines[2]
    assert "data 2 in 2 processes" in lines[2]
    assert "2,000" in lines[3]
    assert "no checkpoint" in lines[6]
    assert f"set aside: {workdir}/checkpoints/3.damaged" in lines[-1]
    found = as_json(capsys, "list", f"--workdir={workdir}")
    assert [row["verified"] for row in found["checkpoints"]] == [True] * 4 + [False]
    assert found["checkpoints"][0]["commit"] == "c0ffee"


def test_show(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = asked(capsys, "show", f"--workdir={workdir}")
    assert "step 5" in text
    assert "params/w" in text
    assert "float32[32,40]" in text
    assert "data over data 2" in text
    assert "whole over data 2" in text
    assert r'note: "\u001b[2J[bold]"' in text.splitlines()
    assert "bfloat16[3]" in text
    lines = text.splitlines()
    assert {"data:", f'  fingerprint: "{"f" * 64}"'} < set(lines)
    assert any(line.startswith("  train: {") and line.endswith("}") for line in lines)
    assert "\x1b" not in text  # what somebody wrote into a record does nothing to a terminal
    found = as_json(capsys, "show", "2", f"--workdir={workdir}")
    assert found["step"] == 2
    assert found["run"]["config"] == {"a": 2}
    assert found["leaves"]["params/w"]["num_bytes"] == 32 * 40 * 4


def test_verify_names_what_is_damaged_and_changes_nothing(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "verify", f"--workdir={workdir}").count("is what was saved") == 5
    damaged = workdir / "checkpoints/4/state/_METADATA"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")
    before = names(workdir)
    text = asked(capsys, "verify", f"--workdir={workdir}", code=Exit.DAMAGED)
    assert f"{damaged} has other contents than when it was saved" in text
    assert text.count("is what was saved") == 4
    (one,) = as_json(capsys, "verify", "4", f"--workdir={workdir}", code=Exit.DAMAGED)
    assert one["path"] == f"{workdir}/checkpoints/4"
    assert names(workdir) == before


def test_diff(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "diff", "1", "5", f"--workdir={workdir}")
    assert found["leaves"]["params/b"] is None
    assert found["leaves"]["params/w"] == {
        "differing": 1,
        "of": 32 * 40,
        "largest": 4.0,
        "relative": pytest.approx(4 / np.linalg.norm(np.asarray(state_of(1)["params"]["w"])), rel=1e-6),
    }
    assert found["config"] == ["config.a: 1 -> 5"]
    assert found["only"] == {f"{workdir}/checkpoints/1": [], f"{workdir}/checkpoints/5": []}
    elsewhere = shutil.copytree(workdir / "checkpoints/5", workdir / "elsewhere")
    text = asked(capsys, "diff", "5", str(elsewhere), f"--workdir={workdir}")
    assert "3 of 3 arrays are equal, bit for bit." in text


def test_rollback_and_prune(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "The run goes on from step 4." in asked(capsys, "rollback", "4", f"--workdir={workdir}")
    assert names(workdir) == ["1", "2", "3", "4", "5.rolled_back"]
    (workdir / "checkpoints/8").mkdir()  # nobody's checkpoint: neither counted as kept nor deleted
    found = as_json(capsys, "prune", "--keep=1", "--keep-every=2", f"--workdir={workdir}")
    assert [Path(path).name for path in found["deleted"]] == ["1", "3"]
    assert found["num_bytes"] > 2 * 32 * 40 * 4
    assert names(workdir) == ["2", "4", "5.rolled_back", "8"]
    asked(capsys, "prune", "--keep=5", "--set-aside", f"--workdir={workdir}")
    assert names(workdir) == ["2", "4", "8"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["show", "7"], "there is no checkpoint of step 7; there are 1, 2, 3, 4, 5"),
        (["show", "1", "2"], "one step is wanted, got 2: 1 2"),
        (["diff", "1"], "which two? Got 1: 1"),
        (["rollback"], "one step is wanted, got 0"),
        (["diff", "1", "elsewhere"], "elsewhere is neither a step nor the directory of a checkpoint"),
        (["look"], "invalid choice: 'look'"),
    ],
)
def test_what_is_refused(saved: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(["checkpoints", *argv, f"--workdir={saved}"]) == Exit.CONFIG
    assert said in capsys.readouterr().err


def test_a_workdir_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", f"--workdir={tmp_path}"]) == Exit.CONFIG
    assert f"{tmp_path} has no checkpoints" in capsys.readouterr().err


def test_a_workdir_before_its_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert main(["checkpoints", "show", f"--workdir={tmp_path}"]) == Exit.CONFIG
    assert f"error: there is no checkpoint yet in {tmp_path / 'checkpoints'}" in capsys.readouterr().err
