"""What a run says of itself: metrics.jsonl, TensorBoard, lines on the terminal, and the rates in them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from tensorboardX import SummaryWriter

from sharded_train import workdir as layout

# Peak dense bf16 FLOP/s by what JAX calls the device, the first that fits. From NVIDIA's data sheets, without sparsity;
# the V100 has no bf16, its number is fp16's.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,  # SXM
    "GH200": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a device could do at most, in FLOP/s, and in words where that number comes from."""

    per_device: float
    words: str


def peak_of(device: jax.Device, dtype: jnp.dtype) -> Peak:
    """Of the table, or measured with a product in `dtype` where the table says nothing, as on CPUs."""
    for name, peak in PEAKS.items():
        if name in device.device_kind:
            return Peak(peak, f"{_flops(peak)} a device, the data sheet's dense bf16 for {device.device_kind}")
    if device.platform != "cpu":
        peak = _measured(device, dtype, size=4096)
        return Peak(peak, f"{_flops(peak)} a device, measured here with a {dtype.name} product")
    peak = _measured(device, dtype, size=1024)
    sharing = jax.local_device_count()
    words = f"{_flops(peak)}, measured here with a {dtype.name} product on all cores"
    return Peak(peak / sharing, words if sharing == 1 else f"{words}, shared by {sharing} devices")


def _measured(device: jax.Device, dtype: jnp.dtype, size: int, at_least: float = 0.3) -> float:
    """FLOP/s of the fastest square matrix product, summed in fp32, of those within so many seconds."""
    a = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32)).lower(a).compile()
    times: list[float] = []
    while sum(times) < at_least:
        start = time.perf_counter()
        product(a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


class Pace:
    """How fast steps go: the wall time between the ends of steps, without what was asked not to count."""

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
        return None if start is None else (now - start[1] - excluded) / (step - start[0])


class MetricsWriter:
    """Writes metrics.jsonl, an object a line, and the same to TensorBoard. For one process.

    Begun at step k, it takes away what an earlier run wrote beyond k: each step stands there once. A number that is
    not finite is null in the JSON.
    """

    def __init__(self, workdir: Path, start_step: int, *, tensorboard: bool):
        path = workdir / layout.METRICS
        _drop_after(path, start_step)
        self._file = path.open("a")
        # TensorBoard itself hides what older files say from the purge step on.
        folder = str(workdir / layout.TENSORBOARD)
        self._tensorboard = SummaryWriter(folder, purge_step=start_step + 1) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        finite = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _drop_after(path: Path, step: int) -> None:
    """Keeps the lines up to `step`; a line that was being written when its process died goes too."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
    if kept != lines:
        layout.write_atomically(path, "".join(kept))


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


class ProgressTable:
    """A line for each log interval, in columns; plain text where the output is a file."""

    HEADER = (
        f"{'step':>13} {'loss':>7} {'tokens/s':>10} {'/device':>9} {'MFU':>6} {'grad norm':>9} {'lr':>8} {'ETA':>11}"
    )
    ROWS = 20  # between headers

    def __init__(self, console: Console, last_step: int, num_devices: int):
        self._console, self._last_step, self._num_devices = console, last_step, num_devices
        self._rows = 0

    def row(self, step: int, values: Mapping[str, float | None], seconds_per_step: float | None) -> None:
        if self._rows % self.ROWS == 0:
            self._print(self.HEADER, "dim")
        self._rows += 1
        rate, mfu = values["tokens_per_second"], values["mfu"]
        seconds = None if seconds_per_step is None else seconds_per_step * (self._last_step - step)
        cells = [
            f"{f'{step}/{self._last_step}':>13}",
            f"{values['loss']:7.4f}",
            f"{_or_dash(rate, ',.0f'):>10}",
            f"{_or_dash(rate and rate / self._num_devices, ',.0f'):>9}",
            f"{_or_dash(mfu, '.1%'):>6}",
            f"{values['grad_norm']:9.4f}",
            f"{values['learning_rate']:8.2e}",
            f"{'-' if seconds is None else duration(seconds):>11}",
        ]
        self._print(" ".join(cells))

    def note(self, text: str) -> None:
        """A line between the rows, such as an evaluation's."""
        self._print(text, "bold")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Such as 0:12:05, or 3d 04:00:12."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _flops(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
