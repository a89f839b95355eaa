"""What tests of real launchers share: a small run, the same one without a stop, and what to wait for."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sharded_train.checkpoint import record

ROOT = Path(__file__).parent.parent
STEPS = 60
DEVICES = "--cpu-devices=2"  # of each of the two processes
CONFIG = f"""
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {{"vocab_size": 512, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64, "dropout": 0.1}}
    config.schedule = {{"learning_rate": 1e-3, "warmup_steps": 4}}
    config.data = {{"max_bytes": 200_000}}
    config.train = {{"num_steps": {STEPS}, "global_batch_size": 8, "sequence_length": 32}}
    config.checkpoint = {{"every": 1000}}
    config.log = {{"every": 1, "tensorboard": False}}
    return config
"""


def environ_with_command(folder: Path) -> dict[str, str]:
    """An environment in which `sharded-train` is this code, in this Python."""
    (folder / "bin").mkdir()
    ours = folder / "bin/sharded-train"
    ours.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m sharded_train "$@"\n')
    ours.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


def works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def steps(workdir: Path) -> list[int]:
    """Those that a run has told of."""
    if not (workdir / "metrics.jsonl").is_file():
        return []
    return [
        row["step"] for row in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if "loss" in row
    ]


def state(workdir: Path) -> dict[str, str]:
    """The digest of every array of the last checkpoint: of all its bits."""
    return {name: leaf.digest for name, leaf in record.read(workdir / f"checkpoints/{STEPS}").leaves.items()}


def without_a_stop(config: Path, workdir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The last state of the same run on the same mesh, started by hand and never stopped."""
    command = ["sharded-train", "launch", "--processes=2", "--", "train", f"--config={config}", DEVICES]
    done = subprocess.run([*command, f"--workdir={workdir}"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return state(workdir)
