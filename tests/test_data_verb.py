"""`sharded-train data`: what it makes and prints, how it goes on after a kill, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sharded_train.__main__ import main
from sharded_train.assemble import text_of
from sharded_train.data import prepare, scan, shards
from sharded_train.data.config import DataConfig, Source
from sharded_train.errors import ConfigError
from sharded_train.recipe import load
from sharded_train.verbs.data_rows import print_row, row_facts

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    config = ConfigDict()
    config.model = {"vocab_size": 300, "d_model": 64, "num_layers": 1, "num_heads": 2}
    config.data = {"sources": SOURCES, "validation_fraction": 0.1}
    config.train = {"num_steps": 5, "global_batch_size": 4, "sequence_length": 32}
    return config
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus of two sources and a config.py of them; the commands run there."""
    (tmp_path / "web").mkdir()
    for number in range(4):
        lines = [json.dumps({"title": f"T{number}-{n}", "body": f"some words {n} " * (1 + n % 5)}) for n in range(25)]
        (tmp_path / "web" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    pairs = [json.dumps({"q": f"Q{n}? ", "a": f"is {n}."}) for n in range(30)]
    (tmp_path / "qa.jsonl").write_text("\n".join(pairs) + "\n")
    sources = (
        {"files": ("web/*.jsonl",), "name": "web", "text": "{title}\n{body}", "weight": 3.0},
        {"files": ("qa.jsonl",), "name": "qa", "prompt": "q", "completion": "a", "weight": 1.0},
    )
    (tmp_path / "config.py").write_text(CONFIG.replace("SOURCES", repr(sources)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_tokenizes_once_and_prints_statistics(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "--config=config.py", "--workdir=run", "--workers=1"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    for word in ("documents", "duplicates", "bytes", "prompt", "75.00%", "25.00%", "tokens in each"):
        assert word in out
    assert "tokenizing 130 documents" in err
    before = contents(project / "run")
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["total"]["num_documents"] == 130
    assert found["sources"]["qa"]["num_masked"] > 0
    assert "tokenizing" not in err
    assert contents(project / "run") == before


def test_training_finds_what_was_tokenized(project: Path) -> None:
    assert main(["data", "--config=config.py", "--config.data.cache_dir=shared", "--workers=1"]) == 0
    before = contents(project / "shared")
    said: list[str] = []
    sources = (
        Source(("web/*.jsonl",), name="web", text="{title}\n{body}", weight=3.0),
        Source(("qa.jsonl",), name="qa", prompt="q", completion="a", weight=1.0),
    )
    arguments: dict[str, Any] = {"vocab_size": 300, "sequence_length": 32, "seed": 0, "cache_dir": project / "shared"}
    settings = DataConfig(sources=sources, validation_fraction=0.1)
    first = prepare.prepare(settings, **arguments, progress=said.append)
    assert (said, contents(project / "shared")) == ([], before)
    # The text itself is no longer needed; where some of it is still there, something is wrong.
    (project / "qa.jsonl").unlink()
    for path in (project / "web").iterdir():
        path.unlink()
    again = prepare.prepare(settings, **arguments, progress=said.append)
    assert again.fingerprint == first.fingerprint
    assert [line.split(": ")[1] for line in said] == [
        f"the files of {name} are not here; going on with what was tokenized from them" for name in ("web", "qa")
    ]


def test_rows_are_shown_as_the_model_sees_them(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "--config=config.py", "--workdir=run", "--workers=1", "--show=8"]
    assert main([*command, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sample"] for row in rows] == list(range(8))
    assert [row["source"] for row in rows].count("qa") == 2
    assert all(len(row[key]) == 32 for row in rows for key in ("tokens", "targets", "segments", "positions"))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "sample 0: row" in out
    assert "of qa" in out
    assert "[<end>Q" in out.replace("? ]is", "")  # what is not predicted stands in brackets
    assert "? ]is" in out


def test_rows_are_shown_in_colour(project: Path) -> None:
    from io import StringIO

    arguments: dict[str, Any] = {"vocab_size": 300, "sequence_length": 64, "seed": 0, "cache_dir": project / "data"}
    source = Source(("qa.jsonl",), prompt="q", completion="a")
    data = prepare.prepare(DataConfig(sources=(source,)), **arguments, progress=lambda _: None)
    facts = row_facts(data, 0, 0)
    colored = Console(file=StringIO(), force_terminal=True, color_system="standard", width=100)
    print_row(facts, data.tokenizer, colored)
    text = colored.file.getvalue()  # type: ignore[attr-defined]
    segments = [line for line in text.splitlines() if "segment " in line]
    assert len(segments) == max(facts["segments"])
    assert all(code in line for code, line in zip(("36m", "35m", "32m"), segments, strict=False))
    assert "\x1b[2;36m" in text  # dim: the prompt
    assert "[<end>" not in text


def test_what_it_cannot_do_is_refused_in_words(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--config=config.py"]) == 2
    assert "needs" not in capsys.readouterr().out
    assert main(["data", "--config=config.py", "--workdir=run", "--show=0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    with (project / "web" / "2.jsonl").open("a") as file:
        file.write('{"title": "x", "body": [1]}\n{"title":')
    assert main(["data", "--config=config.py", "--workdir=run"]) == 2
    err = capsys.readouterr().err
    assert "web/2.jsonl, line 26: the field 'body' holds a list, wanted text" in err
    assert "Traceback" not in err
    assert not (project / "run").exists()
    (project / "web" / "2.jsonl").unlink()
    for change in ("model.vocab_size=100", "data.tokenizer=gpt3", "data.sources.0.weight=1e-9"):
        assert main(["data", "--config=config.py", "--workdir=run", f"--config.{change}"]) == 2
        assert change.split("=")[0].split(".")[-1] in capsys.readouterr().err
        assert not (project / "run").exists()


def test_a_run_that_asks_too_much_of_a_source_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "--config=config.py", "--workdir=run", "--workers=1", "--config.data.sources.1.num_epochs=1"]
    assert main([*command, "--config.train.num_steps=1000"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "A run of 1,000 steps sees 4,000 rows of 32 tokens" in out
    assert "note: 4,000 rows of training would go through qa" in out
    assert "(num_epochs = 1," in out
    asked = load("config.py", ["--config.data.sources.1.num_epochs=1", "--config.train.num_steps=1000"])
    with pytest.raises(ConfigError, match=r"go through qa .* times \(num_epochs = 1, .*: lower train\.num_steps"):
        text_of(asked, project / "run", lambda _: None)
    assert len(text_of(load("config.py"), project / "run", lambda _: None).train.members) == 2


def test_a_file_that_changed_is_told_and_only_its_shard_is_made_again(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_BYTES", 500)
    command = ["data", "--config=config.py", "--workdir=run", "--workers=1"]
    assert main(command) == 0
    before = contents(project / "run")
    capsys.readouterr()
    lines = (project / "web" / "1.jsonl").read_text().replace("T1-3", "changed")
    (project / "web" / "1.jsonl").write_text(lines)
    (tokenizer,) = (project / "run" / "data").glob("tokenizer-*.json")
    assert main([*command, f"--config.data.tokenizer={tokenizer}"]) == 0
    err = capsys.readouterr().err
    assert "1 files changed since they were last read: web/1.jsonl" in err
    assert "tokenizing 25 documents" in err
    after = contents(project / "run")
    assert {name for name in before if before[name] != after[name]} <= {
        name for name in before if name.startswith("data/scan-")
    }


def large_corpus(folder: Path, num_files: int) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{n}" for n in range(2000)]
    for number in range(num_files):
        texts = (" ".join(rng.choice(words, 2000)) for _ in range(20))
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    large_corpus(tmp_path, 10)
    code = (
        "from pathlib import Path; import sys, sharded_train.data.shards as shards; shards.PART_BYTES = 1; "
        "from sharded_train.data.config import DataConfig; from sharded_train.data.prepare import prepare; "
        "prepare(DataConfig(files=('*.jsonl',)), vocab_size=300, sequence_length=32, seed=0, "
        "cache_dir=Path('run/data'), progress=lambda text: print(text, file=sys.stderr))"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TOKENIZERS_PARALLELISM": "false"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    first = start()
    data = tmp_path / "run" / "data"
    deadline = time.monotonic() + 60
    while not any(path.suffix == ".json" and len(path.stem) == 32 for path in data.glob("*")):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.stderr and first.stderr.read()
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = {name: value for name, value in contents(data).items() if "/" not in name}
    num_done = sum(len(Path(name).stem) == 32 and name.endswith(".json") for name in kept)
    assert 1 <= num_done < 10
    _, err = start().communicate(timeout=120)
    assert f"tokenizing {20 * (10 - num_done)} documents" in err
    after = contents(data)
    assert {name: after[name] for name in kept} == kept
    assert not list(data.glob(".*.tmp"))


def test_a_full_disk_is_told_and_leaves_nothing_half_done(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--config=config.py", "--workdir=run", "--workers=1"]) == 0
    for path in (project / "run" / "data").glob("*.arrayrecord"):
        path.unlink()
    before = contents(project / "run")
    capsys.readouterr()
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limit[1]))
    try:
        assert main(["data", "--config=config.py", "--workdir=run", "--workers=1"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot write in run/data" in capsys.readouterr().err
    assert contents(project / "run").items() <= before.items()
    assert not list((project / "run" / "data").glob(".*"))


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(shards, "_CHARACTERS_AT_ONCE", 1 << 14)
    arguments: dict[str, Any] = {"vocab_size": 257, "sequence_length": 128, "seed": 0, "progress": lambda _: None}
    line = json.dumps({"text": "some words of a text " * 50}) + "\n"
    peaks = []
    for number, num_documents in enumerate((2, 200, 1000)):  # the first is for what is made once
        path = tmp_path / f"{number}.jsonl"
        with path.open("w") as file:
            file.writelines(line.replace("text ", f"{n} ", 1) for n in range(num_documents))
        tracemalloc.start()
        data = prepare.prepare(DataConfig(files=(str(path),)), cache_dir=tmp_path / str(number), **arguments)
        sum(int(data.train[index]["tokens"][0]) for index in range(0, len(data.train), 50))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "2.jsonl").stat().st_size > 2**20
    assert peaks[2] < peaks[1] + 2**17, peaks
