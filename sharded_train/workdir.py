"""The directory of a run: what lies where, and that it belongs to one config."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from sharded_train import config, params
from sharded_train import recipe as recipes
from sharded_train.checkpoint import files, owner
from sharded_train.errors import ConfigError
from sharded_train.recipe import Recipe

CONFIG = "config.json"  # of the last `train` there; each checkpoint's record holds the one it was made under
RUN = "run"  # its name in places for checkpoints that are not in the workdir
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
PRECISION = "precision.jsonl"
CHECKPOINTS = "checkpoints"
DATA = "data"
PROFILE = "profile"
COMPILED = "compiled"
TENSORBOARD = "tensorboard"

# A run stays the same run when these change: where and how it computes, not what.
MAY_CHANGE = (
    "config.mesh.",
    "config.zero.",
    "config.pipeline.",
    "config.attention.",
    "config.train.num_microbatches",
    "config.train.remat",
    "config.train.overlap",
    "config.train.stop_at",
    "config.log.",
    "config.distributed.",
    "config.watchdog.",
    "config.faults.",
    "config.evaluate.",
    "config.checkpoint.",
    "config.precision.fp8.recalibrate",
    "config.data.read_threads",
    "config.data.cache_dir",
    "config.model.attention",
)
STAYS = "config.checkpoint.dir"  # or a run that has checkpoints would begin anew


def read_recipe(workdir: Path) -> Recipe:
    """The recipe of the run in `workdir`. Raises ConfigError if there is none, or it cannot be read."""
    path = workdir / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{workdir} holds no run: there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return recipes.from_dict(values)
    except ConfigError as error:
        raise ConfigError([f"{path} was written by another version of sharded_train:", *error.problems]) from error


def check(workdir: Path, recipe: Recipe, *, accept_config_change: bool = False) -> None:
    """Raises ConfigError unless a run of `recipe` may start or go on in `workdir`. Reads only.

    A directory without a config may hold anything (a launcher's logs, say) except what a run would write itself.
    """
    for name in (CHECKPOINTS, DATA, TENSORBOARD, PROFILE, COMPILED):
        if (workdir / name).exists() and not (workdir / name).is_dir():
            raise ConfigError(f"{workdir / name} is a file, where a run keeps a directory: move it away")
    if (workdir / METRICS).is_dir():
        raise ConfigError(f"{workdir / METRICS} is a directory, where a run keeps a file: move it away")
    if not (workdir / CONFIG).exists():
        _check_new(workdir)
        return
    if accept_config_change:
        return
    there = read_recipe(workdir)
    changes = [
        change
        for change in config.differences(there, recipe)
        if not change.startswith(MAY_CHANGE) or change.startswith(STAYS)
    ]
    if changes:
        go_on = "or go on in this one with --accept-config-change."
        if files.numbered(workdir / CHECKPOINTS) and _arrays(there) != _arrays(recipe):
            go_on = "whatever is accepted: its checkpoints hold arrays of other names or shapes."
        raise ConfigError(
            [
                f"{workdir} belongs to a run with another config (there -> here):",
                *(f"  {change}" for change in changes),
                f"Choose another --workdir, {go_on}",
            ]
        )


def check_record(path: Path, run: dict[str, Any], recipe: Recipe) -> None:
    """Raises ConfigError unless the checkpoint at `path`, of which `run` tells, is of a run with this config."""
    changes = config.differences(recipes.from_dict(run.get("config") or {}), recipe)
    if changes := [change for change in changes if not change.startswith(MAY_CHANGE)]:
        raise ConfigError(
            [
                f"checkpoint.dir: {path} is of a run with another config (there -> here):",
                *(f"  {change}" for change in changes),
                "Choose another checkpoint.dir, or go on with that run with --accept-config-change.",
            ]
        )


def check_owners(workdir: Path, places: Iterable[Path]) -> None:
    """Raises ConfigError if a place for checkpoints is that of another run than the one in `workdir`, if there is one.

    Not for a new workdir that takes up what it finds there, see `check_record`.
    """
    for place in places:
        there = owner.read(place)
        if there is not None and there.run != _name(workdir):
            raise ConfigError(
                f"{place} is that of {there.words}: give each run a checkpoint.dir and a fallback_dir of its own, or "
                "take this one over with --accept-config-change; that run can then save no more"
            )


def _name(workdir: Path) -> str | None:
    path = workdir / RUN
    return path.read_text() if path.exists() else None


def named(workdir: Path) -> str:
    """What the run in a workdir is known by, wherever that is moved or mounted; from now on, if it has no name."""
    if (name := _name(workdir)) is None:
        files.write(workdir / RUN, (name := secrets.token_hex(8)).encode())
    return name


def _arrays(recipe: Recipe) -> tuple[Any, ...]:
    """What decides which arrays a run's state has, and of which shapes and dtypes."""
    shapes = {name: spec.shape for name, spec in params.named_leaves(recipe.model.param_specs())}
    optimizer = recipe.optimizer
    return shapes, type(optimizer), optimizer.moments_dtype, recipe.train.ema_decay is None


def claim(workdir: Path, recipe: Recipe, tokenizer: str) -> None:
    """Makes the directory and writes config and tokenizer of the run, for one process to call after `check`."""
    workdir.mkdir(parents=True, exist_ok=True)
    texts = {TOKENIZER: tokenizer, CONFIG: json.dumps(config.to_dict(recipe), indent=2) + "\n"}
    for path, text in ((workdir / name, text) for name, text in texts.items()):
        if not path.exists() or path.read_text() != text:
            files.write(path, text.encode())


def keep_compiled(workdir: Path) -> None:
    """Compiled programs are kept in the workdir from now on, for the next start to find.

    CPUs of another kind have a folder of their own: what is compiled for one may not run on the other. Nothing is
    changed where a place for them is set already (JAX_COMPILATION_CACHE_DIR).
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    kind = f"{jax.default_backend()}-{platform.machine()}"
    cpu_info = Path("/proc/cpuinfo")
    if jax.default_backend() == "cpu" and cpu_info.exists():
        features = re.search(r"^(flags|Features)\s*:.*$", cpu_info.read_text(), re.MULTILINE)
        kind += f"-{zlib.crc32(features[0].encode()):08x}" if features else ""
    jax.config.update("jax_compilation_cache_dir", str((workdir / COMPILED / kind).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@contextlib.contextmanager
def unwritten_if_refused(workdir: Path) -> Iterator[None]:
    """Takes a new workdir away again, with the prepared data in it, if what is done inside raises ConfigError."""
    made = [path for path in (workdir / DATA, workdir, *workdir.parents) if not path.exists()]
    try:
        yield
    except ConfigError:
        for path in made:
            if path == workdir / DATA:
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # not empty, or another process was faster
                    path.rmdir()
        raise


def _check_new(workdir: Path) -> None:
    if problem := files.hindrance(workdir):
        raise ConfigError(problem)
    # What is compiled is anybody's, and a process may compile before process 0 has claimed the directory.
    taken = [name for name in (CHECKPOINTS, METRICS, TENSORBOARD, PROFILE) if (workdir / name).exists()]
    if taken:
        raise ConfigError(
            f"{workdir} holds {' and '.join(taken)} but no {CONFIG} that says what run they belong to: "
            f"choose another --workdir, or put its {CONFIG} back"
        )
