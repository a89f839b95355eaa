"""A real mpirun over two hosts, both this machine: launch/openmpi.sh trains, saves when signalled, and resumes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import launched
import pytest
from launched import DEVICES, ROOT, STEPS, free_port, until, works

from sharded_train.exits import Exit

pytestmark = pytest.mark.slow

# In place of ssh HOST COMMAND: the second host is this machine by another name.
AGENT = '#!/bin/sh\nshift\nexec sh -c "$*"\n'


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    if not works("mpirun", "--version"):
        pytest.skip("needs Open MPI's mpirun")
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)
    (tmp_path / "hosts").write_text(f"{socket.gethostname()}\nelsewhere\n")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    ours = {"OMPI_MCA_plm_rsh_agent": str(tmp_path / "agent"), "PORT": str(free_port())}
    return launched.environ_with_command(tmp_path) | as_root | ours


def test_a_run_saves_when_signalled_and_resumes(tmp_path: Path, environ: dict[str, str]) -> None:
    """Stopped by SIGTERM to the script at whatever step it is; in the end the state is that of one run, bit for bit."""
    config, workdir, log = tmp_path / "config.py", tmp_path / "run", tmp_path / "log"
    config.write_text(launched.CONFIG)
    command = [str(ROOT / "launch/openmpi.sh"), str(tmp_path / "hosts"), f"--config={config}", f"--workdir={workdir}"]
    with log.open("w") as output:
        started = subprocess.Popen([*command, DEVICES], env=environ, stdout=output, stderr=output)
    until(lambda: bool(launched.steps(workdir)) or started.poll() is not None, 600, log.read_text)
    started.send_signal(signal.SIGTERM)
    assert started.wait(300) == Exit.PREEMPTED, log.read_text()
    assert max(launched.steps(workdir)) < STEPS, "it was done before the signal came"
    done = subprocess.run([*command, DEVICES], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert launched.steps(workdir) == list(range(1, STEPS + 1))
    assert sorted(path.name for path in (workdir / "logs").glob("process-*")) == ["process-0.log", "process-1.log"]
    assert launched.state(workdir) == launched.without_a_stop(config, tmp_path / "again", environ)
