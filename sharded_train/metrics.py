"""What a run says of itself: metrics.jsonl, TensorBoard, lines on the terminal, and the rates in them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from tensorboardX import SummaryWriter

from sharded_train import memory
from sharded_train import workdir as layout
from sharded_train.data.loader import slow_loader
from sharded_train.faults.config import FaultsConfig
from sharded_train.faults.health import Health
from sharded_train.precision_log import PrecisionLog, append, drop_after


class Pace:
    """How fast steps go: the wall time between the ends of steps, without what is excluded."""

    def __init__(self) -> None:
        self._start: tuple[int, float] | None = None
        self._excluded = 0.0

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here is not training: evaluation, and waiting for a checkpoint."""
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start

    def seconds_per_step(self, step: int) -> float | None:
        """Since the last call, which `step` is counted from; None at the first."""
        now, start, excluded = time.perf_counter(), self._start, self._excluded
        self._start, self._excluded = (step, now), 0.0
        return None if start is None or step == start[0] else (now - start[1] - excluded) / (step - start[0])


class MetricsWriter:
    """Writes metrics.jsonl, an object a line, and the same to TensorBoard. For one process.

    Begun at step k, it takes away what an earlier run wrote beyond k: each step stands there once. A number that is
    not finite is null in the JSON. Methods raise OSError where the disk takes no more; TensorBoard then ends.
    """

    def __init__(self, workdir: Path, start_step: int, *, tensorboard: bool):
        self._path, self._folder = workdir / layout.METRICS, str(workdir / layout.TENSORBOARD) if tensorboard else None
        self._open(start_step)

    def _open(self, start_step: int) -> None:
        drop_after(self._path, start_step)
        # TensorBoard itself hides what older files say from the purge step on. Its thread is not to flush: it would die
        # of a full disk, and `write` wait for it without end.
        options = {"purge_step": start_step + 1, "flush_secs": 86400}
        self._tensorboard = None if self._folder is None else SummaryWriter(self._folder, **options)

    def go_back(self, step: int) -> None:
        """What was written after `step` is taken away."""
        self.close()
        self._open(step)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        append(self._path, json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        if self._tensorboard is None:
            return
        try:
            for key, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        except OSError:
            self._tensorboard = None
            raise

    def close(self) -> None:
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):
                self._tensorboard.close()


