"""The first scales of FP8's delayed scaling, measured: with scales of 1 most gradients would be lost as zeros."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sharded_train.local import Batch
from sharded_train.optimizer.state import TrainState
from sharded_train.params import Tree
from sharded_train.scaling import moved_on
from sharded_train.step import Program


def calibrated(program: Program, state: TrainState, batch: Batch) -> TrainState:
    """The state with scales from one forward and backward pass of a batch, by current scaling; nothing is updated."""
    assert program.precision.recipe == "fp8_delayed"
    by_current = dataclasses.replace(program.precision, recipe="fp8_current")
    current = dataclasses.replace(program, precision=by_current)

    def measure(weights: Tree, batch: Batch, step: jax.Array) -> Tree:
        seen = current.passes(weights, None, batch, program.dropout_key(step)).seen
        return moved_on(program.precision, program.fp8, program.fresh_scaling(), seen, jnp.bool(True))

    lies = jax.tree.map(lambda x: x.sharding, program.abstract_state.scaling)
    compiled = jax.jit(measure, out_shardings=lies, compiler_options=program.compiler_options)
    return state.replace(scaling=compiled(state.params, batch, state.step))  # type: ignore[no-any-return]
