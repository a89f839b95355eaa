"""A real SLURM of two nodes on this machine: launch/slurm.sbatch trains, saves when signalled, and resumes."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NODES = (socket.gethostname(), "localhost")  # names that resolve here, both this machine
STEPS = 60

pytestmark = pytest.mark.slow


def works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands and ours are found. Its daemons end with the test."""
    programs = ("slurmctld", "slurmd", "sbatch")
    if os.getuid() != 0 or not all(map(shutil.which, programs)) or not works("munge", "-n"):
        pytest.skip(f"needs {', '.join(programs)}, a munged that runs, and root")
    user = getpass.getuser()
    nodes = "\n".join(f"NodeName={n} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=4000" for n in NODES)
    (tmp_path / "slurm.conf").write_text(
        f"ClusterName=two\nSlurmctldHost={NODES[0]}(127.0.0.1)\nSlurmctldPort={free_port()}\n"
        f"SlurmUser={user}\nSlurmdUser={user}\n"
        f"StateSaveLocation={tmp_path}/state\nSlurmdSpoolDir={tmp_path}/spool-%n\n"
        f"SlurmctldPidFile={tmp_path}/ctld.pid\nSlurmdPidFile={tmp_path}/d-%n.pid\n"
        f"SlurmctldLogFile={tmp_path}/ctld.log\nSlurmdLogFile={tmp_path}/d-%n.log\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nProctrackType=proctrack/linuxproc\n"
        "TaskPlugin=task/none\nSlurmdParameters=config_overrides\nMpiDefault=none\nKillWait=120\nReturnToService=2\n"
        f"{nodes}\nPartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
    )
    (tmp_path / "bin").mkdir()
    ours = tmp_path / "bin/sharded-train"
    ours.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m sharded_train "$@"\n')
    ours.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environ |= {"SLURM_CONF": f"{tmp_path}/slurm.conf", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started = [subprocess.Popen(each, env=environ, stderr=subprocess.DEVNULL) for each in daemons]
    try:
        yield environ
    finally:
        subprocess.run(["scancel", "--full", f"--user={user}"], env=environ, capture_output=True)
        for each in reversed(started):
            each.terminate()
            each.wait(60)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_a_batch_job_saves_is_queued_again_and_resumes(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Stopped by SIGTERM to its step at whatever step it is; the losses of all steps are those of one run."""
    config = tmp_path / "config.py"
    config.write_text(
        "from ml_collections import ConfigDict\n\n\n"
        "def get_config() -> ConfigDict:\n"
        "    config = ConfigDict()\n"
        '    config.model = {"vocab_size": 512, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64}\n'
        '    config.schedule = {"learning_rate": 1e-3, "warmup_steps": 4}\n'
        '    config.data = {"max_bytes": 200_000}\n'
        f'    config.train = {{"num_steps": {STEPS}, "global_batch_size": 8, "sequence_length": 32}}\n'
        '    config.checkpoint = {"every": 1000}\n'
        '    config.log = {"every": 1, "tensorboard": False}\n'
        "    return config\n"
    )
    workdir, log = tmp_path / "run", tmp_path / "job.log"
    until(lambda: b"idle" in subprocess.run(["sinfo"], env=slurm, capture_output=True).stdout, 60, "no idle nodes")
    batch = [str(ROOT / "launch/slurm.sbatch"), f"--config={config}", f"--workdir={workdir}", "--cpu-devices=2"]
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=60", f"--output={log}"]
    done = subprocess.run(["sbatch", *options, *batch], env=slurm, capture_output=True, text=True, check=True)
    job = done.stdout.strip()

    def steps() -> dict[int, float]:
        if not (workdir / "metrics.jsonl").is_file():
            return {}
        rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    said = lambda: log.read_text() if log.is_file() else ""
    until(lambda: bool(steps()), 600, "no step was done")
    subprocess.run(["scancel", "--signal=TERM", f"{job}.0"], env=slurm, check=True)  # as --signal does it
    until(lambda: "code 75" in said(), 300, said())
    stopped = max(steps())
    assert stopped < STEPS, "it was done before the signal came"

    def released() -> bool:
        """Queued again; SLURM would wait two minutes before it begins."""
        held = subprocess.run(["squeue", "--noheader", "--format=%t", f"--jobs={job}"], env=slurm, capture_output=True)
        return held.stdout.strip() == b"PD"

    until(released, 60, "it was not queued again")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm, check=True)
    until(lambda: max(steps()) == STEPS, 600, said())
    assert sorted(steps()) == list(range(1, STEPS + 1))
    until(lambda: (workdir / f"checkpoints/{STEPS}").is_dir(), 60, "the last checkpoint is missing")
