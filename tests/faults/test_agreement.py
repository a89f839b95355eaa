"""Processes that are not alike are named before the first step. Threads stand in for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharded_train import config
from sharded_train.errors import ConfigError
from sharded_train.faults import agreement
from sharded_train.faults.group import Group, everyone
from sharded_train.recipe import Recipe, from_dict

SETTINGS = config.to_dict(Recipe())


def processes(count: int, act: Callable[[Group], Any]) -> list[list[str]]:
    """The problems that each of `count` processes raised."""
    barrier = threading.Barrier(count, timeout=30)
    said = [""] * count
    problems: list[list[str]] = [[] for _ in range(count)]

    def process(index: int) -> None:
        def gather(text: str) -> list[str]:
            said[index] = text
            barrier.wait()
            found = list(said)
            barrier.wait()
            return found

        try:
            act(Group(index, count, gather))
        except ConfigError as error:
            problems[index] = error.problems

    threads = [threading.Thread(target=process, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def test_alike_they_agree() -> None:
    assert processes(3, lambda group: agreement.check(group, SETTINGS, {"jax": "1"})) == [[]] * 3


def test_another_config_is_named_by_process_and_key_on_all() -> None:
    def check(group: Group) -> None:
        changes = ["--config.train.seed=5"] if group.index == 2 else []
        agreement.check(group, config.to_dict(from_dict(SETTINGS, changes)), {"jax": "1"})

    told = processes(3, check)
    assert told[0] == told[1] == told[2]
    assert told[0][1:] == ["  process 2: config.train.seed: 0 -> 5"]


def test_other_code_and_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = threading.local()
    monkeypatch.setattr(agreement, "code_digest", lambda: digests.value)

    def check(group: Group) -> None:
        digests.value = "abc" if group.index == 0 else "xyz"
        agreement.check(group, SETTINGS, {"jax": "0.10.2", **({"numpy": "2"} if group.index else {})})

    assert processes(2, check)[1][1:] == [
        "  process 1: other source code of sharded_train: abc -> xyz",
        "  process 1: numpy: None -> 2",
    ]


def test_the_code_has_one_digest() -> None:
    assert agreement.code_digest() == agreement.code_digest()


def test_other_data_is_named_by_what_differs() -> None:
    def check(group: Group) -> None:
        size = 7 if group.index == 1 else 8
        agreement.same_data(group, {"fingerprint": f"of {size}", "num_documents": size, "files": ["a.txt"]})

    told = processes(3, check)
    assert told[0] == told[1] == told[2]
    assert told[0][1:3] == ["  process 1: fingerprint: of 8 -> of 7", "  process 1: num_documents: 8 -> 7"]
    assert len(told[0]) == 4
    alike = lambda group: agreement.same_data(group, {"fingerprint": "one", "num_documents": group.index})
    assert processes(2, alike) == [[], []]


def test_another_program_is_named() -> None:
    told = processes(3, lambda group: agreement.same_program(group, lambda: f"program {group.index // 2}"))
    assert told[0] == told[1] == told[2]
    assert told[0][0].startswith("process 2 would compile another train step than process 0")
    assert processes(2, lambda group: agreement.same_program(group, lambda: "program")) == [[], []]


def test_a_shared_directory_is_made_and_left_as_it_was(tmp_path: Path) -> None:
    assert processes(3, lambda group: agreement.probe(group, tmp_path / "new/run")) == [[]] * 3
    assert list((tmp_path / "new/run").iterdir()) == []


def test_a_directory_that_is_not_shared_is_told_by_all(tmp_path: Path) -> None:
    told = processes(2, lambda group: agreement.probe(group, tmp_path / str(group.index), wait=0.2))
    assert told[1][0].startswith(f"{tmp_path}/1 is not the same directory for all processes")
    assert told[0][0].startswith("process 1 on ")
    assert f"{tmp_path}/1 is not the same directory" in told[0][0]


def test_a_process_that_cannot_write_tells_why_and_so_do_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def probe(group: Group) -> None:
        agreement.probe(group, tmp_path / ("file" if group.index == 0 else "there") / "run", wait=0.2)

    told = processes(2, probe)
    assert told[0][0].endswith("cannot be written from here: Not a directory")
    assert told[1][0].startswith("process 0 on ")


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    group = everyone()
    assert (group.index, group.count, group.gather("text")) == (0, 1, ["text"])
    agreement.probe(group, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="mine"), group.shared_errors():
        raise ConfigError("mine")
