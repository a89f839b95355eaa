"""The accounts of a run's time: they add up, over restarts and whatever was cut off."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sharded_train.exits import Exit
from sharded_train.faults.goodput import FILE, Goodput, GoodputLog, account, read
from sharded_train.verbs.goodput import goodput


def begin(at: float) -> dict[str, Any]:
    return {"event": "begin", "at": at}


def phase(name: str, at: float, seconds: float, **steps: int) -> dict[str, Any]:
    return {"phase": name, "at": at, "seconds": seconds, **steps}


def end(at: float, code: int) -> dict[str, Any]:
    return {"event": "end", "at": at, "code": code}


# Killed at 200 after a checkpoint of step 6; preempted at 330; done at 1050.
LIVES = [
    begin(100),
    phase("startup", 110, 10),
    phase("compile", 130, 20),
    phase("step", 160, 30, first=1, last=6),
    phase("save", 165, 5),
    phase("step", 185, 20, first=7, last=10),
    begin(205),
    phase("startup", 210, 5),
    phase("restore", 217, 7),
    phase("compile", 220, 3),
    phase("step", 320, 100, first=7, last=26),
    phase("save", 330, 10),
    end(330, Exit.PREEMPTED),
    begin(1000),
    phase("startup", 1010, 10),
    phase("step", 1050, 40, first=27, last=30),
    end(1050, Exit.DONE),
]
EXPECTED = {
    "productive": 30 + 20 + 80 + 40.0,
    "redone": 20.0,  # steps 7 to 10 of 7 to 26
    "startup": 25.0,
    "compile": 23.0,
    "save": 15.0,
    "restore": 7.0,
    "evaluate": 0.0,
    "lost": 20.0,  # 185 to 205
    "idle": 670.0,  # 330 to 1000
}


def test_what_became_of_the_time() -> None:
    found = account(LIVES)
    assert found == Goodput(pytest.approx(EXPECTED), lives=3, faults=1, last_step=30, running=False)  # type: ignore[arg-type]
    assert found.wall == pytest.approx(1050 - 100)
    assert found.goodput == pytest.approx(170 / (950 - 670))


@pytest.mark.parametrize("lines", range(1, len(LIVES) + 1))
def test_it_adds_up_wherever_it_is_cut(lines: int) -> None:
    found = account(LIVES[:lines])
    assert found.wall == pytest.approx(LIVES[lines - 1]["at"] - 100)
    assert found.running == ("code" not in LIVES[lines - 1])


def test_a_roll_back_inside_a_life_is_redone_too() -> None:
    lines = [begin(0), phase("step", 10, 10, first=1, last=10), phase("step", 20, 10, first=6, last=15)]
    assert account(lines).seconds["redone"] == pytest.approx(5)


def test_a_life_that_failed_is_lost_until_the_next(tmp_path: Path) -> None:
    lines = [begin(0), phase("step", 10, 10, first=1, last=10), end(10, Exit.WATCHDOG), begin(25)]
    assert account(lines).seconds["lost"] == 15
    assert account(lines).faults == 1


def log_of(workdir: Path, steps: range, code: int | None) -> None:
    log = GoodputLog(time.time() - 0.5)
    log.open(workdir)
    log.enter("step")
    for step in steps:
        time.sleep(0.01)
        log.step(step)
    log.enter("save")
    if code is not None:
        log.close(code)


def test_a_log_is_appended_to_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    log_of(tmp_path, range(1, 5), None)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"phase": "save", "at": 17')
    log_of(tmp_path, range(5, 7), Exit.DONE)
    found = account(read(tmp_path / FILE))
    assert (found.lives, found.faults, found.last_step, found.running) == (2, 1, 6, False)
    assert found.seconds["productive"] >= 0.06
    assert found.seconds["startup"] == pytest.approx(1.0, abs=0.3)
    assert found.seconds["redone"] == 0


def test_nothing_is_written_before_the_workdir_is_the_runs(tmp_path: Path) -> None:
    log = GoodputLog(time.time())
    log.enter("restore")
    log.close(Exit.CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in LIVES))
    assert goodput(tmp_path) == Exit.DONE
    said = capsys.readouterr().out
    assert "goodput 60.7% of 0:04:40: 3 starts, 1 fault, step 30; ended" in said
    assert "lost to faults" in said
    assert goodput(tmp_path, json=True) == Exit.DONE
    facts = json.loads(capsys.readouterr().out)
    assert facts["seconds"] == EXPECTED
    assert sum(facts["seconds"].values()) == facts["wall"] == 950
