"""The tables of a schedule as one stage reads them, and the buffers that they name slots of."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_train.params import Tree
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


def buffer(entry: Tree, num: int) -> Tree:
    """Zeros `[num + 1, ...]` for entries like this one: the last slot is for what nobody reads."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (num + 1, *x.shape)), entry)


def put(held: Tree, entry: Tree, slot: jax.Array) -> Tree:
    """The buffer with an entry in its slot, or where nobody reads."""
    at = lambda buffer: jnp.where(slot < 0, buffer.shape[0] - 1, slot)
    return jax.tree.map(lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, at(buffer), 0), held, entry)


def get(held: Tree, slot: jax.Array) -> Tree:
    """The entry in a slot; where there is none, anything."""
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), 0, False), held)
