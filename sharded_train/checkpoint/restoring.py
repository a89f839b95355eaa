"""From a checkpoint to a state: which one, whether it fits, whether it is what was saved; and what is done if not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from sharded_train.checkpoint import arrays, digest, record
from sharded_train.checkpoint.errors import Damage, Unreadable, is_passing, reason
from sharded_train.checkpoint.leaves import by_name, differences
from sharded_train.checkpoint.peers import Peers
from sharded_train.checkpoint.record import Verified
from sharded_train.errors import ConfigError


def load(path: Path, verified: Verified, abstract_state: Any, peers: Peers) -> Any:
    """The state of a checkpoint, placed as `abstract_state` says, or as it says of the path and the stored leaves.

    Every process calls it and reads its own shards.

    Raises ConfigError if it is another model's, Damage if it is not what was saved, Unreadable if the cause lies
    elsewhere (no permission, no memory).
    """
    if callable(abstract_state):
        abstract_state = abstract_state(path, verified.leaves)
    wanted = by_name(abstract_state)
    if found := differences(verified.leaves, wanted):
        raise ConfigError([f"{path} is not a checkpoint of this model and optimizer:", *found])
    check(path, verified, peers)
    leaves = load_leaves(path, verified, wanted, peers)
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in wanted])


def load_leaves(
    path: Path, verified: Verified, wanted: Mapping[str, jax.ShapeDtypeStruct], peers: Peers
) -> dict[str, jax.Array]:
    """Leaves of a checkpoint whose files have been checked, their digests compared after loading. As `load`."""
    leaves: dict[str, jax.Array] = all_agree(peers, path, lambda at: arrays.load(at, wanted))
    found = digest.as_digests(leaves, digest.on_devices(leaves))
    wrong = [name for name, sums in found.items() if digest.as_text(sums) != verified.leaves[name].digest]
    if wrong:
        raise Damage(f"{', '.join(wrong[:5])}{' and more' * (len(wrong) > 5)} in {path} are not what was saved")
    return leaves


def check(path: Path, verified: Verified, peers: Peers) -> None:
    """Raises Damage unless a checkpoint's files are those of its record. Process 0 looks for all."""

    def look(at: Path) -> None:
        if peers.index == 0:
            record.check_files(at, verified)
            arrays.check_layout(at, verified.leaves)

    all_agree(peers, path, look)


def all_agree(peers: Peers, path: Path, do: Callable[[Path], Any]) -> Any:
    """What `do(path)` returns, unless it raised on any process: then all of them raise."""
    result, told = None, None
    try:
        result = do(path)
    except Exception as error:  # whatever it is, the others must hear of it
        told = ["passing" if is_passing(error) else "damage", reason(error)]
    for index, other in enumerate(peers.all(told)):
        if other is not None:
            kind, why = other
            who = f"process {index}: " if peers.count > 1 else ""
            if kind == "passing":
                raise Unreadable(f"{path} could not be read: {who}{why}")
            raise Damage(f"{who}{why}")
    return result
