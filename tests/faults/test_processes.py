"""Real processes of a supervised run, killed and stopped: slow, since every life starts and compiles."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_train.exits import Exit
from sharded_train.faults.goodput import account, read
from sharded_train.verbs.launch import free_port

STEPS = 60
SETTINGS: dict[str, Any] = {
    "model": {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
    "mesh": {"data": -1, "tensor": 2},
    "zero": {"stage": 3},
    "precision": {"recipe": "fp32"},
    "schedule": {"learning_rate": 3e-3, "warmup_steps": 2},
    "data": {"validation_fraction": 0.2},
    "train": {"num_steps": STEPS, "global_batch_size": 8, "sequence_length": 32},
    "checkpoint": {"every": 5},
    "log": {"every": 1, "tensorboard": False},
    "distributed": {"heartbeat_seconds": 10},
}


@pytest.fixture(scope="module")
def config(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "files": [f"{text}/*.txt"]}}
    path = tmp_path_factory.mktemp("config") / "config.py"
    path.write_text(f"def get_config():\n    return {settings!r}\n")
    return path


def launched(
    config: Path,
    workdir: Path,
    processes: int,
    devices: int,
    *more: str,
    options: Sequence[str] = (),
    inside: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """A supervisor, with `options`, and its processes, of `devices` devices each; `inside` is a command around it."""
    command = [
        *inside,
        sys.executable,
        "-m",
        "sharded_train",
        "launch",
        f"--processes={processes}",
        "--backoff=0.1",
        *options,
    ]
    command += ["--", "train", f"--config={config}", f"--workdir={workdir}", f"--cpu-devices={devices}", *more]
    environment = {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ended(supervisor: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = supervisor.communicate(timeout=400)[0]
    finally:
        supervisor.kill()
    return supervisor.returncode, said


def process_of(supervisor: subprocess.Popen[str], index: int) -> int:
    """The number of one of its processes."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == supervisor.pid and f"--process-id={index}" in (path / "cmdline").read_text().split("\0"):
                return int(path.name)
        except (OSError, IndexError, ValueError):
            continue
    raise AssertionError(f"no process {index}")


