"""Dynamic loss scaling for fp16: the loss is multiplied so that small gradients are not lost, and gradients divided."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sharded_train.precision import LossScaleConfig

State = dict[str, jax.Array]
LEAST, MOST = 1.0, 2.0**24


def fresh(config: LossScaleConfig) -> State:
    """`good_steps`: without overflow in a row. `patience`: overflows until the scale backs off."""
    return {
        "loss_scale": jnp.float32(config.initial),
        "good_steps": jnp.int32(0),
        "patience": jnp.int32(config.hysteresis),
    }


def moved_on(state: State, finite: jax.Array, config: LossScaleConfig) -> State:
    """After a step whose gradients were all finite, or one that was skipped since they were not."""
    scale, good, patience = state["loss_scale"], state["good_steps"] + 1, state["patience"]
    grows, backs_off = good >= config.growth_interval, patience <= 1
    grown = jnp.minimum(scale * config.growth_factor, MOST)
    smaller = jnp.maximum(scale * config.backoff_factor, LEAST)
    return {
        "loss_scale": jnp.where(finite, jnp.where(grows, grown, scale), jnp.where(backs_off, smaller, scale)),
        "good_steps": jnp.where(finite & ~grows, good, 0),
        "patience": jnp.where(finite, jnp.where(grows, config.hysteresis, patience), jnp.maximum(patience - 1, 1)),
    }
