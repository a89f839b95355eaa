"""`sharded-train schedule`: the picture, the numbers, the files, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from sharded_train.__main__ import main
from sharded_train.schedule_report.picture import bars, draw, moments
from sharded_train.schedule_report.remarks import count
from sharded_train.schedules.build import SCHEDULES, default_chunks, make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours, work
from sharded_train.schedules.table import NONE

ISSUE = ["schedule", "--stages=8", "--microbatches=32", "--schedule=interleaved", "--chunks=4"]


def facts_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_terminal_fits_the_page_and_says_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE, "--costs=1,2,1", "--activation-bytes=1048576"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "interleaved: 8 stages × 4 chunks, 32 microbatches; bubble 5.2%"
    assert [line[:8] for line in lines[1:9]] == [f"stage {s} " for s in range(8)]
    assert re.search(r"simulated time +135 +156", out)
    assert re.search(r"bubble +5\.2% +17\.9%", out)
    assert re.search(r"ticks +166 +46", out)
    assert re.search(r"bytes sent a tick +2\.00 MiB", out)
    assert re.search(r"\n +0 +9\.75 ", out)
    assert "note:" not in out


def test_a_small_schedule_shows_every_piece_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages=2", "--microbatches=3"]) == 0
    picture = capsys.readouterr().out.splitlines()[1:3]
    assert [re.findall(r"[FBW]\d", line) for line in picture] == [
        ["F0", "F1", "F2", "B0", "B1", "B2"],
        ["F0", "B0", "F1", "B1", "F2", "B2"],
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 64), (16, 7)])
def test_pictures_of_any_size(name: str, p: int, m: int) -> None:
    v = default_chunks(name)
    costs = Costs.even(p, v, 1, 2, 1)
    made = make(name, p, m, v, costs)
    timing = neighbours(made, costs)
    text = draw(made, costs, timing, 100).plain.splitlines()
    assert [len(line) for line in text] == [100] * p
    drawn = list(bars(made, costs, timing))
    assert len(drawn) == sum((t != NONE).sum() for t in (made.forward, made.backward, made.weights) if t is not None)
    assert sum(bar.end - bar.begin for bar in drawn) == pytest.approx(work(made, costs).sum())
    by_stage = [sorted((bar.begin, bar.end) for bar in drawn if bar.stage == s) for s in range(p)]
    for spans in by_stage:
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


def test_letters_show_what_the_time_goes_into() -> None:
    costs = Costs.even(8, 1)
    made = make("zero_bubble", 8, 64, 1, costs)
    first, *_, last = draw(made, costs, neighbours(made, costs), 100).plain.splitlines()
    assert re.match(r"stage 0 F+[f·]+", first)
    assert last.endswith("WWW")
    assert last[8] == "·"


def test_json_holds_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, *ISSUE, "--costs=1,2,1")
    made = make("interleaved", 8, 32, 4)
    assert (np.array(facts["items"]["forward"]) == made.forward).all()
    assert (np.array(facts["items"]["backward"]) == made.backward).all()
    assert "weights" not in facts["items"]
    assert np.array(facts["slots"]["backward_input"]).max() + 1 == facts["buffers"]["inputs"] == 39
    assert (facts["time"], facts["time_1f1b"]) == pytest.approx((135, 156))
    assert facts["bubble"] == pytest.approx(1 - 128 / 135)
    assert facts["in_flight"] == [9.75, 9.25, 8.75, 8.25, 7.75, 7.25, 6.75, 6.25]
    assert (facts["sends"], facts["sends_useful"]) == (2 * 166 * 8, 2 * 32 * 31)
    zero = facts_of(capsys, "schedule", "--stages=4", "--microbatches=8", "--schedule=zero_bubble")
    assert zero["num_chunks"] == 2
    assert np.array(zero["items"]["weights"]).shape == (zero["num_ticks"], 4)
    assert max(zero["kept"]) <= 3.5


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [f"--svg={tmp_path}/a.svg", f"--html={tmp_path}/a.html"]
    assert main(["schedule", "--stages=4", "--microbatches=8", "--schedule=zero_bubble", "--chunks=1", *files]) == 0
    assert capsys.readouterr().err.splitlines() == [f"wrote {tmp_path}/a.svg", f"wrote {tmp_path}/a.html"]
    image = ElementTree.parse(tmp_path / "a.svg").getroot()
    titles = [title.text for title in image.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 4 * 8
    assert "backward of weights of microbatch 7 on stage 3" in " ".join(map(str, titles))
    texts = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    assert all(label in texts for label in ("0", "5", "20", "time, in the unit of the costs: 27"))
    assert "prefers-color-scheme: dark" in (tmp_path / "a.svg").read_text()


def test_the_page_says_what_its_picture_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["schedule", "--stages=4", "--microbatches=2", "--schedule=zero_bubble", f"--html={tmp_path}/a.html"]
    facts = facts_of(capsys, *argv)
    page = (tmp_path / "a.html").read_text()
    assert "<title>zero_bubble: 4 stages × 2 chunks, 2 microbatches; bubble" in page
    assert "<svg" in page
    for words in (
        "simulated time",
        "time goes right",
        "Darker blocks",
        "kept for weights",
        "In flight",
        facts["remarks"][0],
    ):
        assert words in page
    for number in (f"{facts['bubble']:.1%}", f"{facts['bubble_1f1b']:.1%}", f"{facts['in_flight'][3]:.4g}"):
        assert f">{number}</td>" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"<script|<link|src=|href=|@import|url\(", page.replace("url(#", ""))


@pytest.mark.parametrize("time", [1e-6, 0.3, 1, 3, 17.5, 99, 1e4])
def test_the_axis_has_round_numbers(time: float) -> None:
    found = moments(time)
    assert 5 <= len(found) <= 11
    assert found[0] == 0
    assert time - found[1] < found[-1] <= time * (1 + 1e-6)
    assert f"{found[1]:e}"[:2] in ("1.", "2.", "5.")


def test_1f1b_stands_beside_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages=1", "--microbatches=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b: 1 stage, 1 microbatch; bubble 0.0%\n")
    assert re.search(r"\n +1f1b +\n", out)
    assert [count(n, "microbatches") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]


def test_png_is_written_or_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png = tmp_path / "a.png"
    code = main(["schedule", "--stages=2", "--microbatches=3", f"--png={png}"])
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert code == 2
        assert "sharded-train[notebooks]" in capsys.readouterr().err
    else:
        assert code == 0
        assert png.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["schedule", "--stages=2", "--microbatches=3", f"--png={tmp_path}/a.png"]) == 2
    assert "sharded-train[notebooks]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--stages=4", "schedule needs --microbatches"),
        (
            "--stages=4 --microbatches=8 --schedule=1f2b",
            "there are gpipe, 1f1b, interleaved, zero_bubble; did you mean",
        ),
        ("--schedule=1f1bb", "schedule 1f1bb: there are gpipe, 1f1b, interleaved, zero_bubble; did you mean 1f1b?"),
        ("--schedule=1f1bb", "schedule needs --stages and --microbatches"),
        ("--stages=4 --microbatches=8 --schedule=gpipe --chunks=2", "gpipe has 1 chunk a stage, not 2"),
        ("--stages=4 --microbatches=8 --schedule=interleaved --chunks=1", "give it 2 chunks or more, or choose 1f1b"),
        ("--stages=4 --microbatches=0", "--microbatches: wanted int of at least 1, got '0'"),
        ("--stages=4.5 --microbatches=8", "--stages: wanted int of at least 1, got '4.5'"),
        ("--stages=4 --microbatches=8 --costs=1,2", "wanted F,B,W or F,B,W,BW, numbers of which W alone may be 0"),
        ("--stages=4 --microbatches=8 --costs=0,2,1", "W alone may be 0"),
        ("--stages=4 --microbatches=8 --costs=1,nan,1", "wanted float of at least 0, got 'nan'"),
        ("--stages=4 --microbatches=8 --config.mesh.pipeline=4", "--config.mesh.pipeline=4: schedule has no config"),
        ("--stages=4 --microbatches=8 --chunk=2", "--chunk=2: no such option; did you mean --chunks?"),
        ("--stages=4 --microbatches=8 --svg=nowhere/a.svg", "there is no folder"),
        ("--stages=4 --microbatches=8 --svg=.", "is a folder; give a file"),
    ],
)
def test_what_is_refused(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert words in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--stages=8 --microbatches=4", "4 microbatches on 8 stages: the stages are never all at work"),
        ("--stages=4 --microbatches=32 --schedule=gpipe", "1f1b takes no longer, with at most 7"),
        ("--stages=4 --microbatches=32 --schedule=zero_bubble --costs=1,2,0", "nothing is gained with these costs"),
        ("--stages=4 --microbatches=32 --schedule=zero_bubble --costs=1,2,3,3", "and 1f1b 140: with these costs it is"),
    ],
)
def test_what_works_badly_says_so(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *argv.split()]) == 0
    assert words in capsys.readouterr().out.replace("\n", " ")


def test_it_does_not_wait_for_jax() -> None:
    code = (
        "import sys; from sharded_train.__main__ import main\n"
        "assert main(['schedule', '--stages=2', '--microbatches=3']) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parent.parent)
