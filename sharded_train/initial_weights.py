"""Weights of another run's checkpoint as the beginning of a new run: all of them, or some by name."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

import jax

from sharded_train import workdir as layout
from sharded_train.checkpoint import files, record, restoring
from sharded_train.checkpoint.errors import CheckpointError, Damage, reason
from sharded_train.checkpoint.leaves import by_name, differences
from sharded_train.checkpoint.peers import Peers
from sharded_train.checkpoint.record import Verified
from sharded_train.errors import ConfigError
from sharded_train.step import Program, TrainState

_WEIGHTS = "params/"


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Where weights come from, and which: those that match a pattern of `only` (None: all) and none of `without`."""

    source: Path | str  # a checkpoint, or a workdir, of which the newest one is taken; on disk or at gs://
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] | None = None

    def takes(self, name: str) -> bool:
        matches = lambda patterns: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        return (self.only is None or matches(self.only)) and not (self.without and matches(self.without))


def check(program: Program, initial: InitialWeights) -> None:
    """Raises what `load` would, as far as it can be told from the checkpoint's record alone."""
    _asked(_checkpoint(initial.source), program, initial)


def load(program: Program, seed: int, initial: InitialWeights, peers: Peers) -> TrainState:
    """The state of step 0 with weights of a checkpoint; what is not taken from there is as the seed makes it.

    Averaged weights (train.ema_decay) begin as the weights do.

    Raises:
        ConfigError: there is no checkpoint, a pattern matches nothing, or a weight is not there in its shape.
        CheckpointError: the checkpoint is damaged.
    """
    path = files.place(peers.first(str(_checkpoint(initial.source)) if peers.index == 0 else None))
    state = program.to_checkpoint(program.init(seed))
    verified, wanted = _asked(path, program, initial)
    try:
        restoring.check(path, verified, peers)
        taken = restoring.load_leaves(path, verified, wanted, peers)
    except Damage as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    weights = _replaced(state.params, taken)
    ema = None if state.ema is None else jax.tree.map(lambda x: x.copy(), weights)
    return program.from_checkpoint(state.replace(params=weights, ema=ema))


def _asked(path: Path, program: Program, initial: InitialWeights) -> tuple[Verified, dict[str, jax.ShapeDtypeStruct]]:
    """The record of a checkpoint, and the leaves to take from it."""
    try:
        verified = record.read(path)
    except Damage as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    return verified, _wanted(path, verified, by_name(program.abstract_checkpoint.params), initial)


def _checkpoint(asked: Path | str) -> Path:
    """Of a workdir or a folder of checkpoints the newest verified one; else the source itself."""
    source = files.place(asked)
    if files.exists(source / record.NAME):
        return source
    for directory in (source / layout.CHECKPOINTS, source):
        for step in reversed(files.numbered(directory)):
            if files.exists(directory / str(step) / record.NAME):
                return directory / str(step)
    raise ConfigError(f"--init-from={asked}: there is no checkpoint")


def _wanted(
    path: Path, verified: Verified, weights: dict[str, Any], initial: InitialWeights
) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves to take, by their names in the checkpoint."""
    unused = [
        pattern for pattern in [*(initial.only or ()), *(initial.without or ())] if not fnmatch.filter(weights, pattern)
    ]
    if unused:
        raise ConfigError(f"no weight is named {' or '.join(unused)}: the weights are {', '.join(weights)}")
    wanted = {f"{_WEIGHTS}{name}": leaf for name, leaf in weights.items() if initial.takes(name)}
    if not wanted:
        raise ConfigError(f"--init-from={initial.source}: --init-only and --init-except leave no weight to take")
    stored = {name: leaf for name, leaf in verified.leaves.items() if name in wanted}
    if found := differences(stored, wanted):
        raise ConfigError(
            [
                f"{path} does not have these weights:",
                *found,
                "Leave them to the seed with --init-except=NAMES.",
            ]
        )
    return wanted


def _replaced(params: Any, taken: dict[str, jax.Array]) -> Any:
    names = by_name(params)
    leaves = [taken.get(f"{_WEIGHTS}{name}", leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
