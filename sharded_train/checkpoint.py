"""Checkpoints of a run: a thin layer over Orbax v1, and the only module that imports it.

A directory holds one checkpoint a step, named by its number, written aside and renamed when it is whole. A checkpoint
holds the state as a tree of arrays, stored under their names in the run (`params/...`, so that Orbax alone can read it
too), and a JSON record of what the state does not say. The policy is ours and stands here: what counts as a checkpoint,
what is removed and when, what is compared before anything is loaded, and what is said when something fails.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from sharded_train.errors import ConfigError

_STATE = "state"
_OWNER = "sharded_train"  # the record's key in Orbax's metadata: a directory without it is not ours
_PARTIAL = "orbax-checkpoint-tmp"  # Orbax's suffix while it writes
_DELETING = "deleting"  # ours while a checkpoint is removed
_MOST_DIFFERENCES = 20  # a wrong config differs in every leaf; nobody reads them all


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it, the reason and what to do."""


class Checkpointer:
    """The checkpoints of one directory. Every process calls every method, from its main thread, in the same order.

    A save runs in the background; the state may be donated as soon as `save` returns. Its failure is raised, with the
    reason, by the next `check`, `wait` or `save`.
    """

    def __init__(self, directory: Path, keep: int = 3):
        assert keep >= 1, f"keep={keep}: the newest checkpoint is always kept"
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending, as this process sees the directory."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if _is_step(path.name) and path.is_dir())

    def latest_step(self) -> int | None:
        """The newest step with a finished checkpoint, as process 0 sees it: all processes get the same answer."""
        steps = self.steps()
        newest = steps[-1] if steps else -1
        if jax.process_count() > 1:
            newest = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return None if newest < 0 else newest

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record that was saved with the state of `step`."""
        return self._metadata(step)[1]

    def _metadata(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.path(step).is_dir():
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}")
        try:
            return self._load_metadata(step)
        except Exception as error:
            raise self._damaged(step, error) from error

    def restore(self, step: int | None, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state of `step` (None: the newest) and its record, placed as the shardings of `abstract_state` say.

        `abstract_state` is a tree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
            ConfigError: the checkpoint's leaves, shapes or dtypes are not those of `abstract_state`.
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        # Under a mesh context Orbax would resolve shardings against that mesh instead of the leaves' own.
        assert jax.sharding.get_abstract_mesh().empty, "restore outside of jax.set_mesh"
        if step is None:
            step = self.latest_step()
        if step is None:
            raise CheckpointError(f"{self.directory} has no checkpoint")
        stored, record = self._metadata(step)
        wanted = _by_name(abstract_state)
        differences = _differences(stored, wanted)
        if differences:
            raise ConfigError([f"{self.path(step)} is not a checkpoint of this model and optimizer:", *differences])
        try:
            loaded = ocp.load(self.path(step), _nested(wanted), checkpointable_name=_STATE)
        except Exception as error:
            raise self._damaged(step, error) from error
        leaves = _by_name(loaded)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in wanted])
        return state, record

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Begins to write `state` and `record` as the checkpoint of `step`; waits first for a save under way."""
        self.wait()
        if self.path(step).exists():
            raise CheckpointError(f"{self.path(step)} is already there: move it away to save step {step} again")
        context = ocp.Context()
        context.array.saving.use_compression = False  # zstd halves the speed and saves 7 % of float weights
        try:
            # Where it cannot be made, Orbax's processes would wait for each other for minutes.
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self._remove_leftovers(_PARTIAL, _DELETING)
            with context:
                response = ocp.save_async(
                    self.path(step),
                    _nested(_by_name(state)),
                    checkpointable_name=_STATE,
                    custom_metadata={_OWNER: record},
                )
        except Exception as error:
            raise self._not_written(step, error) from error
        self._pending = step, self._worker.submit(self._finish, response)

    def check(self) -> None:
        """Raises if the save that ended last has failed. Cheap: call it at every step."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until the save under way is on disk and the checkpoints it replaces are gone."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except Exception as error:
            raise self._not_written(step, error) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _finish(self, response: ocp.AsyncResponse[None]) -> None:
        """In the background: the new checkpoint is whole first, only then do old ones go."""
        response.result()
        if jax.process_index() == 0:
            for step in [step for step in self.steps() if self._is_ours(step)][: -self._keep]:
                # Renamed first: killed half-way through the deletion, it would still look like a checkpoint.
                self.path(step).rename(self.directory / f"{step}.{_DELETING}")
            self._remove_leftovers(_DELETING)

    def _remove_leftovers(self, *suffixes: str) -> None:
        """Removes what a killed save or deletion left behind. Nothing else is ever deleted."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            step, _, suffix = path.name.partition(".")
            if _is_step(step) and suffix in suffixes and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)

    def _is_ours(self, step: int) -> bool:
        try:
            self._load_metadata(step)
        except Exception:  # whatever is wrong with it, it is not ours to delete or to recommend
            return False
        return True

    def _load_metadata(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The leaves' shapes and dtypes by name, and the record."""
        metadata = ocp.metadata(self.path(step), checkpointable_name=_STATE)
        record = (metadata.custom_metadata or {}).get(_OWNER)
        if record is None:
            raise ValueError("it carries no record of a run of sharded_train")
        if metadata.metadata is None:  # Orbax has logged why
            raise ValueError(f"the list of its arrays, in {self.path(step) / _STATE}, is damaged")
        return _by_name(metadata.metadata), record

    def _not_written(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(f"the checkpoint of step {step} was not written to {self.path(step)}: {_reason(error)}")

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        path = self.path(step)
        before = next((other for other in reversed(self.steps()) if other < step and self._is_ours(other)), None)
        advice = (
            "There is no checkpoint before it."
            if before is None
            else f"The one before it is that of step {before}. To resume from there, move this one away:\n"
            f"  mv {path} {path}.damaged"
        )
        return CheckpointError(f"{path} cannot be read: {_reason(error)}\n{advice}")


def _is_step(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `opt_state/0/mu/embed`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts: the checkpoint's form does not depend on the classes that the state is made of."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """How checkpoint and run differ, in words: Orbax would cast a dtype silently and misreport the rest."""
    found = []
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in wanted:
            found.append(f"  {name}: {_describe(stored[name])} in the checkpoint, nothing in this run")
        elif name not in stored:
            found.append(f"  {name}: {_describe(wanted[name])} in this run, nothing in the checkpoint")
        elif _describe(stored[name]) != _describe(wanted[name]):
            there, here = _describe(stored[name]), _describe(wanted[name])
            found.append(f"  {name}: {there} in the checkpoint, {here} in this run")
    if len(found) > _MOST_DIFFERENCES:
        found[_MOST_DIFFERENCES:] = [f"  and {len(found) - _MOST_DIFFERENCES} more"]
    return found


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def _reason(error: BaseException) -> str:
    """The first cause of an error: Orbax wraps it in layers that say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = str(error).split(" [tensorstore_spec")[0].split(" [source locations")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
