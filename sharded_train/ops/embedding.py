"""The vocabulary split over `tensor`: rows of the table by vocabulary, padded inside where it does not divide."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sharded_train.collectives import axis_index, axis_size, own_part


def own_rows(table: jax.Array, vocab_size: int) -> jax.Array:
    """This device's rows of a `[vocab, embed]` table, all of them zero beyond the vocabulary.

    A vocabulary that `tensor` does not divide is stored whole on every device; only here is it padded and cut.
    """
    ways = axis_size("tensor")
    if ways == 1 or table.shape[0] < vocab_size:
        return table
    return own_part(jnp.pad(table, ((0, -vocab_size % ways), (0, 0))), "tensor", 0)


def first_row(rows: jax.Array) -> jax.Array | int:
    """The vocabulary id of this device's first row."""
    return axis_index("tensor") * rows.shape[0]


def lookup(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of the tokens whose row this device holds, zero for others: `[batch, seq]` -> `[batch, seq, embed]`.

    The sum over `tensor` is the embedding. Gradients of a token seen often are summed in fp32.
    """
    local = ids - first_row(rows)
    mine = (local >= 0) & (local < rows.shape[0])
    return jnp.where(mine[..., None], take(rows, jnp.where(mine, local, 0)), 0)


@jax.custom_vjp
def take(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]` with its gradient accumulated in fp32."""
    return table[ids]


def _take_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (table, ids)


def _take_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    wide = jax.vjp(functools.partial(jnp.take, indices=ids, axis=0), table.astype(jnp.float32))[1]
    return wide(grad.astype(jnp.float32))[0].astype(table.dtype), None


take.defvjp(_take_forward, _take_backward)
