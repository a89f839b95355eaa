"""The order of a run's layers: the stages' in the run's state, the model's in checkpoints and in all that is told."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from sharded_train.optimizer.state import TrainState
from sharded_train.params import Tree
from sharded_train.pipeline import Pipeline
from sharded_train.sharding import Plan, plan_of


class ModelOrder:
    """What a program with a pipeline knows of both orders; without one they are the same."""

    pipe: Pipeline | None
    plan: Plan

    @property
    def specs(self) -> Tree:
        raise NotImplementedError

    @property
    def abstract_state(self) -> TrainState:
        raise NotImplementedError

    def _abstract(self, plan: Plan) -> TrainState:
        raise NotImplementedError

    @functools.cached_property
    def abstract_checkpoint(self) -> TrainState:
        """As `abstract_state`, with the layers in the model's order."""
        if self._in_model_order:
            return self.abstract_state
        # What the stages no longer split ZeRO does, or a device would have to hold the layers of all stages.
        zero = dataclasses.replace(self.plan.zero, stage=max(1, self.plan.zero.stage))
        return self._abstract(plan_of(self.specs, self.plan.sizes, zero))

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """The state with its layers in the model's order."""
        return state if self._in_model_order else self._reordered(self.of_model, self.abstract_checkpoint)(state)

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """The way back; the given state's buffers are given up."""
        return state if self._in_model_order else self._reordered(self.staged, self.abstract_state)(state)

    @property
    def _in_model_order(self) -> bool:
        return self.pipe is None or self.pipe.in_model_order

    def _reordered(self, reorder: Callable[[Tree], Tree], like: TrainState) -> Callable[[TrainState], TrainState]:
        def whole(state: TrainState) -> TrainState:
            trees = {name: getattr(state, name) for name in ("params", "opt_state", "ema", "scaling")}
            return state.replace(**{name: reorder(t) for name, t in trees.items() if t is not None and "layers" in t})  # type: ignore[no-any-return]

        def lies(state: TrainState) -> Any:
            return jax.tree.map(lambda x: x.sharding, like.replace(scaling=like.scaling if state.scaling else None))

        return lambda state: jax.jit(whole, out_shardings=lies(state))(state)  # type: ignore[no-any-return]

    def staged(self, tree: Tree) -> Tree:
        """A tree like the parameters (or with trees in place of each), its layers put in the order of the stages."""
        if self.pipe is None:
            return tree
        return {**tree, "layers": jax.tree.map(self.pipe.staged, tree["layers"])}

    def of_model(self, tree: Tree) -> Tree:
        """The way back."""
        if self.pipe is None:
            return tree
        return {**tree, "layers": jax.tree.map(self.pipe.of_model, tree["layers"])}
