"""Muon: momentum made orthogonal, each layer's matrix whole on one device while it is iterated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train.collectives import axis_size, own_part
from sharded_train.optimizer.elementwise import AdamW, decay
from sharded_train.optimizer.leaf import FloatDtype, Leaf, Slot, Slots
from sharded_train.params import ParamSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at zero, singular values end between 0.7 and 1.2


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for the layers' matrices, AdamW for all else.

    Updates are scaled to the root mean square `update_rms`, about that of AdamW's, so that both take the same learning
    rate and decay (Liu et al. 2025, arXiv:2502.16982).
    """

    momentum: float = 0.95  # decay of the mean gradient
    nesterov: bool = True  # looks one step of momentum ahead
    num_iterations: int = 5  # of Newton-Schulz
    iterate_dtype: FloatDtype = "float32"  # of Newton-Schulz and of what it moves between devices
    update_rms: float = 0.2  # root mean square that updates are scaled to
    weight_decay: float = 0.1  # times the learning rate; matrices only
    b1: float = 0.9  # AdamW's, as eps
    b2: float = 0.95  # AdamW's
    eps: float = 1e-8  # AdamW's
    moments_dtype: FloatDtype = "float32"  # of momentum and AdamW's means

    @property
    def adamw(self) -> AdamW:
        return AdamW(self.b1, self.b2, self.eps, self.weight_decay, self.moments_dtype)

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        return {"mu": leaf.slot(self.moments_dtype)} if is_hidden_matrix(leaf.spec) else self.adamw.slots(leaf)

    def direction(
        self, leaf: Leaf, grad: jax.Array, slots: Slots, weight: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """mu = m mu + (1 - m) g, m the momentum; Newton-Schulz of mu, or with Nesterov of m mu + (1 - m) g.

        Both terms are without their bias, as optax has it.
        """
        if not is_hidden_matrix(leaf.spec):
            return self.adamw.direction(leaf, grad, slots, weight, step)
        m, done = self.momentum, step.astype(jnp.float32) + 1
        mu = m * slots["mu"] + (1 - m) * grad
        ahead = m * mu / (1 - m ** (done + 1)) + (1 - m) * grad / (1 - m**done) if self.nesterov else mu
        sizes = [math.prod(leaf.spec.shape[dim] for dim in dims) for dims in leaf.matrix_dims]

        def orthogonal(x: jax.Array) -> jax.Array:
            return newton_schulz(x.reshape(-1, *sizes), self.num_iterations).reshape(x.shape)

        out = by_layer(leaf, ahead.astype(self.iterate_dtype), orthogonal).astype(jnp.float32)
        out = self.update_rms * math.sqrt(max(sizes)) * out  # an orthogonal matrix has rms 1 / sqrt(its longer side)
        return out + decay(self.weight_decay, leaf, weight), {"mu": mu}


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """A matrix between activations: tables whose rows are looked up, or are compared with, are none."""
    return spec.is_matrix and not {"vocab", "position"} & set(spec.axes)


def newton_schulz(x: jax.Array, num_iterations: int) -> jax.Array:
    """Matrices [..., rows, columns] -> nearly the orthogonal U V^T of each X = U S V^T.

    X <- a X + (b A + c A^2) X with A = X X^T, from X / |X|. Zeros stay zeros.
    """
    a, b, c = COEFFICIENTS
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = x / (norm + 1e-20).astype(x.dtype)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def by_layer(leaf: Leaf, x: jax.Array, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`fn`, which works on each layer by itself, where layers are whole: spread over the devices, and brought back.

    `x [layers, ...]` is this device's shard. Over an axis that splits it, an all-to-all makes layers out of the split
    dim; over one that it is whole on, each device takes its share. So each axis carries once there and back at most the
    bytes of a shard, times (layers rounded up to a multiple of its devices) / layers; whole leaves are gathered only
    where they are stored whole.
    """
    assert leaf.spec.stacked, leaf.spec
    split = [(axis, dim) for dim in leaf.own_dims for axis in reversed(leaf.split(dim))]  # the innermost part first
    split.sort(key=lambda pair: pair[0] not in leaf.placement.zero_axes)  # slow links while there are layers to share
    met = {axis for axis, _ in split} | set(leaf.split(0))
    backs = []
    for axis in leaf.axes:
        if axis not in met:
            x, back = _take_share(x, axis)
            backs.append(back)
    for axis, dim in split:
        x, back = _exchange(x, axis, dim)
        backs.append(back)
    x = fn(x)
    for back in reversed(backs):
        x = back(x)
    return x


Back = Callable[[jax.Array], jax.Array]


def _take_share(x: jax.Array, axis: str) -> tuple[jax.Array, Back]:
    """The same on all devices of the axis -> this device's layers."""
    num_layers = x.shape[0]
    here = own_part(_padded(x, axis), axis, 0)
    return here, lambda y: lax.all_gather(y, axis, axis=0, tiled=True, to="invarying")[:num_layers]


def _exchange(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, Back]:
    """This device's part of a dim, of all layers -> its layers, the dim whole."""
    num_layers = x.shape[0]
    here = lax.all_to_all(_padded(x, axis), axis, 0, dim, tiled=True)
    return here, lambda y: lax.all_to_all(y, axis, dim, 0, tiled=True)[:num_layers]


def _padded(x: jax.Array, axis: str) -> jax.Array:
    """Layers of zeros added, so that every device gets equally many."""
    missing = -x.shape[0] % axis_size(axis)
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x
