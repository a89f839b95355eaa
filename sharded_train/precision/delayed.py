"""Delayed scaling: a tensor's scale follows from the largest magnitudes of the steps before (arXiv:2209.05433).

For each tensor of each layer the state holds `scale [layers]` and `history [layers, steps]`, the newest first. It goes
neither through the optimizer nor through autodiff; once a step it moves on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sharded_train.precision import Fp8Config
from sharded_train.precision.formats import is_amax, scale_for

Tensor = dict[str, jax.Array]  # "scale" and "history"


def fresh(num_layers: int, length: int) -> Tensor:
    """Before anything was seen: scales of 1."""
    return {"scale": jnp.ones(num_layers, jnp.float32), "history": jnp.zeros((num_layers, length), jnp.float32)}


def moved_on(tensor: Tensor, amax: jax.Array, dtype: jnp.dtype, config: Fp8Config) -> Tensor:
    """The next step's scales, from what was seen in this one, `amax [layers]`.

    Where that is zero (nothing was seen) or not finite, scale and history stay as they are.
    """
    seen = is_amax(amax)
    history = jnp.concatenate([amax[:, None], tensor["history"][:, :-1]], axis=1)
    history = jnp.where(seen[:, None], history, tensor["history"])
    reference = history.max(1) if config.algorithm == "max" else history[:, 0]
    scale = scale_for(reference, dtype, config.margin)
    return {"scale": jnp.where(seen, scale, tensor["scale"]), "history": history}
