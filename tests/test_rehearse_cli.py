"""The verb rehearse: what is refused and when, what a failing compiler leaves, and one rehearsal from end to end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from sharded_train import launch, noise
from sharded_train.__main__ import main
from sharded_train.config.file import CONFIGS
from sharded_train.recipe import Recipe
from sharded_train.rehearse import compile as compiling
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.run import Rehearsal
from sharded_train.verbs import rehearse as rehearse_verb
from tests.rehearsed import tiny

BIG = f"--config={CONFIGS / 'llama3_8b.py'}"
CONFIG = """
def get_config():
    return {
        "model": {"vocab_size": 256, "d_model": 128, "num_layers": 2, "num_heads": 2, "d_ff": 256},
        "mesh": {"data": 2, "tensor": 2},
        "zero": {"stage": 3},
        "precision": {"recipe": "bf16"},
        "train": {"global_batch_size": 4, "sequence_length": 256, "num_microbatches": 1},
    }
"""
DOCUMENTED = Path(__file__).parents[1] / "docs" / "rehearse.md"
needs_plugin = pytest.mark.skipif(
    not launch.has_plugin(), reason="JAX's CUDA plugin is not installed: make setup-rehearse"
)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return f"--config={path}"


@pytest.fixture
def never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        raise AssertionError("this must be refused before any device is made")

    monkeypatch.setattr(rehearse_verb, "rehearse_one", fail)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["rehearse", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("error: ") for line in err.splitlines()]


@pytest.mark.usefixtures("never_compiles")
class TestRefused:
    def test_an_unknown_kind_lists_the_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        (problem,) = refused(capsys, BIG, "--cluster=h101:8x8")
        assert "did you mean h100? known are h100, h200, a100, b200, gb200" in problem

    def test_what_cannot_be_laid_out(self, capsys: pytest.CaptureFixture[str]) -> None:
        (problem,) = refused(
            capsys, BIG, "--cluster=h100:2048x8", "--config.mesh.tensor=16", "--config.train.global_batch_size=16384"
        )
        assert "the tensor group at data 0 lies across hosts (8 on host 0, 8 on host 1)" in problem
        assert "sizes that fit: tensor = 1, 2, 4, 8" in problem

    def test_sizes_that_are_offered_fit_the_model_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        """32 heads do not split over 3 or 6 devices, though hosts of 6 would."""
        asked = ["--config.mesh.tensor=4", "--config.train.global_batch_size=192"]
        (problem,) = refused(capsys, BIG, "--cluster=h100:8x6", *asked)
        assert "sizes that fit: tensor = 1, 2 (with" in problem
        problem = refused(capsys, BIG, "--cluster=h100:8x6", "--config.mesh.tensor=5", *asked[1:])[0]
        assert "no whole number; nearest that works: mesh.tensor = 4 or mesh.tensor = 8" in problem

    def test_everything_wrong_is_said_at_once(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        problems = refused(
            capsys,
            BIG,
            "--cluster=h100:8x8",
            "--config.mesh.tensor=3",
            f"--json={tmp_path}",
            f"--hlo={tmp_path / 'no' / 'x.txt'}",
            "--html=-",
        )
        words = ["mesh.tensor = 3", "is a folder", "there is no folder", "only --json can go to stdout"]
        for word in words:
            assert any(word in problem for problem in problems), (word, problems)

    def test_a_comparison(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        cluster = "--cluster=h100:8x8"
        (problem,) = refused(capsys, BIG, cluster, "--compare=--config.zero.stage=3")
        assert "wanted two or more different ones with | between them" in problem
        (problem,) = refused(capsys, BIG, cluster, "--compare=--config.zero.stage=3 | zero.stage=1")
        assert "zero.stage=1: between the bars stand --config.KEY=VALUE only" in problem
        problems = refused(
            capsys, BIG, cluster, "--compare=--config.mesh.tensor=3 | --config.mesh.tensor=8", f"--hlo={tmp_path / 'x'}"
        )
        assert problems[0].startswith("mesh.tensor=3: ")
        assert "--hlo with --compare" in problems[-1]

    @pytest.mark.parametrize("found", [{}, {"jax-cuda12-plugin": "0.1.2"}])
    def test_a_plugin_that_is_not_there_or_another_version(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, found: dict[str, str]
    ) -> None:
        monkeypatch.setattr(compiling, "_version", found.get)
        (problem,) = refused(capsys, BIG, "--cluster=h100:8x8", "--config.train.global_batch_size=1024")
        assert problem.endswith(": make setup-rehearse")
        assert ("0.1.2" if found else "not installed (no GPU needed)") in problem

    def test_a_missing_cluster(self, capsys: pytest.CaptureFixture[str]) -> None:
        (problem,) = refused(capsys, BIG)
        assert "rehearse needs --cluster; for example: sharded-train rehearse --config=" in problem


def test_the_plugins_lines_are_dropped_and_all_others_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "I0000 00:00:1795980412 cudart_stub.cc:31] Could not find cuda drivers\n"
    monkeypatch.setattr(noise, "has_plugin", lambda: True)
    for has_driver, said in ((False, "from C++\n"), (True, f"{line}from C++\n")):
        monkeypatch.setattr(noise, "has_driver", lambda found=has_driver: found)
        with contextlib.suppress(RuntimeError), launch.quiet_plugin():
            os.write(2, f"{line}from C++\n".encode())
            raise RuntimeError("what is written before an error is kept too")
        assert capfd.readouterr().err == said


@needs_plugin
def test_a_compiler_that_gives_up_leaves_its_words_and_the_program(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_: Any, **__: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError("INTERNAL: cannot do this\nbecause of that")

    monkeypatch.setattr(jax.stages.Lowered, "compile", give_up)
    monkeypatch.setattr(compiling.gpu_flags, "check", lambda platform: None)
    assert main(["rehearse", small, "--cluster=h100:2x2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "XLA could not compile the step: INTERNAL: cannot do this" in error
    kept = Path(re.findall(r"\S+\.mlir", error)[0])
    text = kept.read_text()
    kept.unlink()
    assert "// INTERNAL: cannot do this\n// because of that\n" in text
    assert "4 × NVIDIA H100" in text.splitlines()[0]
    assert "func.func public @main" in text


def test_what_xla_says_of_memory_is_dropped_and_errors_arrive_also_of_a_compiler_that_dies() -> None:
    program = """
