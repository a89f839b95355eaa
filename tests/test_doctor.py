"""`doctor`: each check says ok of what is well, and of what is not what mends it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from sharded_train import recipe
from sharded_train.doctor import between, machine, software
from sharded_train.doctor.finding import Finding
from sharded_train.exits import Exit
from sharded_train.verbs import doctor as doctor_verb

ROOT = Path(__file__).parent.parent


def device(host: int = 0, kind: str = "H100", platform: str = "gpu", **stats: int) -> Any:
    return SimpleNamespace(
        device_kind=kind, platform=platform, slice_index=host, process_index=host, memory_stats=lambda: stats
    )


def by_name(found: Any) -> dict[str, Finding]:
    return {each.what: each for each in found}


def test_this_machine_is_well_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_verb.doctor(recipe.from_dict({"mesh": {"data": 8}}), tmp_path) == Exit.DONE
    said = capsys.readouterr().out
    for what in ("versions", "devices", "links", "open files", "disk speed", "disk space"):
        assert what in said
    assert "8 × cpu here, 8 in all" in said
    assert not list(tmp_path.iterdir())


def test_json_has_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor_verb.doctor(None, tmp_path, json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in rows} <= {"ok", "warning", "failed"}
    assert all(bool(row["fix"]) == (row["status"] != "ok") for row in rows)
    assert len(rows[0]["processes"]) == 1


def test_versions_that_do_not_fit_are_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(**versions: str) -> tuple[str, str]:
        monkeypatch.setattr(software, "_version", lambda name: versions.get(name.replace("-", "_")))
        (found,) = software.versions()
        return found.status, found.fix

    assert status(jax="0.10.2", jaxlib="0.10.2")[0] == "ok"
    assert "jax>=0.10.2" in status(jax="0.9.0", jaxlib="0.9.0")[1]
    assert "of one version" in status(jax="0.12.0.1", jaxlib="0.11.0")[1]
    assert "jaxlib's version" in status(jax="0.10.2", jaxlib="0.10.2", jax_cuda12_plugin="0.10.1")[1]


def test_devices_that_make_no_mesh_are_failed() -> None:
    even = [device(host, bytes_limit=80, bytes_in_use=0) for host in (0, 0, 1, 1)]
    assert {each.status for each in software.devices(even[:2], even, {})} == {"ok"}
    uneven = by_name(software.devices(even[:2], even[:3], {}))
    assert uneven["hosts"].status == "failed"
    assert "2, 1 devices" in uneven["hosts"].words
    mixed = [*even[:3], device(1, "A100")]
    assert "A100, H100" in by_name(software.devices(even[:2], mixed, {}))["devices"].fix
    taken = [device(bytes_limit=80, bytes_in_use=0), device(bytes_limit=60, bytes_in_use=0)]
    assert "something else uses a GPU" in by_name(software.devices(taken, taken, {}))["device memory"].fix


def test_a_gpu_that_jax_does_not_see_is_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM")
    monkeypatch.setattr(software, "DRIVER", driver)
    found = by_name(software.devices(jax.devices(), jax.devices(), {}))["devices"]
    assert (found.status, "sharded-train[cuda12]" in found.fix) == ("failed", True)


def test_ports_of_infiniband(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (some,) = software.links(2, True, tmp_path)
    assert "mlx5_0 400 Gb/sec" in some.words
    assert "mlx5_1" in some.fix
    (none,) = software.links(2, True, tmp_path / "nothing")
    assert "TCP" in none.fix
    assert [each.status for each in software.links(1, True, tmp_path / "nothing")] == ["ok"]


def test_variables_that_slow_nccl_are_warned_of() -> None:
    (found,) = software.environment({"NCCL_P2P_DISABLE": "1", "HOME": "x"})
    assert (found.status, found.words) == ("warning", "NCCL_P2P_DISABLE=1")
    (plain,) = software.environment({"NCCL_P2P_DISABLE": "0"})
    assert plain.status == "ok"


def test_limits_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1024, 1024))
    found = by_name(machine.limits(on_gpu=True, has_infiniband=True))
    assert "ulimit -n" in found["open files"].fix
    assert found["locked memory"].status == "failed"
    monkeypatch.setattr(machine, "_memory", lambda: (100, 5))
    assert by_name(machine.limits(False, False))["memory and cores"].status == "warning"


def test_a_disk_without_room_is_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=2**40, used=0, free=2**38)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert {each.status for each in machine.disk(tmp_path, 2**30)} <= {"ok", "warning"}
    assert by_name(machine.disk(tmp_path, 2**39))["disk space"].status == "failed"
    usage.free = 2**20
    assert by_name(machine.disk(tmp_path))["disk space"].status == "warning"
    (tmp_path / "file").write_text("")
    (found,) = machine.disk(tmp_path / "file" / "below")
    assert (found.what, found.status) == ("workdir", "failed")


def test_bytes_of_checkpoints_are_those_of_the_whole_state() -> None:
    asked = recipe.from_dict({"mesh": {"data": 8}, "zero": {"stage": 1}, "checkpoint": {"keep": 2}})
    shown = doctor_verb.describe(asked, jax.devices())
    needed = doctor_verb._bytes_of_checkpoints(asked, shown)
    assert needed == pytest.approx(3 * 12 * shown["num_parameters"], rel=0.02)


def test_an_offset_is_that_of_the_other_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with between._listen() as listening:
        real = time.time
        thread = threading.Thread(target=between._answer, args=(listening,), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        assert abs(between.offset_of("localhost", port)) < 0.5
        ahead = SimpleNamespace(time=lambda: real() + (100 if threading.current_thread() is thread else 0))
        monkeypatch.setattr(between, "time", ahead)
        assert between.offset_of("localhost", port) == pytest.approx(100, abs=0.5)


class Service:
    """A coordination service in which the others are as told: their addresses by process."""

    def __init__(self, addresses: dict[int, list[Any]]) -> None:
        self.kept = {f"doctor/address/{index}": json.dumps(where) for index, where in addresses.items()}

    def key_value_set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        if key not in self.kept:
            raise RuntimeError("DEADLINE_EXCEEDED: no such key")
        return self.kept[key]

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        pass


def test_a_process_that_does_not_answer_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("localhost", 0))
        port = closed.getsockname()[1]
        (found,) = between.all_processes(Service({1: ["localhost", port]}), 0, 3)
    assert found.status == "failed"
    assert f"process 1 at localhost:{port}" in found.words
    assert "process 2 (DEADLINE_EXCEEDED)" in found.words


def test_a_collective_that_does_not_come_back_is_failed() -> None:
    assert between.collective(lambda: 4, 4).status == "ok"
    assert "3 of 4" in between.collective(lambda: 3, 4).words
    hangs = between.collective(lambda: int(threading.Event().wait(5)), 4, wait=0.1)
    assert (hangs.status, "no answer" in hangs.words) == ("failed", True)


def test_what_processes_find_alike_is_one_line() -> None:
    well, ill = Finding("disk", "ok", "x"), Finding("disk", "failed", "y", "z")
    rows = list(doctor_verb.together({"0": [well], "1": [well], "2": [ill]}))
    assert [(row["status"], row["processes"]) for row in rows] == [("ok", ["0", "1"]), ("failed", ["2"])]


def test_two_processes_reach_each_other(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = [f"--coordinator=localhost:{port}", "--num-processes=2", "--cpu-devices=2", f"--workdir={tmp_path}"]
    command = [sys.executable, "-m", "sharded_train", "doctor", "--json", *where]
    started = [
        subprocess.Popen([*command, f"--process-id={i}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    done = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], done
    rows = {row["what"]: row for row in json.loads(done[0][0])}
    assert rows["devices"]["words"] == "2 × cpu here, 4 in all"
    for what in ("reachability", "clocks", "collective"):
        assert rows[what]["status"] == "ok"
    assert len(rows["versions"]["processes"]) == 2
    assert not done[1][0].strip()
