"""Paths that a rehearsal writes to: what cannot be is told before the compiler starts, and no file is changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharded_train.__main__ import main
from sharded_train.config.file import CONFIGS
from sharded_train.rehearse.outputs import STDOUT, problems_of

BIG = f"--config={CONFIGS / 'llama3_8b.py'}"


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "new.html"
    there.write_text("before")
    os.mkfifo(tmp_path / "pipe")  # nobody reads it yet: it must not be waited for
    outputs = {"json": there, "html": new, "hlo": tmp_path / "pipe", "trace": Path(os.devnull)}
    assert problems_of(outputs) == []
    assert there.read_text() == "before"
    assert not new.exists()
    assert problems_of({"json": STDOUT, "html": Path(os.devnull), "hlo": Path(os.devnull)}) == []


@pytest.mark.parametrize("path", ["/dev/full", "/proc/x.json"])
def test_a_target_that_cannot_be_written(path: str) -> None:
    if not Path(path).parent.is_dir():
        pytest.skip(f"no {Path(path).parent} here")
    (problem,) = problems_of({"json": Path(path)})
    assert problem.startswith(f"--json={path}: cannot be written: ")


def test_folders_and_stdout(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "x.json")
    problems = problems_of(
        {"json": tmp_path, "html": tmp_path / "no" / "x", "hlo": STDOUT, "trace": tmp_path / "dangling"}
    )
    words = ["is a folder; give a file", "there is no folder", "only --json can go to stdout", "there is no folder"]
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


@pytest.mark.parametrize("exists", [False, True])
def test_two_outputs_in_one_file(tmp_path: Path, exists: bool) -> None:
    one, link = tmp_path / "one", tmp_path / "link"
    (tmp_path / "x").mkdir()
    if exists:
        one.write_text("before")
    link.symlink_to(one)
    problems = problems_of({"json": one, "html": tmp_path / "x" / ".." / "one", "trace": link})
    assert problems == [
        f"--html={tmp_path / 'x' / '..' / 'one'}: is the file of --json, too; give each its own",
        f"--trace={link}: is the file of --json, too; give each its own",
    ]


def test_hard_links_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert len(problems_of({"json": tmp_path / "a", "hlo": tmp_path / "b"})) == 1


def test_the_verb_refuses_before_it_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_train.verbs.rehearse.rehearse_one", lambda *_: pytest.fail("compiles"))
    same = tmp_path / "same"
    assert main(["rehearse", BIG, "--cluster=h100:8x8", f"--json={same}", f"--trace={same}"]) == 2
    assert "give each its own" in capsys.readouterr().err
