"""`sharded-train goodput`: where a run's wall time went, over all its restarts."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.faults import goodput as accounts
from sharded_train.faults.goodput import KINDS, Goodput
from sharded_train.metrics import duration

_WIDTH = 40  # of the bars
_COLORS = {"productive": "green", "redone": "yellow", "lost": "red", "idle": "dim"}


def goodput(workdir: Path, *, json: bool = False) -> int:
    """Prints the accounts of the run in `workdir`, and returns the exit code."""
    path = workdir / accounts.FILE
    try:
        found = accounts.account(accounts.read(path))
    except FileNotFoundError:
        raise ConfigError(f"{workdir} has no accounts of a run's time: there is no {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if json:
        print(jsons.dumps(facts(found), indent=2))
    else:
        console = Console(highlight=False)
        console.print(table(found))
        console.print(words(found))
    return Exit.DONE


def facts(found: Goodput) -> dict[str, Any]:
    """In values that JSON can hold; seconds."""
    return {
        "goodput": found.goodput,
        "wall": found.wall,
        "seconds": found.seconds,
        "lives": found.lives,
        "faults": found.faults,
        "last_step": found.last_step,
        "running": found.running,
    }


def table(found: Goodput) -> Table:
    """A row with a bar for each kind of time that there was."""
    made = Table(box=None, pad_edge=False)
    for name, justify in (("where the time went", "left"), ("time", "right"), ("share", "right"), ("", "left")):
        made.add_column(name, justify=justify)  # type: ignore[arg-type]
    for kind, meaning in KINDS.items():
        seconds = found.seconds[kind]
        share = seconds / found.wall if found.wall else 0.0
        if seconds:
            bar = "█" * round(_WIDTH * share) or "▏"
            made.add_row(meaning, duration(seconds), f"{share:.1%}", bar, style=_COLORS.get(kind, "cyan"))
    return made


def words(found: Goodput) -> str:
    starts = f"{found.lives} start{'s' * (found.lives != 1)}, {found.faults} fault{'s' * (found.faults != 1)}"
    end = "still running, or cut off" if found.running else "ended"
    meant = duration(found.wall - found.seconds["idle"])
    return f"goodput {found.goodput:.1%} of {meant}: {starts}, step {found.last_step:,}; {end}"
