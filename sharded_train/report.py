"""What a training run says at its start and at its end."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from sharded_train import __version__
from sharded_train.data.prepare import TextData
from sharded_train.faults.progress import SUPERVISOR
from sharded_train.peak import Peak
from sharded_train.recipe import Recipe
from sharded_train.tables import WIDTH, attention_in_words, bytes_in_words, flops_in_words, pipeline_title

LEAST = 40  # columns of a page


def console_of_process() -> Console:
    """Process 0 speaks for all. Under a supervisor its terminal is ours."""
    columns = os.environ.get("COLUMNS", "") if SUPERVISOR in os.environ else ""
    width = int(columns) if columns.isdecimal() and int(columns) >= LEAST else WIDTH
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, quiet=jax.process_index() != 0)


class StartUp:
    """Where the seconds before the end of the first step go: each part lasts from one mark to the next."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        if from_command() and (seconds := _process_age()) is not None:
            self.parts["imports"] = seconds
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """What was done since the last mark has this name."""
        now = time.perf_counter()
        self.parts[name], self._last = now - self._last, now

    def words(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"start-up {sum(self.parts.values()):.1f} s: {parts}"


def panel(recipe: Recipe, facts: Mapping[str, Any], data: TextData, peak: Peak, workdir: Path, start: int) -> Panel:
    """The run in a few lines; `facts` are those of `show.describe`, `start` is the step that it goes on from."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(recipe, facts, data, peak, start):
        table.add_row(name, text)
    return Panel(table, title=f"sharded_train {__version__}: {workdir}", title_align="left", expand=False)


def _rows(
    recipe: Recipe, facts: Mapping[str, Any], data: TextData, peak: Peak, start: int
) -> Iterator[tuple[str, str]]:
    train, mesh, device = recipe.train, facts["mesh"], jax.devices()[0]
    split = {axis: size for axis, size in mesh["sizes"].items() if size > 1}
    product = " × ".join(f"{axis} {size}" for axis, size in split.items())
    yield "devices", f"{f'{product} = ' if product else ''}{mesh['num_devices']:,} × {device.device_kind}"
    for axis in split:
        yield f"  {axis}", mesh["links"][axis]["words"]
    in_fp8 = f", its layers' products in FP8: {recipe.precision.recipe}" if recipe.precision.is_fp8 else ""
    yield "model", f"{facts['num_parameters']:,} parameters, computing in {facts['compute_dtype']}{in_fp8}"
    group = recipe.zero.group_size
    groups = f" in groups of {group} data ranks" if group and recipe.zero.stage else ""
    yield "state", f"{bytes_in_words(facts['state_bytes_total'])} on each device, ZeRO {facts['zero_stage']}{groups}"
    yield "data", _data_words(data)
    baselines = data.baselines()
    yield (
        "baselines",
        f"byte bigram {baselines['byte_bigram_bits_per_byte']:.3f}, gzip -9 {baselines['gzip_bits_per_byte']:.3f} "
        "bits per byte of the validation text",
    )
    tokens = facts["tokens_per_step"]
    parts = "" if train.num_microbatches == 1 else f" in {train.num_microbatches} microbatches"
    gone_through = data.train.epochs_after(train.num_steps * train.global_batch_size)
    only = len(gone_through) == 1
    epochs = ", ".join(f"{n:.3g} epochs" + ("" if only else f" of {name}") for name, n in gone_through.items())
    yield "step", f"{train.global_batch_size:,} rows × {train.sequence_length:,} = {tokens:,} tokens{parts}"
    begins = f"goes on from step {start:,}" if start else f"begins with seed {train.seed}"
    yield "run", f"{train.num_steps:,} steps = {train.num_steps * tokens:,} tokens = {epochs}; {begins}"
    yield from pipeline_rows(facts["pipeline"])
    yield "attention", attention_in_words(facts["attention"])
    if facts["context"]:
        yield "  sequence", "over the sequence axis by {strategy}: {why}".format(**facts["context"])
    yield "MFU", f"{flops_in_words(facts['flops_per_step_total'])} a step / time / peak; {facts['flops_convention']}"
    yield "peak", peak.words


def pipeline_rows(pipeline: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What stands above the MFU: a bubble is hidden by a good number."""
    if pipeline is None:
        return
    held = f"{max(pipeline['in_flight']):.4g} of {pipeline['num_microbatches']} microbatches in flight at most"
    yield "pipeline", f"{pipeline_title(pipeline)}; {held}"
    yield "bubble", f"{pipeline['bubble']:.1%} of the stages' time is idle, which the MFU counts as lost"


def _data_words(data: TextData) -> str:
    said = data.description
    count = lambda side: f"{said[side]['num_documents']:,} document{'s' * (said[side]['num_documents'] != 1)}"
    sides = ", ".join(
        f"{count(side)} = {said[side]['num_bytes'] / 1e6:,.2f} MB = {said[side]['num_tokens']:,} tokens for {purpose}"
        for side, purpose in (("train", "training"), ("validation", "validation"))
    )
    return f"{said['source']}: {sides}"


def how_to_go_on(console: Console, recipe: Recipe, workdir: Path, step: int) -> None:
    """The line to type to go on from `step`, or to go beyond the end."""
    total = recipe.train.num_steps
    if step < total:
        console.print(f"{step:,} of {total:,} steps are done. To go on:")
        command = command_to_resume(workdir)
    else:
        console.print(f"The run of {total:,} steps is complete. To go beyond, which is another config:")
        command = command_to_resume(workdir, f"--config.train.num_steps={2 * step}", "--accept-config-change")
    console.print(f"  {command}", markup=False, soft_wrap=True)
    if SUPERVISOR in os.environ:
        console.print("with the options of launch as they were.")
    elif jax.process_count() > 1:
        console.print("on every process, each with its own number where it is told one.")


def versions() -> dict[str, str]:
    """For the record of a checkpoint."""
    from importlib.metadata import version

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    ours = {"sharded_train": __version__, "python": platform.python_version()}
    return ours | {package: version(package) for package in packages}


@functools.cache
def commit() -> str | None:
    """The commit of this code, with a + when files of the package differ from it; None where it is no git checkout."""
    package = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(package), *what], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(changes)


