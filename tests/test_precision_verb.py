"""The precision verb: what a run logged, in words, as JSON and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from sharded_train.__main__ import main
from sharded_train.precision_log import PrecisionLog, read
from sharded_train.verbs.precision import spark


def line(step: int, lost: float) -> dict[str, Any]:
    of = lambda amax, lost: {"amax": amax, "saturated": [0.0, 0.02], "lost": [0.0, lost], "scale": [448.0, 2.0]}
    return {"step": step, "tensors": {"mlp/up/x": of([1.0, 2.0 * step], 0.0), "mlp/up/g": of([None, 1e-4], lost)}}


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    lines = [line(step, 0.9 if step == 3 else 0.1) for step in range(1, 6)]
    (tmp_path / "precision.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"step": 6')
    return tmp_path


def test_the_worst_is_named(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = workdir / "page.html"
    assert main(["precision", f"--workdir={workdir}", f"--html={page}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "90% of the gradient became zero at step 3, layer 1" in said
    assert "2.0% saturated" in said
    text = page.read_text()
    assert "mlp/up/g, layer 1, step 3: 0.9" in text
    of_section = dict(re.findall(r"<h2>(.*?)</h2>(.*?)</figure>", text, re.S))
    assert "mlp/up/x, layer 0, step 5: 448" in of_section["Scale"]
    assert "mlp/up/g, layer 1, step 5: 0.0001" in of_section["Largest magnitude"]
    assert "mlp/up/g, layer 0" not in of_section["Largest magnitude"]  # it has no number: none is made up
    assert not re.search(r"(src|href)=", text)


def test_of_many_steps_a_cell_is_the_largest_of_some(workdir: Path) -> None:
    log, page = workdir / "precision.jsonl", workdir / "page.html"
    log.write_text("".join(json.dumps(line(step, 0.7 if step == 150 else 0.1)) + "\n" for step in range(1, 193)))
    assert main(["precision", f"--workdir={workdir}", f"--html={page}"]) == 0
    text = page.read_text()
    assert "mlp/up/g, layer 1, the largest of steps 149 to 150: 0.7" in text
    assert text.count("<rect") < 8 * 2 * 96


def test_blocks_have_no_one_scale_and_clip_their_largest(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = workdir / "precision.jsonl"
    log.write_text(log.read_text().replace("[448.0, 2.0]", "[null, null]"))
    page = workdir / "page.html"
    assert main(["precision", f"--workdir={workdir}", f"--html={page}"]) == 0
    assert "<h2>Scale" not in page.read_text()
    said = capsys.readouterr().out
    assert said.count("by block") == 2
    assert "became zero" in said
    assert "2.0% saturated" not in said


def test_json_has_every_number(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", f"--workdir={workdir}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [1, 2, 3, 4, 5]
    assert found["tensors"]["mlp/up/x"]["amax"] == [[1.0, 2.0 * step] for step in range(1, 6)]
    assert found["worst"]["mlp/up/g"]["lost"] == {"share": 0.9, "step": 3, "layer": 1}


def test_a_run_without_a_log_is_told_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", f"--workdir={tmp_path}"]) == 2
    assert "log.precision_every" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", f"--workdir={workdir}", f"--html={workdir}/none/page.html"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_what_was_written_beyond_the_start_goes(workdir: Path) -> None:
    PrecisionLog(workdir, 2, every=1).go_back(1)
    assert [each["step"] for each in read(workdir)] == [1]


def test_every_so_many_steps_and_the_last_are_logged(tmp_path: Path) -> None:
    log = PrecisionLog(tmp_path, 0, every=2)
    for step in range(1, 6):
        log.write(step, {"mlp/up/x": jnp.array([[1.0, 0, 0, jnp.inf]])}, last=step == 5)
    found = read(tmp_path)
    assert [each["step"] for each in found] == [2, 4, 5]
    assert found[0]["tensors"]["mlp/up/x"] == {"amax": [1], "saturated": [0], "lost": [0], "scale": [None]}


def test_histories_are_drawn_by_powers() -> None:
    assert spark([1.0, 2.0, 4.0]) == "▁▅█"
    assert spark([0.0, 0.0]) == "  "
    assert len(spark([1.0] * 100, 10)) == 10
