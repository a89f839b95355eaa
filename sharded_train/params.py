"""`ParamSpec`: the one source of a parameter's shape, logical axes and initial values."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Tree = Any  # nested dict with one kind of leaf


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter, or one per layer stacked along a first dim named "layers".

    `axes` names each dim by what it means ("embed", "heads", "mlp", "vocab", ...), never by a mesh axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies activations: decided by its logical axes, a stack of gains being no matrix."""
        return "embed" in self.axes and len(set(self.axes) - {"layers"}) > 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def normal(std: float) -> Init:
    """Independent Gaussian entries of standard deviation `std`."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def tree_map(fn: Callable[..., Any], specs: Tree, *rest: Tree) -> Tree:
    """`jax.tree.map` over the specs of a tree."""
    return jax.tree.map(fn, specs, *rest, is_leaf=is_spec)


def named_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = is_spec) -> Iterator[tuple[str, Any]]:
    """("layers/attention/q", leaf) for every leaf, in the tree's order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def count(specs: Tree) -> int:
    """Number of parameters."""
    return sum(spec.size for _, spec in named_leaves(specs))


def initialize(specs: Tree, key: jax.Array, order: np.ndarray | None = None) -> Tree:
    """fp32 initial values, a pure function of (key, name, layer): the same on any mesh and at any depth.

    `order` is which layer of the model each one of a stack is, -1 for none: zeros.
    """
    names = iter(dict(named_leaves(specs)))

    def one(spec: ParamSpec) -> jax.Array:
        own = jax.random.fold_in(key, zlib.crc32(next(names).encode()))
        if not spec.stacked:
            return spec.init(own, spec.shape)
        numbers = np.arange(spec.shape[0]) if order is None else order
        keys = jax.vmap(lambda i: jax.random.fold_in(own, i))(jnp.asarray(numbers))
        drawn = jax.vmap(lambda k: spec.init(k, spec.shape[1:]))(keys)
        there = (numbers >= 0).reshape(-1, *[1] * (drawn.ndim - 1))
        return drawn if there.all() else jnp.where(there, drawn, 0)

    return tree_map(one, specs)