def losses(workdir: Path) -> dict[int, float]:
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def wait_for(supervisor: subprocess.Popen[str], true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert supervisor.poll() is None, supervisor.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(workdir: Path) -> int:
    path = workdir / "goodput.jsonl"
    return account(read(path)).lives if path.exists() else 0


@pytest.fixture(scope="module")
def unbroken(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process with eight devices, without a fault."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    code, said = ended(launched(config, workdir, 1, 8))
    assert code == Exit.DONE, said
    return losses(workdir)


def assert_alike(workdir: Path, expected: dict[int, float]) -> None:
    """Every step once, with the losses of the unbroken run."""
    found = losses(workdir)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.slow  # four lives: 2 to 4 minutes on two cores
def test_killed_stopped_and_resumed_by_one_process_it_is_the_same_run(
    config: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """Two processes of four devices: one is killed; then all are stopped; then one process of eight devices ends it."""
    workdir = tmp_path / "run"
    supervisor = launched(config, workdir, 2, 4)
    wait_for(supervisor, lambda: max(losses(workdir), default=0) >= 12)
    os.kill(process_of(supervisor, 1), signal.SIGKILL)
    wait_for(supervisor, lambda: lives(workdir) == 2 and max(losses(workdir), default=0) >= 20)
    supervisor.terminate()
    code, said = ended(supervisor)
    assert code == Exit.PREEMPTED, said
    assert "process 1: killed by SIGKILL" in said
    assert "goes on from step" in said
    at = max(losses(workdir))
    assert (workdir / "checkpoints" / str(at)).is_dir()  # one common step, saved by both
    code, said = ended(launched(config, workdir, 1, 8))
    assert code == Exit.DONE, said
    assert f"goes on from step {at}" in said

    assert_alike(workdir, unbroken)
    accounts = account(read(workdir / "goodput.jsonl"))
    assert (accounts.lives, accounts.faults, accounts.last_step) == (3, 1, STEPS)
    assert accounts.seconds["lost"] > 0
    assert accounts.seconds["restore"] > 0


@pytest.mark.slow  # six lives: 3 to 6 minutes on two cores
def test_on_8_4_2x4_and_1_devices_stopped_and_without_a_coordinator_it_is_the_same_run(
    config: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """One process of 8 devices, of 4 with another ZeRO stage, two of 4, one of 1. Of the two, one is stopped (SIGSTOP)
    and found by its heartbeat, which is 10 s, then the coordinator is killed.
    """
    workdir = tmp_path / "run"
    code, said = ended(launched(config, workdir, 1, 8, "--config.train.stop_at=15"))
    assert code == Exit.DONE, said
    code, said = ended(launched(config, workdir, 1, 4, "--config.train.stop_at=20", "--config.zero.stage=1"))
    assert code == Exit.DONE, said
    assert "2 data ranks where the checkpoint's run had 4: train.num_microbatches = 2 in place of 1" in said

    supervisor = launched(config, workdir, 2, 4, "--config.train.stop_at=45")
    wait_for(supervisor, lambda: max(losses(workdir)) >= 23)
    begin = time.monotonic()
    stopped = process_of(supervisor, 1)
    os.kill(stopped, signal.SIGSTOP)
    wait_for(supervisor, lambda: not Path(f"/proc/{stopped}").exists())
    assert time.monotonic() - begin < 2 * 10 + 5
    wait_for(supervisor, lambda: lives(workdir) == 4 and max(losses(workdir)) >= 27)
    os.kill(process_of(supervisor, 0), signal.SIGKILL)
    code, said = ended(supervisor)
    assert code == Exit.DONE, said
    assert "process 0: killed by SIGKILL" in said

    code, said = ended(launched(config, workdir, 1, 1, "--config.mesh.tensor=1", "--config.zero.stage=0"))
    assert code == Exit.DONE, said
    assert "1 data ranks where the checkpoint's run had 4: train.num_microbatches = " in said
    assert_alike(workdir, unbroken)
    accounts = account(read(workdir / "goodput.jsonl"))
    assert (accounts.lives, accounts.faults, accounts.last_step) == (6, 2, STEPS)


@pytest.mark.slow  # four lives, of up to four processes: 2 to 4 minutes on two cores
def test_by_1_2_and_4_processes_under_other_schedules_and_zero_stages_it_is_the_same_run(
    config: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """Every life has other processes, another mesh, another pipeline schedule and another ZeRO stage."""
    workdir = tmp_path / "run"
    stages = "mesh.pipeline=2 train.num_microbatches=2 pipeline.schedule="
    for processes, devices, stop_at, changes in (
        (1, 8, 10, "zero.stage=3"),
        (2, 4, 25, f"{stages}1f1b zero.stage=1"),
        (4, 2, 40, f"{stages}zero_bubble pipeline.num_chunks=1 zero.stage=2 mesh.tensor=1"),
        (1, 2, STEPS, f"{stages}gpipe zero.stage=0 mesh.tensor=1"),
    ):
        options = [f"--config.{change}" for change in (*changes.split(), f"train.stop_at={stop_at}")]
        code, said = ended(launched(config, workdir, processes, devices, *options))
        assert code == Exit.DONE, said
        assert max(losses(workdir)) == stop_at
    assert_alike(workdir, unbroken)


@pytest.mark.slow  # four lives on two hosts: 2 to 4 minutes on two cores
def test_two_hosts_each_with_its_supervisor_come_together_again(
    config: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """A process dies on one host: that of the other aborts for want of it, and both supervisors start theirs again."""
    workdir = tmp_path / "run"
    hosts = [f"--host-index={i}" for i in range(2)]
    where = ["--hosts=2", f"--coordinator=localhost:{free_port()}"]
    supervisors = [launched(config, workdir, 1, 4, options=[*where, host]) for host in hosts]
    wait_for(supervisors[0], lambda: max(losses(workdir), default=0) >= 12)
    os.kill(process_of(supervisors[1], 1), signal.SIGKILL)
    found = [ended(supervisor) for supervisor in supervisors]
    assert [code for code, _ in found] == [Exit.DONE] * 2, found
    assert all("restart 1 in" in said for _, said in found)
    assert_alike(workdir, unbroken)


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace with an address and a name of its own."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        named = f'hostname {self.name} && exec "$@"'  # Gloo binds the address that the host's name stands for
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh"]

    def link(self, state: str) -> None:
        run("ip", "-n", self.name, "link", "set", f"{self.name}-link", state)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts with a link between them, on this machine. Needs root and iproute2."""
    made = [Host(f"st{os.getpid()}{letter}", f"10.77.0.{i}") for i, letter in enumerate("ab", 1)]
    try:
        for host in made:
            run("ip", "netns", "add", host.name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces can be made here")
    try:
        a, b = (host.name for host in made)
        run("ip", "link", "add", f"{a}-link", "netns", a, "type", "veth", "peer", "name", f"{b}-link", "netns", b)
        for host in made:
            names = Path("/etc/netns") / host.name / "hosts"
            names.parent.mkdir(parents=True)
            names.write_text("127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in made))
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", f"{host.name}-link")
            run("ip", "-n", host.name, "link", "set", "lo", "up")
            host.link("up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False)
            shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


@pytest.mark.slow  # four lives on two hosts: 2 to 4 minutes on two cores
def test_a_link_that_is_down_for_a_while_stops_both_hosts_and_they_go_on_when_it_is_back(
    config: Path, unbroken: dict[int, float], hosts: list[Host], tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    where = ["--hosts=2", f"--coordinator={hosts[0].address}:8476"]
    supervisors = [
        launched(config, workdir, 1, 4, options=[*where, f"--host-index={i}"], inside=host.inside)
        for i, host in enumerate(hosts)
    ]
    wait_for(supervisors[0], lambda: max(losses(workdir), default=0) >= 12)
    begin = time.monotonic()
    hosts[1].link("down")
    wait_for(supervisors[0], lambda: "restart 1 in" in text_of(workdir / "logs/supervisor.log"))
    assert time.monotonic() - begin < 2 * 10 + 5
    hosts[1].link("up")
    found = [ended(supervisor) for supervisor in supervisors]
    assert [code for code, _ in found] == [Exit.DONE] * 2, found
    assert_alike(workdir, unbroken)


@pytest.mark.slow  # three lives: a minute on two cores
@pytest.mark.parametrize("at", [0, 20])
def test_sigterm_while_two_processes_compile_is_heard_after_the_first_step(
    config: Path, tmp_path: Path, at: int
) -> None:
    """Of a new run, and of one that goes on from a step."""
    workdir = tmp_path / "run"
    if at:
        code, said = ended(launched(config, workdir, 1, 8, f"--config.train.stop_at={at}"))
        assert code == Exit.DONE, said
    supervisor = launched(config, workdir, 2, 4)
    startups = lambda: text_of(workdir / "goodput.jsonl").count('"phase": "startup"')
    wait_for(supervisor, lambda: startups() == 1 + bool(at))
    supervisor.terminate()
    code, said = ended(supervisor)
    assert code == Exit.PREEMPTED, said
    last = max(losses(workdir))
    assert (workdir / f"checkpoints/{last}").is_dir()
    assert at < last <= at + 3


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


SLOWED = """
import sys, time
import jax
from sharded_train import train
from sharded_train.__main__ import command
following = train._next
def slow(*args):
    time.sleep(1.0 if jax.process_index() == 1 else 0.0)
    return following(*args)
train._next = slow
sys.argv[0] = "sharded-train"
command()
"""


@pytest.mark.slow  # one life of two processes: half a minute on two idle cores
def test_a_process_that_is_slow_in_every_step_is_named(config: Path, tmp_path: Path) -> None:
    """Process 1 sleeps for a second in every step; the pace is looked at after steps 4 and 8."""
    workdir = tmp_path / "run"
    command = [sys.executable, "-c", SLOWED, "train", f"--config={config}", f"--workdir={workdir}", "--cpu-devices=4"]
    command += [f"--coordinator=localhost:{free_port()}", "--num-processes=2"]
    command += ["--config.train.stop_at=9", "--config.faults.check_every=4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen(
            [*command, f"--process-id={i}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [Exit.DONE] * 2, said
    named = [line for line in said[0].splitlines() if " is late: its host is busy" in line]  # devices may be slow too
    assert [line.partition("process ")[2][0] for line in named] == ["1", "1"], said[0]
    assert all(socket.gethostname() in line for line in named)
