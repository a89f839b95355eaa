"""`sharded-train data`: tokenize ahead of a run, say what there is, and show rows as the model sees them."""

from __future__ import annotations

import contextlib
import json as jsons
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from sharded_train import workdir as layout
from sharded_train.data.prepare import TextData, prepare
from sharded_train.data.statistics import statistics
from sharded_train.errors import ConfigError
from sharded_train.recipe import Recipe
from sharded_train.tables import WIDTH
from sharded_train.verbs.data_rows import print_row, row_facts

_BAR = 30  # characters


def data(
    recipe: Recipe, workdir: Path | None, *, num_workers: int | None = None, show: int | None = None, json: bool = False
) -> int:
    """Tokenizes the text of a recipe into `data.cache_dir`, else the workdir's `data`, where `train` finds it.

    What is there already is compared with its checksums and kept. With `show` it prints the rows of so many samples,
    from the first that training sees; else statistics.
    """
    if workdir is None and recipe.data.cache_dir is None:
        raise ConfigError("data: where to? Give --workdir=DIR of the run, or --config.data.cache_dir=DIR to share it")
    notes = Console(stderr=True, highlight=False)
    with _meter(notes) as meter:
        prepared = prepare(
            recipe.data,
            vocab_size=recipe.model.vocab_size,
            sequence_length=recipe.train.sequence_length,
            seed=recipe.train.seed,
            cache_dir=(workdir or Path()) / layout.DATA,
            progress=lambda text: notes.print(text, style="dim", markup=False, soft_wrap=True),
            num_workers=num_workers or os.cpu_count() or 1,
            meter=meter,
            verify=show is None,
        )
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if show is not None:
        _show(prepared, recipe.train.seed, show, console, json)
    elif json:
        print(jsons.dumps(statistics(prepared), indent=2))
    else:
        _print_statistics(statistics(prepared), prepared, recipe, console)
    return 0


@contextlib.contextmanager
def _meter(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in a terminal; elsewhere `prepare` writes a line now and then."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenizing", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _show(prepared: TextData, seed: int, count: int, console: Console, json: bool) -> None:
    for sample in range(count):
        facts = row_facts(prepared, seed, sample)
        if json:
            print(jsons.dumps(facts))
        else:
            print_row(facts, prepared.tokenizer, console)


def _print_statistics(facts: dict[str, Any], prepared: TextData, recipe: Recipe, console: Console) -> None:
    console.print(_sources(facts))
    console.print(_lengths(facts["total"]["lengths"]))
    train = recipe.train
    num_samples = train.num_steps * train.global_batch_size
    console.print(
        f"A run of {train.num_steps:,} steps sees {num_samples:,} rows of {train.sequence_length:,} tokens: "
        + ", ".join(f"{name} {epochs:.3g} times" for name, epochs in prepared.train.epochs_after(num_samples).items())
    )
    for problem in prepared.train.shortfalls(num_samples):
        console.print(Text(f"note: {problem}", style="yellow"))


def _table(*numbers: str, of: str) -> Table:
    built = Table(of, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in numbers:
        built.add_column(name, justify="right")
    return built


def _sources(facts: dict[str, Any]) -> Table:
    built = _table(
        "documents", "validation", "duplicates", "MB", "tokens", "bytes per token", "prompt", "share", of="source"
    )
    for name, found in {**facts["sources"], "total": facts["total"]}.items():
        built.add_row(
            name,
            f"{found['num_documents']:,}",
            f"{found['num_validation_documents']:,}",
            f"{found['num_duplicates']:,}",
            f"{found['num_bytes'] / 1e6:,.2f}",
            f"{found['num_tokens']:,}",
            f"{found['bytes_per_token']:.3f}",
            f"{found['num_masked'] / max(1, found['num_tokens']):.1%}",
            f"{found['share']:.2%}" if "share" in found else "",
            style="bold" if name == "total" else "",
        )
    return built


def _lengths(lengths: dict[str, int]) -> Table:
    built = _table("documents", of="tokens in each")
    built.add_column()
    for longest, count in lengths.items():
        bar = "█" * max(1, round(_BAR * count / max(lengths.values())))
        built.add_row(f"{(int(longest) + 1) // 2:,} – {int(longest):,}", f"{count:,}", Text(bar, style="cyan"))
    return built