def from_command() -> bool:
    """Whether this process is the command, training; else what it was typed as is not known."""
    return Path(sys.argv[0]).name in ("sharded-train", "__main__.py") and sys.argv[1:2] == ["train"]


def command_to_resume(workdir: Path, *changes: str) -> str:
    """What to type to go on: the command as it was typed, without what was for this once, and with the changes."""
    if not from_command():
        start = ["sharded-train", "train", "--config=FILE.py", f"--workdir={workdir}"]
        return shlex.join([*start, *changes])
    start = [_as_typed(sys.argv[0])] if Path(sys.argv[0]).name == "sharded-train" else ["python", "-m", "sharded_train"]
    dropped = {
        "--config.train.stop_at",
        "--accept-config-change",
        "--resume",
        *(change.partition("=")[0] for change in changes),
    }
    if SUPERVISOR in os.environ:  # which tells its processes where they are, each time anew
        start += ["launch", "...", "--"]
        dropped |= {"--coordinator", "--num-processes", "--process-id"}
    arguments, given = [], iter(sys.argv[1:])
    for argument in given:
        name, equals, _ = argument.partition("=")
        if name not in dropped:
            arguments.append(argument)
        elif name != "--accept-config-change" and not equals:
            next(given, None)  # its value
    return shlex.join([*start, *arguments, *changes])


def _as_typed(command: str) -> str:
    """The command by its name where the shell finds it, else by its path: its environment may not be activated."""
    found = shutil.which("sharded-train")
    same = found is not None and Path(found).resolve() == Path(command).resolve()
    return "sharded-train" if same else command


def printable(text: str) -> str:
    """Text of a model as it may go to a terminal: no control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def process_began() -> float:
    """When this process began, where it is the command; else now. Seconds since 1970."""
    return time.time() - ((_process_age() if from_command() else None) or 0.0)


def _process_age() -> float | None:
    """Seconds since this process began, where /proc tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
