"""A state as leaves by name, and how two sets of leaves differ, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_MOST_DIFFERENCES = 20  # a wrong config differs in every leaf; nobody reads them all


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `opt_state/0/mu/embed`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts: the checkpoint's form does not depend on the classes that the state is made of."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], missing: str = "nothing") -> list[str]:
    """How checkpoint and run differ: Orbax would cast a dtype silently and misreport the rest."""
    found = []
    for name in sorted(stored.keys() | wanted.keys()):
        there = describe(stored[name]) if name in stored else missing
        here = describe(wanted[name]) if name in wanted else missing
        if name not in wanted:
            found.append(f"  {name}: {there} in the checkpoint, {here} in this run")
        elif name not in stored:
            found.append(f"  {name}: {here} in this run, {there} in the checkpoint")
        elif there != here:
            found.append(f"  {name}: {there} in the checkpoint, {here} in this run")
    if len(found) > _MOST_DIFFERENCES:
        found[_MOST_DIFFERENCES:] = [f"  and {len(found) - _MOST_DIFFERENCES} more"]
    return found


def describe(leaf: Any) -> str:
    """Such as float32[32,64]."""
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
