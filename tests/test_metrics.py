"""Metrics: lines of JSON that are there once, rates over the right time, a terminal that can be piped."""

from __future__ import annotations

import io
import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from sharded_train.faults.config import FaultsConfig
from sharded_train.metrics import MetricsWriter, Pace, ProgressTable, RunLog, duration
from sharded_train.peak import peak_of

VALUES = {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 1234.5, "mfu": 0.25}


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def write(workdir: Path, start_step: int, *steps: int, loss: float = 2.5, tensorboard: bool = False) -> None:
    writer = MetricsWriter(workdir, start_step, tensorboard=tensorboard)
    for step in steps:
        writer.write(step, {**VALUES, "loss": loss})
    writer.close()


def test_a_line_holds_the_step_and_the_values(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    assert lines_of(tmp_path) == [{"step": 10, **VALUES}]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_is_null_in_valid_json(tmp_path: Path, number: float | None) -> None:
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.write(1, {"loss": number})
    writer.close()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse) == {"step": 1, "loss": None}


def test_after_a_resume_each_step_stands_there_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 3, 4)
    write(tmp_path, 2, 3, 4, 5, loss=9.0)
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 2.5), (2, 2.5), (3, 9), (4, 9), (5, 9)]


def test_a_line_cut_off_by_a_kill_goes(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "los')
    write(tmp_path, 2, 3)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_a_resume_at_the_last_line_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    before = (tmp_path / "metrics.jsonl").stat()
    write(tmp_path, 2)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_tensorboard_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    assert not (tmp_path / "tensorboard").exists()
    write(tmp_path, 1, 2, tensorboard=True)
    events = list((tmp_path / "tensorboard").iterdir())
    assert len(events) == 1
    assert b"learning_rate" in events[0].read_bytes()


def test_pace_leaves_out_what_is_excluded() -> None:
    pace = Pace()
    assert pace.seconds_per_step(3) is None
    with pace.excluded():
        time.sleep(0.2)
    time.sleep(0.1)
    seconds = pace.seconds_per_step(5)
    assert seconds is not None
    assert 0.05 <= seconds < 0.1
    time.sleep(0.1)
    seconds = pace.seconds_per_step(6)
    assert seconds is not None
    assert 0.1 <= seconds < 0.2


def printed(console: Console, rows: int) -> str:
    table = ProgressTable(console, 1_000_000, 8)
    for row in range(rows):
        table.row(row, VALUES, 0.5)
    table.note("[a note] with brackets")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_piped_into_a_file_are_plain_whole_and_aligned() -> None:
    lines = printed(Console(file=io.StringIO(), width=40), 21).splitlines()
    assert len(lines) == 2 + 21 + 1  # a header before rows 1 and 21
    assert lines[0] == lines[21] == ProgressTable.HEADER
    assert lines[-1] == "[a note] with brackets"
    assert len({len(line) for line in lines[:-1]}) == 1
    assert len(lines[0]) <= 80
    assert all(character.isprintable() for line in lines for character in line)
    assert lines[1].split() == ["0/1000000", "2.5000", "1,234", "154", "25.0%", "0.5000", "1.00e-03", "5d", "18:53:20"]


def test_no_line_is_wider_than_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    table = ProgressTable(console, 1_000_000, 8)
    for size in (1.0, 1e3, 1e6, 1e12, -1e5, math.nan, math.inf):
        table.row(1_000_000, {**VALUES, "loss": size, "grad_norm": size}, 0.5)
    table.row(0, {**VALUES, "tokens_per_second": 2.5e9}, 20.0)
    table.note("words " * 40)
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert {len(line) for line in lines[1:9]} == {80}
    assert "2.5e+09   3.1e+08" in lines[8]
    assert lines[8].endswith(" 231 days")
    assert [line.split()[1] for line in lines[1:4]] == ["1.0000", "1000.00", "1000000"]
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    ProgressTable(console, 1000, 8).row(1000, VALUES, 0.5)  # and beside the "[0] " of `launch`
    assert {len(line) for line in cast(io.StringIO, console.file).getvalue().splitlines()} == {76}


def test_a_terminal_gets_colour() -> None:
    assert "\x1b[" in printed(Console(file=io.StringIO(), force_terminal=True, color_system="standard"), 1)


def test_a_row_without_a_rate_says_so() -> None:
    console = Console(file=io.StringIO())
    ProgressTable(console, 10, 1).row(1, {**VALUES, "tokens_per_second": None, "mfu": None}, None)
    assert cast(io.StringIO, console.file).getvalue().splitlines()[1].split().count("-") == 4


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 3661, 90061)] == ["0:00:00", "0:01:00", "1:01:01", "1d 01:01:01"]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla V100-SXM2-16GB", 125e12),
    ],
)
def test_the_peak_of_a_known_device(kind: str, peak: float) -> None:
    device = cast(jax.Device, SimpleNamespace(device_kind=kind, platform="gpu"))
    assert peak_of(device, jnp.dtype("bfloat16")).per_device == peak


def test_virtual_devices_share_the_measured_peak_of_the_cores() -> None:
    peak = peak_of(jax.devices()[0], jnp.dtype("float32"))
    assert 1e8 < peak.per_device * jax.local_device_count() < 1e14
    assert "measured here with a float32 product" in peak.words
    assert f"shared by {jax.local_device_count()} devices" in peak.words


def test_a_slow_loader_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of 1 s, in which steps wait 0, 0.1 and 1.2 s for their batches; the start is not counted."""
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    out = io.StringIO()
    table = ProgressTable(Console(file=out, width=200), 7, 1)
    log = RunLog(
        None, table, every=2, last_step=7, tokens_per_step=1, flops_per_step=1.0, peak=1.0, tokens_seen=0,
        read_threads=3, tell_start=lambda: None, faults=FaultsConfig(),
    )  # fmt: skip
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "num_tokens": 1.0}
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(table, "row", lambda step, values, seconds: told.append((step, values["data_wait"])))
    for step, waited in enumerate([50.0, 50.0, 50.05, 50.1, 50.7, 51.3, 51.3], start=1):
        log.add(step, {key: jnp.float32(value) for key, value in metrics.items()}, waited)
    log.flush()
    assert [step for step, _ in told] == [2, 4, 6, 7]
    assert told[1][1] == pytest.approx(0.1 / 1)
    assert told[2][1] == pytest.approx(1.2 / 1)
    assert "loader is the bottleneck" in out.getvalue()
    assert "data.read_threads (now 3)" in out.getvalue()


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Files of this process take so many bytes and no more, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_told_once_and_stops_no_run(
    tmp_path: Path, limit: Callable[[int], None], tensorboard: bool
) -> None:
    out = io.StringIO()
    log = RunLog(
        MetricsWriter(tmp_path, 0, tensorboard=tensorboard), ProgressTable(Console(file=out, width=200), 9, 1),
        every=1, last_step=9, tokens_per_step=1, flops_per_step=1.0, peak=1.0, tokens_seen=0,
        read_threads=3, tell_start=lambda: None, faults=FaultsConfig(),
    )  # fmt: skip
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "num_tokens": 1.0}
    for step in range(1, 8):
        log.add(step, {key: jnp.float32(value) for key, value in metrics.items()}, 0.0)
        log.flush()
        if step in (2, 5):
            limit((tmp_path / "metrics.jsonl").stat().st_size + 20 if step == 2 else resource.RLIM_INFINITY)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 6, 7]
    assert out.getvalue().count("step 3: what is measured cannot be written, and is left out for now: [Errno 2") == 1
    assert out.getvalue().count("cannot be written") == 1
