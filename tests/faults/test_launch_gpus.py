"""The GPUs of a host, shared out to the processes that `launch` starts: by what these are given, without a GPU."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from sharded_train.errors import ConfigError
from sharded_train.faults.supervisor import Policy, Supervisor
from sharded_train.verbs import launch as launch_verb

TRAIN = ("train", "--config=c.py", "--workdir=runs/a")


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has made files for eight GPUs."""
    for name in [*(f"nvidia{i}" for i in range(8)), "nvidiactl", "nvidia-uvm"]:
        (tmp_path / name).touch()
    of_here = launch_verb._gpus
    monkeypatch.setattr(launch_verb, "_gpus", lambda environ: of_here(environ, tmp_path))


def shares(processes: int, *more: str, **environ: str) -> list[str]:
    found = launch_verb.shares_of_gpus([*TRAIN, *more], processes, environ)
    assert all(list(share) == ["CUDA_VISIBLE_DEVICES"] for share in found)
    return [share["CUDA_VISIBLE_DEVICES"] for share in found]


@pytest.mark.usefixtures("eight")
def test_each_process_sees_its_own() -> None:
    assert shares(2) == ["0,1,2,3", "4,5,6,7"]
    assert shares(8) == list("01234567")
    assert shares(2, CUDA_VISIBLE_DEVICES="6,3,GPU-a, GPU-b") == ["6,3", "GPU-a,GPU-b"]
    assert shares(2, CUDA_VISIBLE_DEVICES="1,0,-1,5") == ["1", "0"]  # CUDA looks no further than a number that is none
    assert shares(2, JAX_PLATFORMS="cuda,cpu") == ["0,1,2,3", "4,5,6,7"]


@pytest.mark.usefixtures("eight")
def test_where_there_is_nothing_to_share_nothing_is_said() -> None:
    assert shares(1) == []
    assert shares(3, "--cpu-devices=2") == []
    assert shares(3, JAX_PLATFORMS="cpu") == []
    assert shares(3, CUDA_VISIBLE_DEVICES="") == []


@pytest.mark.usefixtures("eight")
def test_what_cannot_be_shared_alike_is_refused() -> None:
    with pytest.raises(ConfigError, match="the 8 GPUs of this host cannot be shared alike, 8 mod 3 = 2"):
        shares(3)
    with pytest.raises(ConfigError, match="the 1 GPUs of this host"):
        shares(2, CUDA_VISIBLE_DEVICES="5")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES = 0,1,0,2 names 0 more than once"):
        shares(2, CUDA_VISIBLE_DEVICES="0,1,0,2")


@pytest.mark.usefixtures("eight")
def test_the_processes_of_launch_have_their_share_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second of two hosts."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    given: list[tuple[str, str]] = []

    class Recorded(Supervisor):
        def run(self) -> int:
            for number, words in enumerate(self._command(1), self._first):
                given.append((words[-1], self._environ[number - self._first]["CUDA_VISIBLE_DEVICES"]))
            return 0

    monkeypatch.setattr(launch_verb, "Supervisor", Recorded)
    assert launch_verb.launch(TRAIN, Policy(), processes=2, hosts=2, host_index=1, coordinator="host0:1234") == 0
    assert given == [("--process-id=2", "0,1,2,3"), ("--process-id=3", "4,5,6,7")]


def test_a_process_has_what_it_is_given(tmp_path: Path) -> None:
    script = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    terminal = io.StringIO()
    command = lambda attempt: [[sys.executable, "-SE", "-c", script]] * 2
    environ = [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert Supervisor(command, tmp_path, Policy(), terminal, first_process=4, environ=environ).run() == 0
    assert {"[4] sees 0,1", "[5] sees 2,3"} <= set(terminal.getvalue().splitlines())
