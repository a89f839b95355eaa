"""Adafactor: a second moment kept as the means of its rows and columns.

optax's cannot be used: it takes the two largest dims of a leaf for the matrix, the stack of layers among them, and on a
shard its means would be those of the shard.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sharded_train.optimizer.elementwise import decay
from sharded_train.optimizer.leaf import FloatDtype, Leaf, Slot, Slots

TINY = 1e-30  # added to squares, so that a gradient of zero divides by something


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), every layer's weight a parameter of its own.

    Of matrices the means are kept, in fp32 whatever `moments_dtype` says: late in training they change by less than
    bf16 can hold. They lie where the rows and columns of the weight lie.
    """

    decay_exponent: float = 0.8  # of the means' decay, 1 - step^-this
    clip_threshold: float = 1.0  # of the root mean square of each parameter's update
    relative: bool = True  # updates are multiplied by the root mean square of their parameter, or min_scale
    min_scale: float = 1e-3  # least scale of an update, where relative
    momentum: float = 0.0  # of the updates
    weight_decay: float = 0.0  # times the learning rate; matrices only
    moments_dtype: FloatDtype = "float32"  # of the momentum

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        slots = {"momentum": leaf.slot(self.moments_dtype)} if self.momentum else {}
        if not leaf.spec.is_matrix:
            return {"nu": leaf.slot(), **slots}
        rows, columns = leaf.matrix_dims
        return {"row": leaf.slot(without=columns), "column": leaf.slot(without=rows), **slots}

    def direction(
        self, leaf: Leaf, grad: jax.Array, slots: Slots, weight: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """u = g / sqrt(row column / mean(row)), row = d row + (1 - d) mean(g^2) over columns, d = 1 - (step + 1)^-0.8.

        u is then divided by max(1, rms(u) / clip_threshold), multiplied by max(rms(weight), min_scale), and averaged
        with the momentum: momentum m + (1 - momentum) u.

        Over the mesh go sums of rows, columns and scalars, where a dim that is reduced is split.
        """
        whole = leaf.own_dims
        squares = grad**2 + TINY
        keep = 1 - (step.astype(jnp.float32) + 1) ** -self.decay_exponent
        if leaf.spec.is_matrix:
            rows, columns = leaf.matrix_dims
            row = keep * jnp.expand_dims(slots["row"], columns) + (1 - keep) * leaf.mean(squares, columns)
            column = keep * jnp.expand_dims(slots["column"], rows) + (1 - keep) * leaf.mean(squares, rows)
            out = grad * jax.lax.rsqrt(row / leaf.mean(row, rows)) * jax.lax.rsqrt(column)
            after = {"row": row.squeeze(columns), "column": column.squeeze(rows)}
        else:
            after = {"nu": keep * slots["nu"] + (1 - keep) * squares}
            out = grad * jax.lax.rsqrt(after["nu"])
        out = out / jnp.maximum(1, jnp.sqrt(leaf.mean(out**2, whole)) / self.clip_threshold)
        if self.relative:
            out = out * jnp.maximum(jnp.sqrt(leaf.mean(weight**2, whole)), self.min_scale)
        if self.momentum:
            out = self.momentum * slots["momentum"] + (1 - self.momentum) * out
            after["momentum"] = out
        return out + decay(self.weight_decay, leaf, weight), after