class RunLog:
    """The metrics of every step: fetched one step late, looked at, and told when they are due.

    `tell_start` is called when the first step is done, the moment that the pace is measured from.
    """

    def __init__(
        self,
        writer: MetricsWriter | None,
        table: ProgressTable,
        *,
        every: int,
        last_step: int,
        tokens_per_step: int,
        flops_per_step: float,
        peak: float,
        tokens_seen: int,
        read_threads: int,
        tell_start: Callable[[], None],
        faults: FaultsConfig,
        precision: PrecisionLog | None = None,
    ):
        self._writer, self._table = writer, table
        self._every, self._last_step = every, last_step
        self._tokens_per_step, self._flops_per_step, self._peak = tokens_per_step, flops_per_step, peak
        self._read_threads = read_threads
        self._tell_start = tell_start
        self._precision = precision
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._waited = self._waited_told = 0.0
        self._told = 0
        self._begun = self._in_vain = False
        self.tokens_seen = tokens_seen
        self.pace = Pace()
        self.health = Health(faults, self.note)

    def note(self, text: str) -> None:
        """A line between the rows."""
        self._table.note(text)

    def go_back(self, step: int, tokens_seen: int) -> None:
        """The run goes on from `step`: what was written after it is taken away."""
        self._pending = None
        self.tokens_seen = tokens_seen
        for log in (self._writer, self._precision):
            if log is not None:
                self._write(step, functools.partial(log.go_back, step))
        self.pace.seconds_per_step(step)
        self._told = step

    def add(self, step: int, metrics: dict[str, Any], seconds_waited: float) -> None:
        """The metrics of a step that has been started; waits for those of the step before it.

        `seconds_waited` is how long all steps so far have waited for their batches.
        """
        self.flush()
        self._pending = step, metrics
        self._waited = seconds_waited

    def flush(self) -> None:
        """Waits for the metrics of the step added last. Raises RollBack or Diverged if they are bad: see `Health`."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        fp8 = metrics.pop("fp8", None)
        if fp8 is not None and self._precision is not None:
            last = step == self._last_step
            self._write(step, functools.partial(self._precision.write, step, fp8, last=last))
        values = {key: value.item() for key, value in jax.device_get(metrics).items()}
        self.tokens_seen += round(values["num_tokens"])
        broken = [key for key in ("loss", "grad_norm") if not math.isfinite(values[key])]
        if not self._begun:
            self._begun = True
            self._tell_start()
            self.pace.seconds_per_step(step)
            self._told = step
            self._waited_told = self._waited  # for the first batch: nothing could be read ahead of it
        if broken or step == self._last_step or (self._every and step % self._every == 0):
            self._tell(step, values)
        self.health.look(step, values)

    def validation(self, step: int, loss: float, bits_per_byte: float, words: str) -> None:
        if self._writer is not None:
            values = {"validation_loss": loss, "validation_bits_per_byte": bits_per_byte}
            self._write(step, functools.partial(self._writer.write, step, values))
        self._table.note(words)

    def _write(self, step: int, write: Callable[[], None]) -> None:
        """Numbers are not worth a run: what a full disk does not take is left out, which is told once."""
        try:
            write()
            self._in_vain = False
        except OSError as error:
            if not self._in_vain:
                self.note(f"step {step}: what is measured cannot be written, and is left out for now: {error}")
            self._in_vain = True

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        seconds = self.pace.seconds_per_step(step)
        told: dict[str, float | None] = {key: values[key] for key in ("loss", "learning_rate", "grad_norm")}
        told |= {key: values[key] for key in ("skipped", "loss_scale") if key in values}
        told["tokens_per_second"] = self._tokens_per_step / seconds if seconds else None
        told["mfu"] = self._flops_per_step / seconds / self._peak if seconds else None
        steps, self._told = step - self._told, step
        waited, self._waited_told = self._waited - self._waited_told, self._waited
        told["data_wait"] = waited / (seconds * steps) if seconds else None  # share of the time
        if most := memory.peak(jax.local_devices()):
            told["peak_memory_bytes"] = most[0]
        if self._writer is not None:
            self._write(step, functools.partial(self._writer.write, step, told))
        self._table.row(step, told, seconds)
        if seconds and (slow := slow_loader(waited, seconds * steps, self._read_threads)):
            self._table.note(slow)


class ProgressTable:
    """A line for each log interval, in columns; plain text where the output is a file."""

    HEADER = (
        f"{'step':>13} {'loss':>7} {'tokens/s':>10} {'/device':>9} {'MFU':>6} {'grad norm':>9} {'lr':>8} {'ETA':>11}"
    )
    ROWS = 20  # between headers

    def __init__(self, console: Console, last_step: int, num_devices: int):
        self._console, self._last_step, self._num_devices = console, last_step, num_devices
        self._rows = 0
        self._wide = min(13, max(9, len(f"{last_step}/{last_step}")))  # of the steps; all others always fit

    def row(self, step: int, values: Mapping[str, float | None], seconds_per_step: float | None) -> None:
        if self._rows % self.ROWS == 0:
            self._print(self.HEADER[13 - self._wide :], "dim")
        self._rows += 1
        rate, mfu = values["tokens_per_second"], values["mfu"]
        seconds = None if seconds_per_step is None else seconds_per_step * (self._last_step - step)
        place = f"{step}/{self._last_step}"
        cells = [
            f"{place if len(place) <= self._wide else step:>{self._wide}}",
            _within(values["loss"], 7),
            _whole(rate, 10),
            _whole(rate and rate / self._num_devices, 9),
            f"{_or_dash(mfu, '.1%'):>6}",
            _within(values["grad_norm"], 9),
            f"{values['learning_rate']:8.2e}",
            f"{'-' if seconds is None else _short(seconds):>11}",
        ]
        self._print(" ".join(cells))

    def note(self, text: str) -> None:
        """A line between the rows, such as an evaluation's: on a terminal broken between words, whole in a file."""
        self._print(text, "bold", soft_wrap=not self._console.is_terminal)

    def _print(self, text: str, style: str = "", soft_wrap: bool = True) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=soft_wrap)


def duration(seconds: float) -> str:
    """Such as 0:12:05, or 3d 04:00:12."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def _short(seconds: float) -> str:
    """A duration in at most 11 characters: days alone where there are a hundred of them."""
    return duration(seconds) if round(seconds) < 100 * 86400 else f"{seconds / 86400:,.0f} days"


def _within(value: float | None, width: int) -> str:
    """Four decimals, or as many as there is room for; such as 1.2e+09 where there is not even room for the number."""
    if value is None or not math.isfinite(value):
        return f"{_or_dash(value, 'f'):>{width}}"
    forms = (f"{value:.{digits}f}" for digits in (4, 3, 2, 1, 0))
    return next((form for form in forms if len(form) <= width), f"{value:.1e}").rjust(width)


def _whole(value: float | None, width: int) -> str:
    """With commas, or such as 2.5e+08 where there is no room for them."""
    text = _or_dash(value, ",.0f")
    return (text if len(text) <= width else f"{value:.1e}").rjust(width)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
