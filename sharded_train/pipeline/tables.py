"""The tables of a schedule as one stage reads them, and the buffers that they name slots of."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_train.pipeline.stages import Pipeline
from sharded_train.schedules.table import NONE

AXIS = "pipeline"


class Now(NamedTuple):
    """What the tables tell one stage for one tick."""

    forward: jax.Array
    backward: jax.Array
    arriving_input: jax.Array
    forward_input: jax.Array
    backward_input: jax.Array
    arriving_cotangent: jax.Array
    backward_cotangent: jax.Array
    weights: jax.Array
    backward_kept: jax.Array
    weights_kept: jax.Array


def tables(pipe: Pipeline, stage: jax.Array | int) -> Now:
    """A stage's columns of the schedule and its slots, each `[tick]`."""
    schedule, slots = pipe.schedule, pipe.slots
    columns = (
        schedule.forward,
        schedule.backward,
        slots.arriving_input,
        slots.forward_input,
        slots.backward_input,
        slots.arriving_cotangent,
        slots.backward_cotangent,
        np.full_like(schedule.forward, NONE) if schedule.weights is None else schedule.weights,
        slots.backward_kept,
        slots.weights_kept,
    )
    return Now(*(lax.dynamic_index_in_dim(jnp.asarray(t), stage, 1, keepdims=False) for t in columns))


def buffer(x: jax.Array, num: int) -> jax.Array:
    """A buffer of `num` slots for such arrays, and one for what nobody reads."""
    return jnp.broadcast_to(jnp.zeros_like(x), (num + 1, *x.shape))


def put(held: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    """Into its slot, or where nobody reads."""
    return lax.dynamic_update_index_in_dim(held, x, jnp.where(slot < 0, held.shape[0] - 1, slot), 0)


def get(held: jax.Array, slot: jax.Array) -> jax.Array:
    """Out of its slot; where there is none, anything."""
    return lax.dynamic_index_in_dim(held, jnp.maximum(slot, 0), 0, keepdims=False)
