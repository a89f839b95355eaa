"""Optimizers and learning-rate schedules, chosen in the config by their type."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from sharded_train.params import Tree, tree_map


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay on matrices only."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with heavy-ball momentum when asked for."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up to the peak, then half a cosine down to `final_fraction` of it at `decay_steps`."""

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    decay_steps: int | None = None  # None: train.num_steps
    final_fraction: float = 0.1


def learning_rate(config: ScheduleConfig, num_steps: int) -> optax.Schedule:
    """The learning rate of the update that is made when `step` updates have been: a pure function of the step.

    peak (step + 1) / warmup up to the peak, then final + (peak - final) (1 + cos(pi t)) / 2, t from 0 to 1 at the end.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    end = num_steps if config.decay_steps is None else config.decay_steps

    def at(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        t = jnp.clip((step - warmup) / max(end - warmup, 1), 0, 1)
        cosine = config.final_fraction + (1 - config.final_fraction) * (1 + jnp.cos(jnp.pi * t)) / 2
        return peak * jnp.where(step < warmup, (step + 1) / max(warmup, 1), cosine)

    return at


def transformation(rule: AdamW | SGD, specs: Tree) -> optax.GradientTransformation:
    """Gradients -> the direction to subtract, once times the learning rate.

    Matrices decay, gains and biases do not: their logical axes decide.
    """
    decay = optax.add_decayed_weights(rule.weight_decay, mask=tree_map(lambda spec: spec.is_matrix, specs))
    match rule:
        case AdamW():
            parts = [optax.scale_by_adam(rule.b1, rule.b2, rule.eps, mu_dtype=jnp.float32), decay]
        case SGD():
            momentum = [optax.trace(rule.momentum, rule.nesterov)] if rule.momentum else []
            parts = [decay, *momentum]
    return optax.chain(*parts)