import os
from sharded_train.rehearse.quiet import quiet_compiler
with quiet_compiler():
    os.write(2, b"W1129 hlo_rematerialization.cc:3231] Can't reduce memory use below 1 MiB\\n")
    os.write(2, b"W1129 other.cc:1] heed this\\n")
with quiet_compiler():
    os.write(2, b"F1129 other.cc:1] check failed")
    os.abort()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.stderr == "W1129 other.cc:1] heed this\nF1129 other.cc:1] check failed"
    assert done.returncode < 0


@pytest.mark.usefixtures("never_compiles")
def test_a_cluster_without_a_kind_is_told_how_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = refused(capsys, BIG, "--cluster=8x8")
    assert "Did you mean h100:8x8?" in problem


def test_of_several_the_error_names_its_variant(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise compiling.CompilerFailure("XLA could not")

    monkeypatch.setattr(rehearse_verb, "rehearse_one", fail)
    monkeypatch.setattr(rehearse_verb, "check_plugin", lambda: None)
    assert (
        main(["rehearse", small, "--cluster=h100:2x2", "--compare=--config.zero.stage=3 | --config.zero.stage=1"]) == 1
    )
    assert "error: zero.stage=3: XLA could not" in capsys.readouterr().err


def test_a_rehearsal(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is told of a rehearsal, with one that other tests have made."""
    done = tiny()

    def rehearse(recipe: Recipe, cluster: Cluster, progress: Callable[[str], Any]) -> Rehearsal:
        assert (recipe.model.d_model, cluster.num_devices) == (128, 4)
        progress("compiling")
        return done

    monkeypatch.setattr(rehearse_verb, "rehearse_one", rehearse)
    outputs = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "hlo", "trace")}
    assert main(["rehearse", small, "--cluster=h100:2x2", *(f"--{kind}={p}" for kind, p in outputs.items())]) == 0
    out, err = capsys.readouterr()
    titles = ["Does it fit?", "What crosses which wire?", "What is computed?", "How long, at best?", "Verdict"]
    assert [line for line in out.splitlines() if line in titles] == titles
    assert re.search(r"^ +0\.\d s  compiling$", err, re.MULTILINE)
    assert [line for line in err.splitlines() if line.startswith("wrote ")] == [
        f"wrote {outputs[kind]}" for kind in ("json", "html", "hlo", "trace")
    ]
    facts = json.loads(outputs["json"].read_text())
    assert facts["cluster"]["num_devices"] == facts["mesh"]["num_devices"] == 4
    assert facts["config"]["zero"]["stage"] == 3
    assert facts["memory"]["verdict"] == "fits"
    assert {each["op"] for each in facts["wires"]["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert facts["time"]["step_seconds"] > 0
    assert outputs["hlo"].read_text().startswith("HloModule jit__train_step")
    assert "<html" in outputs["html"].read_text()
    assert json.loads(outputs["trace"].read_text())["traceEvents"]
    for key in facts:
        assert f"`{key}`" in DOCUMENTED.read_text(), f"{DOCUMENTED.name} does not say what {key} is"


@needs_plugin
@pytest.mark.slow
def test_a_comparison_on_stdout(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    variants = "--compare=--config.zero.stage=3 | --config.zero.stage=1"
    assert main(["rehearse", small, "--cluster=h100:2x2", variants, "--json=-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["variants"]) == facts["comparison"]["variants"] == ["zero.stage=3", "zero.stage=1"]
    assert [each["config"]["zero"]["stage"] for each in facts["variants"].values()] == [3, 1]


@needs_plugin
@pytest.mark.slow
def test_405b_on_16384_devices_within_five_minutes_and_12_gib(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    config = f"--config={CONFIGS / 'llama3_405b.py'}"
    batch = ["--config.train.global_batch_size=2048", "--config.train.num_microbatches=1"]
    plain = ["mesh.pipeline=1", "pipeline.schedule=1f1b", "pipeline.num_chunks=none", "zero.stage=3"]
    batch += [f"--config.{change}" for change in plain]  # what is measured is one program with every layer in it
    command = [sys.executable, "-m", "sharded_train", "rehearse", config, "--cluster=h100:2048x8", *batch]
    subprocess.run([*command, f"--json={facts}"], check=True, capture_output=True, timeout=300)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 12 * 2**20  # KiB: the largest child so far
    found = json.loads(facts.read_text())
    assert found["mesh"]["num_devices"] == 16_384
    assert found["memory"]["verdict"] == "fits"
    assert found["wires"]["not_understood"] == []
    crossing = [each for each in found["wires"]["collectives"] if "tensor" in each["axes"] and each["link"] != "NVLink"]
    assert sum(each["wire_bytes"] * each["times"] for each in crossing) < 100  # the norm's sum over all devices


def test_ctrl_c_does_not_end_what_filters_the_compilers_words() -> None:
    code = """
import os, signal, sys, time
from sharded_train.rehearse.quiet import quiet_compiler
signal.signal(signal.SIGINT, lambda *_: None)
with quiet_compiler():
    time.sleep(1)  # until the filter has begun
    os.killpg(0, signal.SIGINT)
    time.sleep(0.5)
    os.write(2, b"last words")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "last words")
