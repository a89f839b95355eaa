"""A condition under which large arrays are updated where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

State = TypeVar("State")


def in_place_if(there: jax.Array, work: Callable[[State], State], state: State) -> State:
    """`work(state)` if `there`, else `state`: a loop of one turn or none.

    XLA updates a loop's state in place. Of what goes through a conditional it makes a copy, which for the sums of
    gradients would be one of all of them in every tick of a pipeline, and one of a layer's in every layer.
    """
    once = lambda now: (jnp.zeros_like(there), work(now[1]))
    return lax.while_loop(lambda now: now[0], once, (there, state))[1]  # type: ignore[no-any-return]
