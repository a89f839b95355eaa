"""A real SLURM of two nodes on this machine: launch/slurm.sbatch trains, saves when signalled, and resumes."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import launched
import pytest
from launched import DEVICES, ROOT, STEPS, free_port, until, works

NODES = (socket.gethostname(), "localhost")  # names that resolve here, both this machine

pytestmark = pytest.mark.slow


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
    environ = launched.environ_with_command(tmp_path) | {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started = [subprocess.Popen(each, env=environ, stderr=subprocess.DEVNULL) for each in daemons]
    try:
        yield environ
    finally:
        subprocess.run(["scancel", "--full", f"--user={user}"], env=environ, capture_output=True)
        for each in reversed(started):
            each.terminate()
            each.wait(60)


def test_a_batch_job_saves_is_queued_again_and_resumes(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Stopped by SIGTERM to its step at whatever step it is; in the end the state is that of one run, bit for bit."""
    config, workdir, log = tmp_path / "config.py", tmp_path / "run", tmp_path / "job.log"
    config.write_text(launched.CONFIG)
    said = lambda: log.read_text() if log.is_file() else ""
    idle = lambda: b"idle" in subprocess.run(["sinfo"], env=slurm, capture_output=True).stdout
    until(idle, 60, lambda: "no idle nodes")
    batch = [str(ROOT / "launch/slurm.sbatch"), f"--config={config}", f"--workdir={workdir}", DEVICES]
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=60", f"--output={log}"]
    done = subprocess.run(["sbatch", *options, *batch], env=slurm, capture_output=True, text=True, check=True)
    job = done.stdout.strip()

    until(lambda: bool(launched.steps(workdir)), 600, said)
    subprocess.run(["scancel", "--signal=TERM", f"{job}.0"], env=slurm, check=True)  # as --signal does it
    until(lambda: "code 75" in said(), 300, said)
    stopped = max(launched.steps(workdir))
    assert stopped < STEPS, "it was done before the signal came"

    def queued() -> bytes:
        """The job's state, such as PD or R; empty when it has ended."""
        told = subprocess.run(["squeue", "--noheader", "--format=%t", f"--jobs={job}"], env=slurm, capture_output=True)
        return told.stdout.strip()

    until(lambda: queued() == b"PD", 60, lambda: f"it was not queued again: {said()}")
    time.sleep(2)  # a start in the second in which its credential was revoked would be refused
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm, check=True)  # not in two minutes
    until(lambda: not queued(), 600, said)
    assert (workdir / f"checkpoints/{STEPS}").is_dir(), said()
    assert launched.steps(workdir) == list(range(1, STEPS + 1))
    assert launched.state(workdir) == launched.without_a_stop(config, tmp_path / "again", slurm)
