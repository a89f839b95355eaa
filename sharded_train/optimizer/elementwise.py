"""Optimizers that look at each number by itself: on its shard a device updates without any communication.

The maths is optax's; the count of updates that it wants is the step.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from sharded_train.optimizer.leaf import FloatDtype, Leaf, Slot, Slots


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay on matrices only."""

    b1: float = 0.9  # decay of the mean gradient
    b2: float = 0.95  # decay of the mean square
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.1  # times the learning rate; matrices only
    moments_dtype: FloatDtype = "float32"  # of both means

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        return {"mu": leaf.slot(self.moments_dtype), "nu": leaf.slot(self.moments_dtype)}

    def direction(
        self, leaf: Leaf, grad: jax.Array, slots: Slots, weight: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """mu = b1 mu + (1 - b1) g, nu = b2 nu + (1 - b2) g^2: without their bias, mu / (sqrt(nu) + eps)."""
        before = optax.ScaleByAdamState(step, slots["mu"], slots["nu"])
        out, after = optax.scale_by_adam(self.b1, self.b2, self.eps).update(grad, before)
        return out + decay(self.weight_decay, leaf, weight), {"mu": after.mu, "nu": after.nu}


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with heavy-ball momentum when asked for; decay is part of the gradient."""

    momentum: float = 0.0  # 0: none, and no state
    nesterov: bool = False  # looks one step of momentum ahead
    weight_decay: float = 0.0  # added to the gradient; matrices only
    moments_dtype: FloatDtype = "float32"  # of the momentum

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        return {"trace": leaf.slot(self.moments_dtype)} if self.momentum else {}

    def direction(
        self, leaf: Leaf, grad: jax.Array, slots: Slots, weight: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """trace = g + momentum trace; Nesterov's is g + momentum (that)."""
        grad = grad + decay(self.weight_decay, leaf, weight)
        if not self.momentum:
            return grad, {}
        out, after = optax.trace(self.momentum, self.nesterov).update(grad, optax.TraceState(slots["trace"]))
        return out, {"trace": after.trace}


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of a momentum, half of AdamW's state.

    Its learning rate is 3 to 10 times smaller than AdamW's, and its decay as much larger.
    """

    b1: float = 0.9  # share of the momentum in the update's sign
    b2: float = 0.99  # decay of the momentum
    weight_decay: float = 1.0  # times the learning rate; matrices only
    moments_dtype: FloatDtype = "float32"  # of the momentum

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        return {"mu": leaf.slot(self.moments_dtype)}

    def direction(
        self, leaf: Leaf, grad: jax.Array, slots: Slots, weight: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """sign(b1 mu + (1 - b1) g), then mu = b2 mu + (1 - b2) g."""
        out, after = optax.scale_by_lion(self.b1, self.b2).update(grad, optax.ScaleByLionState(step, slots["mu"]))
        return out + decay(self.weight_decay, leaf, weight), {"mu": after.mu}


def decay(weight_decay: float, leaf: Leaf, weight: jax.Array) -> jax.Array | float:
    """What pulls a weight to zero: matrices decay, gains and biases do not; their logical axes decide."""
    return weight_decay * weight if weight_decay and leaf.spec.is_matrix else 0.0
