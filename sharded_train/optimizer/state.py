"""The state of a run and the update that moves it on, for all parameters.

The optimizer's part is a tree like the parameters', with a dict of arrays in place of each: `layers/attention/q/mu`.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from sharded_train.optimizer import Optimizer
from sharded_train.optimizer.leaf import Leaf, Slot
from sharded_train.params import Tree
from sharded_train.sharding import Plan, is_placement

Array = Any  # of JAX or NumPy, or the shape of one


class TrainState(flax.struct.PyTreeNode):
    """All that changes from step to step.

    `step` counts the updates that were applied, `skipped` those that were not, for a loss or gradient not finite.
    """

    step: Array
    params: Tree  # fp32
    opt_state: Tree
    ema: Tree = None  # fp32, the moving average of params, when train.ema_decay asks for it
    scaling: Tree = None  # of the precision recipe, see `sharded_train.scaling`
    skipped: Array = 0

    @property
    def evaluated(self) -> Tree:
        """The weights to evaluate and to generate with: averaged ones where there are."""
        return self.params if self.ema is None else self.ema


def slots_of(optimizer: Optimizer, plan: Plan) -> Tree:
    """The tree of `Slot`: shapes, dtypes and placements of the state, which is zeros before the first step."""
    one = lambda placement: optimizer.slots(Leaf(placement, plan.axes))
    return jax.tree.map(one, plan.placements, is_leaf=is_placement)


def is_slot(x: Any) -> bool:
    return isinstance(x, Slot)


@jax.named_scope("optimizer")
def update(
    optimizer: Optimizer, plan: Plan, ema_decay: float | None, state: TrainState, grads: Tree, rate: jax.Array
) -> TrainState:
    """The next state. All trees hold this device's shards.

    Inside the manual shard_map: what an optimizer sends over the mesh stands in its own file, and is all there is.
    """
    structure: Any
    placements, structure = jax.tree.flatten(plan.placements, is_leaf=is_placement)
    leaves = [structure.flatten_up_to(tree) for tree in (grads, state.opt_state, state.params)]
    stepped = []
    for placement, grad, slots, weight in zip(placements, *leaves, strict=True):
        held = {name: array.astype(jnp.float32) for name, array in slots.items()}
        out, held = optimizer.direction(Leaf(placement, plan.axes), grad, held, weight, state.step)
        stepped.append((weight - rate * out, {name: held[name].astype(slots[name].dtype) for name in slots}))
    weights, opt_state = (structure.unflatten(leaves) for leaves in zip(*stepped, strict=True))
    ema = None if ema_decay is None else averaged(ema_decay, state.ema, weights, state.step)
    return state.replace(step=state.step + 1, params=weights, opt_state=opt_state, ema=ema)  # type: ignore[no-any-return]


def averaged(decay: float, average: Tree, weights: Tree, step: jax.Array) -> Tree:
    """The exponential moving average of the weights after update number `step` + 1.

    average + (1 - d) (weights - average) with d = min(decay, (step + 1) / (step + 10)), so that the initial weights do
    not linger in a short run. Before the first update it is the weights themselves.
    """
    d = jnp.minimum(decay, (step.astype(jnp.float32) + 1) / (step + 10))
    return jax.tree.map(lambda a, w: a + (1 - d) * (w - a), average, weights)
