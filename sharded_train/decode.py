"""A model with a cache of keys and values: a whole prompt, or one token, further at a time.

Layers are those of training; only what attention attends to is the cache.

Activations are whole on every device of `tensor` between the blocks (a single token cannot be split along the
sequence); heads, MLP and vocabulary are split as in training.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.collectives import TensorParallel, all_gather, axis_size
from sharded_train.models import Model
from sharded_train.models.block import block_of
from sharded_train.ops.linear import similarity
from sharded_train.ops.tiles import attend
from sharded_train.params import Tree

WHOLE = TensorParallel(sequence_parallel=False)


class Cache(flax.struct.PyTreeNode):
    """Keys and values of this device's heads, each `[layers, batch, places, kv_heads, head_dim]`."""

    k: jax.Array
    v: jax.Array


def empty_cache(model: Model, batch: int, places: int, dtype: jnp.dtype) -> Cache:
    """A cache for rows of at most `places` tokens."""
    kv_heads = max(1, model.kv_heads // axis_size("tensor"))
    nothing = jnp.zeros((model.num_layers, batch, places, kv_heads, model.dim_per_head), dtype)
    return Cache(nothing, nothing)


def advance(
    model: Model,
    outer: Tree,
    layers: Tree,
    fetch: Callable[[Tree], Tree],
    tokens: jax.Array,
    cache: Cache,
    start: jax.Array | int,
) -> tuple[jax.Array, Cache]:
    """Read `tokens [batch, new]` that follow the `start` tokens in the cache.

    Args:
      outer: gathered weights outside of the layers.
      layers: stacked weights of the layers; `fetch` makes one layer's slice ready to multiply with.

    Returns:
      fp32 logits of the token after the last, `[batch, vocab]` (the same on every device of `tensor`), and the cache.
    """
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    behind = positions[..., None] - jnp.arange(cache.k.shape[2])
    windows = jnp.array([window or cache.k.shape[2] for window in model.layer_windows])
    ctx = model.context(positions, jnp.ones_like(tokens), positions, None, WHOLE)
    axes = compat.varying_axes(cache.k)
    x = compat.vary(model.embed(outer, tokens, positions, ctx, WHOLE), axes)

    def layer(x: jax.Array, inputs: tuple[Tree, Cache, jax.Array]) -> tuple[jax.Array, Cache]:
        shards, old, window = inputs
        put = lambda places, new: lax.dynamic_update_slice_in_dim(places, new.astype(places.dtype), start, 1)
        now: list[Cache] = []

        def attend_to_cache(q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array) -> jax.Array:
            now.append(Cache(put(old.k, k), put(old.v, v)))
            return attend(q, now[0].k, now[0].v, (behind >= 0) & (behind < window))

        block = block_of(model.branches(attend_to_cache, WHOLE))
        return block(x, fetch(shards), ctx, jnp.int32(0), None), now[0]

    x, cache = lax.scan(layer, x, (layers, cache, windows))
    last = model.final(x[:, -1:], outer, WHOLE)[:, 0]
    logits = similarity(last, model.head(outer))
    return all_gather(logits, "tensor", 1)[:, : model.vocab_size], cache
