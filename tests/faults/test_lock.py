"""One run in a workdir: the second is refused by name, and what a killed one leaves is no obstacle."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sharded_train.errors import ConfigError
from sharded_train.faults import lock as locks
from sharded_train.faults.lock import FILE, InUse, WorkdirLock

HOLDER = """
import pathlib, sys, time
from sharded_train.faults.lock import WorkdirLock
with WorkdirLock(pathlib.Path(sys.argv[1])) as lock:
    lock.take()
    print("held", flush=True)
    time.sleep(60)
"""


def holder(workdir: Path) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(workdir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_by_host_and_process_until_the_first_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with WorkdirLock(tmp_path) as lock, pytest.raises(InUse) as caught:
            lock.take_if_there()
        assert f"in use by another run: process {process.pid} on {os.uname().nodename}, since 2" in str(caught.value)
        process.kill()
    with WorkdirLock(tmp_path) as lock:
        lock.take_if_there()  # nothing had to be cleaned up, and nothing is waited for
        lock.take()
        with WorkdirLock(tmp_path) as other, pytest.raises(InUse, match=f"process {os.getpid()} on "):
            other.take()


def test_looking_at_a_workdir_writes_nothing(tmp_path: Path) -> None:
    with WorkdirLock(tmp_path) as lock:
        lock.take_if_there()
    assert list(tmp_path.iterdir()) == []
    with WorkdirLock(tmp_path) as lock:
        lock.take()
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    before = (tmp_path / FILE).stat()
    with WorkdirLock(tmp_path) as lock:
        lock.take_if_there()
    after = (tmp_path / FILE).stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, 0)


def test_a_forked_child_that_lives_on_does_not_keep_it(tmp_path: Path) -> None:
    """As a data worker may, when its parent is killed."""
    script = HOLDER.replace('print("held"', "os.fork() or print(os.getpid()").replace(
        "import pathlib", "import os, pathlib"
    )
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        with WorkdirLock(tmp_path) as lock:
            lock.take()
    finally:
        os.kill(child, 9)
        process.stdout.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_workdir_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / FILE).write_text("")

    def opened(path: Path, flags: int, mode: int) -> int:
        assert flags & os.O_RDWR
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(locks.os, "open", opened)
    with (
        WorkdirLock(tmp_path) as lock,
        pytest.raises(ConfigError, match=f"{tmp_path}/lock cannot be .*{os.strerror(number)}"),
    ):
        lock.take_if_there()


def record(**changes: Any) -> str:
    me = WorkdirLock(Path("nowhere"))._me
    return json.dumps({"beat": 3, **dataclasses.asdict(me), **changes})


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some file systems are."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("locks_there", [True, False])
def test_an_owner_elsewhere_that_counts_on_is_alive(
    tmp_path: Path, locks_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the locks of two hosts do not know of each other."""
    if not locks_there:
        without_locks(monkeypatch)
    (tmp_path / FILE).write_text(record(host="elsewhere", pid=12, kernel="another"))
    reads = []
    read = locks._read

    def counting(file: int) -> tuple[Any, int]:
        owner, beat = read(file)
        reads.append(beat)
        return owner, beat + len(reads) // 4

    monkeypatch.setattr(locks, "_read", counting)
    with WorkdirLock(tmp_path, beat=0.1) as lock, pytest.raises(InUse, match="process 12 on elsewhere"):
        lock.take_if_there()
    assert len(reads) >= 4


@pytest.mark.parametrize("locks_there", [True, False])
def test_an_owner_elsewhere_that_is_silent_is_gone(
    tmp_path: Path, locks_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks_there:
        without_locks(monkeypatch)
    (tmp_path / FILE).write_text(record(host="elsewhere", kernel="another"))
    begin = time.monotonic()
    with WorkdirLock(tmp_path, beat=0.05) as lock:
        lock.take()
    assert time.monotonic() - begin >= 0.15


def test_without_locks_a_process_of_this_host_counts_by_its_birth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    (tmp_path / FILE).write_text(record())
    with WorkdirLock(tmp_path) as lock, pytest.raises(InUse):
        lock.take()
    (tmp_path / FILE).write_text(record(born="1"))  # the number is used again
    with WorkdirLock(tmp_path) as lock:
        lock.take()


def test_an_owner_that_was_taken_over_ends(tmp_path: Path) -> None:
    with WorkdirLock(tmp_path, beat=0.02) as lock:
        lock.take()
        lock.check()
        (tmp_path / FILE).write_text(record(host="elsewhere", token="another").rjust(512))
        time.sleep(0.2)
        with pytest.raises(InUse, match=r"taken over by another run, process \d+ on elsewhere"):
            lock.check()
    assert "elsewhere" in (tmp_path / FILE).read_text()  # not released: it is theirs


@pytest.mark.parametrize("text", ["", "{", "[]", '{"beat": "x"}', '{"beat": 1}', "\0" * 512])
def test_a_damaged_record_is_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with WorkdirLock(tmp_path) as lock:
        lock.take()
