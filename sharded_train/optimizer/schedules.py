"""Learning rates: pure functions of the number of updates made, chosen in the config by their type.

All rise linearly to `learning_rate` over the first `warmup_steps` updates. With t the progress from there to the end of
the decay, cut to 0...1, the rate is then learning_rate times the schedule's `shape`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Constant:
    """`learning_rate` to the end."""

    learning_rate: float = 3e-4  # the highest
    warmup_steps: int = 0  # of the rise to it

    def shape(self, step: jax.Array, num_steps: int) -> jax.Array:
        return jnp.ones_like(step)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A straight line down to `final_fraction` of the rate at `decay_steps`: 1 - (1 - final) t."""

    learning_rate: float = 3e-4  # the highest
    warmup_steps: int = 0  # of the rise to it
    decay_steps: int | None = None  # None: train.num_steps
    final_fraction: float = 0.0  # of the highest rate, at the end

    def shape(self, step: jax.Array, num_steps: int) -> jax.Array:
        return 1 - (1 - self.final_fraction) * _progress(self, step, num_steps)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine down to `final_fraction` of the rate at `decay_steps`: final + (1 - final) (1 + cos(pi t)) / 2."""

    learning_rate: float = 3e-4  # the highest
    warmup_steps: int = 0  # of the rise to it
    decay_steps: int | None = None  # None: train.num_steps
    final_fraction: float = 0.1  # of the highest rate, at the end

    def shape(self, step: jax.Array, num_steps: int) -> jax.Array:
        half = (1 + jnp.cos(jnp.pi * _progress(self, step, num_steps))) / 2
        return self.final_fraction + (1 - self.final_fraction) * half


@dataclasses.dataclass(frozen=True)
class InverseSqrt:
    """1 / sqrt(1 + (step - warmup_steps) / timescale), without an end.

    With timescale = warmup_steps it is that of the Transformer (Vaswani et al. 2017, arXiv:1706.03762).
    """

    learning_rate: float = 3e-4  # the highest
    warmup_steps: int = 0  # of the rise to it
    timescale: int = 1000  # steps after the warm-up in which the rate falls to 0.71 of the highest

    def shape(self, step: jax.Array, num_steps: int) -> jax.Array:
        return (1 + jnp.maximum(step - self.warmup_steps, 0) / self.timescale) ** -0.5


@dataclasses.dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395): constant, then a straight line down.

    The line takes the last `decay_fraction` of train.num_steps and ends at `final_fraction` of the rate.
    """

    learning_rate: float = 3e-4  # the highest
    warmup_steps: int = 0  # of the rise to it
    decay_fraction: float = 0.2  # of train.num_steps, at the end
    final_fraction: float = 0.0  # of the highest rate, at the end

    def decay_begins(self, num_steps: int) -> int:
        return num_steps - round(self.decay_fraction * num_steps)

    def shape(self, step: jax.Array, num_steps: int) -> jax.Array:
        begins = self.decay_begins(num_steps)
        return 1 - (1 - self.final_fraction) * jnp.clip((step - begins) / max(num_steps - begins, 1), 0, 1)


Schedule = Constant | Linear | Cosine | InverseSqrt | WSD


def learning_rate(schedule: Schedule, num_steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The learning rate of the update that is made when `step` updates have been, fp32."""
    peak, warmup = schedule.learning_rate, schedule.warmup_steps

    def at(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / max(warmup, 1)
        return peak * jnp.where(step < warmup, rising, schedule.shape(step, num_steps))

    return at


def _progress(schedule: Linear | Cosine, step: jax.Array, num_steps: int) -> jax.Array:
    """0 when the warm-up is over, 1 from the end of the decay on."""
    end = num_steps if schedule.decay_steps is None else schedule.decay_steps
    return jnp.clip((step - schedule.warmup_steps) / max(end - schedule.warmup_steps, 1), 0, 1)
