"""Differences between the supported versions of JAX (0.10.2 to 0.12). No other file asks for a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes that the value may differ over, inside `jax.shard_map`."""
    kind = jax.typeof(x)
    if hasattr(kind, "vma"):  # jax 0.10
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying)  # jax 0.12


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as differing over `axes`; the transpose of this mark is the sum over them."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
