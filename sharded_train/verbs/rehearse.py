"""`sharded-train rehearse`: what a config would do on a GPU cluster, read from the program that XLA makes for it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.recipe import Recipe
from sharded_train.rehearse import compare, computed, fp8, memory, page, timeline, trace, verdict, wires_tables
from sharded_train.rehearse.clusters import Cluster, parse
from sharded_train.rehearse.compile import CompilerFailure, check_layout, check_plugin
from sharded_train.rehearse.outputs import STDOUT, problems_of
from sharded_train.rehearse.run import Rehearsal
from sharded_train.rehearse.run import rehearse as rehearse_one
from sharded_train.show.pipeline import picture
from sharded_train.tables import WIDTH, links_table, pipeline_tables

ONE_PROGRAM = ("html", "hlo", "trace")  # outputs that are of one program


def rehearse(recipes: Mapping[str, Recipe], cluster: str, outputs: Mapping[str, Path]) -> int:
    """Rehearse recipes, by name, on a cluster such as "h100:8x8"; several are put side by side.

    `outputs` are paths by kind: "json" ("-" is stdout, which then has nothing else), and for a single recipe "html",
    "hlo" and "trace". Returns the exit code: 1 where the compiler gave up. What cannot be raises ConfigError before
    anything is compiled.
    """
    place = parse(cluster)
    _check(recipes, place, outputs)
    try:
        with _progress() as progress:
            found = {
                name: _one_of(recipe, place, progress, f"{name}: " if len(recipes) > 1 else "")
                for name, recipe in recipes.items()
            }
    except CompilerFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.FAILED
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    facts: dict[str, Any]
    if len(found) == 1:
        ((title, one),) = found.items()
        facts = one.facts
        _write_one(one, title, outputs)
        if outputs.get("json") != STDOUT:
            print_facts(facts, console)
    else:
        facts = {"variants": {name: each.facts for name, each in found.items()}}
        facts["comparison"] = compare.describe(facts["variants"])
        if outputs.get("json") != STDOUT:
            console.print(*compare.tables(facts["comparison"], console.width), sep="\n")
    _write_json(facts, outputs.get("json"))
    for path in outputs.values():
        if path != STDOUT:
            print(f"wrote {path}", file=sys.stderr)
    return Exit.DONE


def _one_of(recipe: Recipe, cluster: Cluster, progress: Callable[[str], Any], name: str) -> Rehearsal:
    """A rehearsal of which everything that is said begins with its name."""
    try:
        return rehearse_one(recipe, cluster, lambda words: progress(f"{name}{words}"))
    except CompilerFailure as error:
        raise CompilerFailure(f"{name}{error}") from error
    except ConfigError as error:
        raise ConfigError([f"{name}{problem}" for problem in error.problems]) from error


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """The facts of one rehearsal as tables, in the order in which one asks."""

    def put(title: str, *things: Any) -> None:
        console.print(Text(title, style="bold"))
        for thing in things:
            console.print(Text(thing) if isinstance(thing, str) else thing)
        console.print()

    put(f"Rehearsed on {facts['cluster']['words']}", links_table(facts["mesh"]))
    if pipeline := facts["pipeline"]:
        put("Pipeline, as its schedule has it", *picture(pipeline, console.width), *pipeline_tables(pipeline))
    put("Does it fit?", *memory.tables(facts["memory"]))
    put("What crosses which wire?", *wires_tables.tables(facts["wires"]))
    put("What is computed?", *computed.tables(facts["computed"]), *filter(None, [fp8.words(facts["fp8"])]))
    put("How long, at best?", *timeline.tables(facts["time"]))
    put("Verdict", *verdict.tables(facts["verdict"]))
    if facts["warnings"]:
        put("Warnings", *facts["warnings"])


def _check(recipes: Mapping[str, Recipe], cluster: Cluster, outputs: Mapping[str, Path]) -> None:
    """Raise ConfigError with all that can be told before anything is compiled."""
    problems = []
    for name, recipe in recipes.items():
        try:
            check_layout(recipe, cluster)
        except ConfigError as error:
            problems += error.problems if len(recipes) == 1 else [f"{name}: {problem}" for problem in error.problems]
    if len(recipes) > 1:
        each_one = [kind for kind in outputs if kind in ONE_PROGRAM]
        problems += [f"--{kind} with --compare: it is of one program; rehearse the one by itself" for kind in each_one]
    problems += problems_of({kind: path for kind, path in outputs.items() if len(recipes) == 1 or kind == "json"})
    if problems:
        raise ConfigError(problems)
    check_plugin()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is being done: on a terminal in one line that goes away, else a line for each."""
    console = Console(stderr=True, highlight=False)
    start = time.perf_counter()
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # A way to the terminal of its own: stderr goes through a filter while XLA compiles.
        with (
            open(os.dup(2), "w", encoding="utf-8") as own,
            Progress(*columns, console=Console(file=own, highlight=False), transient=True) as bar,
        ):
            task = bar.add_task("")
            yield lambda words: bar.update(task, description=words)
    else:
        yield lambda words: print(f"{time.perf_counter() - start:6.1f} s  {words}", file=sys.stderr, flush=True)


def _write_one(one: Rehearsal, title: str, outputs: Mapping[str, Path]) -> None:
    if path := outputs.get("hlo"):
        _write(path, one.text)
    if path := outputs.get("html"):
        _write(path, page.page(one.facts, title, _command()))
    if path := outputs.get("trace"):
        trace.write(one.facts["time"], path)


def _command() -> str:
    """The command that asked for this, as it may be typed again."""
    return shlex.join(["sharded-train", *sys.argv[1:]])


def _write_json(facts: Mapping[str, Any], path: Path | None) -> None:
    if path == STDOUT:
        print(dumps(facts, indent=2, allow_nan=False))
    elif path is not None:
        _write(path, dumps(facts, indent=2, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
