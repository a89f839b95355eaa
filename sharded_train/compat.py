"""Differences between the supported versions of JAX (0.10.2 to 0.12). No other file asks for a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def varying_axes(*values: Any) -> tuple[str, ...]:
    """Mesh axes that any of the values may differ over, inside `jax.shard_map`.

    In one order always: JAX holds sets, whose order differs between processes, which must all compile one program.
    """
    found: set[str] = set()
    for x in values:
        kind = jax.typeof(x)
        found |= kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # jax 0.10, jax 0.12
    return tuple(sorted(found))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as differing over `axes`; the transpose of this mark is the sum over them."""
    have = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in have)
    return lax.pcast(x, missing, to="varying") if missing else x
