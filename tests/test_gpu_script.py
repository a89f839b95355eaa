"""benchmarks/gpu.sh without a GPU: what it would run is recorded and understood, what runs leave is summed up."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import rehearsed

from benchmarks import gpu_summary
from sharded_train import recipe
from sharded_train.__main__ import main
from sharded_train.commands import VERBS, Verb
from sharded_train.metrics import MetricsWriter

ROOT = Path(__file__).parents[1]
NVIDIA_SMI = """case "$1" in
-L) for i in $(seq 0 $((GPUS - 1))); do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done ;;
--query-gpu=index) seq 0 $((GPUS - 1)) ;;
--query-gpu=compute_cap) for i in $(seq "$GPUS"); do echo "$CAPABILITY"; done ;;
*) exit 9 ;;
esac"""
PYTHON = """printf '%s %s\\n' "${CUDA_VISIBLE_DEVICES:-all}" "$(printf '%q ' "$@")" >>"$RECORD"
[[ " $* " != *" $BROKEN "* ]] || exit 3"""


def ran(folder: Path, gpus: int, capability: str = "9.0", broken: str = "none") -> tuple[int, str, list[list[str]]]:
    """Exit code, output, and commands of Python as words, the first of which are the GPUs that they see."""
    for name, text in (("bin/make", "true"), ("bin/nvidia-smi", NVIDIA_SMI), ("venv/bin/python", PYTHON)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VENV": str(folder / "venv")}
    given |= {"RECORD": str(folder / "record"), "BROKEN": broken, "GPUS": str(gpus), "CAPABILITY": capability}
    there = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    script = ["bash", str(ROOT / "benchmarks/gpu.sh"), str(folder / "out")]
    done = subprocess.run(script, env=there | given, capture_output=True, text=True, timeout=60)
    assert "line " not in done.stderr, done.stderr  # bash names the line of what it could not do
    return done.returncode, done.stdout, [shlex.split(line) for line in (folder / "record").read_text().splitlines()]


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs load their config, check it for the devices that CUDA_VISIBLE_DEVICES names, and do nothing else."""

    def checked(verb: Verb) -> Verb:
        def run(args: argparse.Namespace, overrides: list[str]) -> int:
            if verb.has_config:
                asked = recipe.load(args.config, overrides)
                assert asked.precision.recipe != "fp32"
                recipe.check(asked, len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
            return 7

        return dataclasses.replace(verb, run=run)

    monkeypatch.chdir(ROOT)
    for name, verb in list(VERBS.items()):
        monkeypatch.setitem(VERBS, name, checked(verb))


@pytest.mark.usefixtures("understood")
@pytest.mark.parametrize(("gpus", "capability"), [(1, "9.0"), (4, "9.0"), (1, "10.0"), (1, "8.9")])
def test_every_command_is_understood(
    gpus: int, capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, commands = ran(tmp_path, gpus, capability)
    assert code == 0, out
    for visible, *words in commands:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if words[:2] == ["-m", "sharded_train"]:
            assert main(words[2:]) == 7, (words, capsys.readouterr().err)
        else:
            text = (ROOT / words[0]).read_text()
            assert all(f'"{word.partition("=")[0]}"' in text for word in words[1:] if word.startswith("--")), words
    seen = {words[-1].partition("/out/")[2]: visible for visible, *words in commands if "train" in words}
    recipes = ["bf16", "fp8_delayed", "fp8_current", *(["mxfp8"] if capability == "10.0" else [])]
    assert [name for name in seen if name.startswith("1b_")] == [f"1b_{name}" for name in recipes]
    sharded = {name: visible for name, visible in seen.items() if name.startswith("sharded")}
    assert (len(sharded), set(sharded.values())) == ((4, {"0,1,2,3"}) if gpus > 1 else (0, set()))
    assert any("gpu_branches" in words[1] for words in commands) == (gpus > 1)
    assert {seen[f"1b_{name}"] for name in recipes} == {"0"}


def test_it_goes_on_after_a_part_that_fails(tmp_path: Path) -> None:
    code, out, commands = ran(tmp_path, 1, broken="benchmarks/gpu_attention.py")
    assert code == 1
    assert out.splitlines()[-1] == "=== failed: attention by cuDNN (3)"
    assert any("gpu_summary" in words[1] for words in commands)


def run_of(folder: Path, name: str, last: int, tokens_per_second: float, loss: float) -> None:
    """What `train` leaves behind, an evaluation after its last step included."""
    workdir = folder / f"1b_{name}"
    workdir.mkdir()
    settings = {"train": {"global_batch_size": 8, "sequence_length": 2048}}
    (workdir / "config.json").write_text(json.dumps(settings))
    writer = MetricsWriter(workdir, 0, tensorboard=False)
    writer.write(1, {"loss": 9.0, "tokens_per_second": None, "mfu": None})
    for step in range(5, last + 1, 5):
        rates = {"tokens_per_second": tokens_per_second, "mfu": tokens_per_second / 1e5, "peak_memory_bytes": 2**33}
        writer.write(step, {"loss": loss, **rates})
    writer.write(last, {"validation_loss": 1.0, "validation_bits_per_byte": 1.0})
    writer.close()


def test_runs_are_put_beside_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, last, rate, loss in (("bf16", 50, 5e4, 4.0), ("fp8_current", 50, 7e4, 4.04), ("fp8_delayed", 20, 6e4, 5)):
        run_of(tmp_path, name, last, rate, loss)
    said = {"time": {"tokens_per_second_per_device": 1e5}, "memory": {"total_bytes": 2**32}}
    (tmp_path / "rehearsed_bf16.json").write_text(json.dumps(said))
    monkeypatch.setattr(sys, "argv", ["gpu_summary.py", str(tmp_path)])
    lines: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text: lines.extend(text.splitlines()))
    gpu_summary.main()
    cells = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for line in lines if len(row := line.split("|")) > 3}
    assert cells["bf16"] == ["327.7 ms", "50,000", "1.00", "50.0%", "4.0000", "+0.00%", "8.0 GiB", "2.00, 2.00"]
    assert cells["fp8_current"][1:6] == ["70,000", "1.40", "70.0%", "4.0400", "+1.00%"]
    assert cells["fp8_delayed"][5] == "of step 20, not 50"
    assert lines[-2:] == [
        "bf16's MFU 50.0%: not reached (goal 55%)",
        "best FP8 recipe 1.40 of bf16's tokens/s: reached (goal 1.3)",
    ]


@pytest.mark.slow
def test_a_rehearsal_has_what_is_put_beside_a_run() -> None:
    """Slow: it compiles for a GPU."""
    facts = rehearsed.tiny().facts
    run = {"tokens/s": facts["time"]["tokens_per_second_per_device"], "memory": facts["memory"]["total_bytes"]}
    assert gpu_summary.beside_rehearsal({**run, "rehearsed": facts}) == "1.00, 1.00"
