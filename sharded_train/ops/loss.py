"""Cross-entropy over a vocabulary split over `tensor`, in chunks of tokens: whole logits never exist.

The gradient is taken in the forward pass, chunk by chunk, while the chunk's logits are there: three products in place
of four, and the head's gradient is summed over chunks in fp32 (a bf16 sum of many chunks loses most of it).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.collectives import all_max, all_reduce
from sharded_train.ops.dot import dot
from sharded_train.ops.embedding import first_row
from sharded_train.ops.linear import similarity

CHUNK_LOGITS = 2**24  # fp32 logits alive at a time on a device: 64 MiB


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, vocab_size: int, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Sums over tokens of the objective and of the plain negative log-likelihood (nats; carries no gradient).

    objective = logsumexp - (1 - s) logit[target] - s mean(logits) + z logsumexp^2, over the whole vocabulary.

    Args:
      x: `[tokens, embed]`, the same tokens on every device of `tensor`.
      head: `[vocab / tensor, embed]`, this device's rows; rows at or beyond `vocab_size` are padding.
      targets: `[tokens]` int32; below 0 the token counts for nothing.
    """
    return _sums(x, head, targets, vocab_size, label_smoothing, z_loss)


def _chunk(
    x: jax.Array, head: jax.Array, target: jax.Array, vocab_size: int, smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a few tokens: the two sums, and the objective's gradient by this device's logits."""
    row = first_row(head) + jnp.arange(head.shape[0])
    valid = row < vocab_size
    counts = target >= 0
    logits = jnp.where(valid, similarity(x, head), -jnp.inf)
    top = all_max(logits.max(-1), "tensor")
    exps = jnp.exp(logits - top[:, None])
    total = all_reduce(exps.sum(-1), "tensor")
    is_target = row == target[:, None]
    at_target = all_reduce(jnp.where(is_target, logits, 0).sum(-1), "tensor")
    lse = jnp.log(total) + top
    nll = objective = lse - at_target
    if smoothing:
        mean = all_reduce(jnp.where(valid, logits, 0).sum(-1), "tensor") / vocab_size
        objective = objective + smoothing * (at_target - mean)
    objective = objective + z_loss * lse**2
    d_lse = (1 + 2 * z_loss * lse) / total
    d_logits = exps * d_lse[:, None] - (1 - smoothing) * is_target - smoothing / vocab_size * valid
    add_up = lambda loss: jnp.where(counts, loss, 0).sum()
    return add_up(objective), add_up(nll), jnp.where(counts[:, None], d_logits, 0).astype(x.dtype)


def _split(x: jax.Array, targets: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Tokens in chunks `[chunks, tokens, ...]`, the last one filled with tokens that count for nothing."""
    num_chunks = -(-x.shape[0] // max(1, CHUNK_LOGITS // rows))
    pad = -x.shape[0] % num_chunks
    xs = jnp.pad(x, ((0, pad), (0, 0))).reshape(num_chunks, -1, x.shape[1])
    return xs, jnp.pad(targets, (0, pad), constant_values=-1).reshape(num_chunks, -1)


def _zero(*like: jax.Array) -> jax.Array:
    """A sum to begin with, over everything that varies in `like` but for the vocabulary's parts."""
    return compat.vary(jnp.float32(0), (axis for axis in compat.varying_axes(*like) if axis != "tensor"))


def _sums(
    x: jax.Array, head: jax.Array, targets: jax.Array, vocab_size: int, smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    def add(sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        objective, nll, _ = _chunk(chunk[0], head, chunk[1], vocab_size, smoothing, z_loss)
        return (sums[0] + objective, sums[1] + nll), None

    zero = _zero(x, head, targets)
    return lax.scan(add, (zero, zero), _split(x, targets, head.shape[0]))[0]


def _sums_and_grads(
    x: jax.Array, head: jax.Array, targets: jax.Array, vocab_size: int, smoothing: float, z_loss: float
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    def add(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (objectives, nlls, d_head), (x, target) = carry, chunk
        objective, nll, d_logits = _chunk(x, head, target, vocab_size, smoothing, z_loss)
        d_head = d_head + dot(d_logits, x, transpose_a=True, out_dtype=d_head.dtype)
        return (objectives + objective, nlls + nll, d_head), dot(d_logits, head, out_dtype=x.dtype)

    zero = _zero(x, head, targets)
    d_head = compat.vary(jnp.zeros(head.shape, jnp.float32), compat.varying_axes(zero, head))
    (objective, nll, d_head), d_xs = lax.scan(add, (zero, zero, d_head), _split(x, targets, head.shape[0]))
    return (objective, nll), (d_xs.reshape(-1, x.shape[1])[: x.shape[0]], d_head, head)


def _backward(
    vocab_size: int, smoothing: float, z_loss: float, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, None]:
    d_x, d_head, head = saved
    scale, _ = cotangents
    return (d_x * scale).astype(d_x.dtype), (d_head * scale).astype(head.dtype), None


cross_entropy.defvjp(_sums_and_grads, _backward)
