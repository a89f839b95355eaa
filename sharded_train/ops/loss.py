"""Cross-entropy over a vocabulary split over `tensor`, in chunks of tokens: whole logits never exist.

The gradient is taken in the forward pass, chunk by chunk, while the chunk's logits are there: three products in place
of four, and the head's gradient is summed over chunks in fp32 (a bf16 sum of many chunks loses most of it).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sharded_train import compat
from sharded_train.collectives import all_max, all_reduce
from sharded_train.ops.embedding import first_row
from sharded_train.ops.linear import product

CHUNK_LOGITS = 2**22  # fp32 logits alive at a time on a device: 16 MiB


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
    sums, _ = _chunks(x, head, targets, vocab_size, label_smoothing, z_loss, with_grads=False)
    return sums


def _chunks(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    smoothing: float,
    z_loss: float,
    with_grads: bool,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array] | None]:
    num_chunks = -(-x.shape[0] // max(1, CHUNK_LOGITS // head.shape[0]))
    pad = -x.shape[0] % num_chunks
    split = lambda a: a.reshape(num_chunks, -1, *a.shape[1:])
    xs = split(jnp.pad(x, ((0, pad), (0, 0))))
    ts = split(jnp.pad(targets, (0, pad), constant_values=-1))
    row = first_row(head) + jnp.arange(head.shape[0])
    valid = row < vocab_size

    def one(carry: tuple, chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple, jax.Array | None]:
        (objective, nll), d_head = carry
        x, target = chunk
        counts = target >= 0
        logits = jnp.where(valid, product(x, head, transposed=True, out_dtype=jnp.float32), -jnp.inf)
        top = all_max(logits.max(-1), "tensor")
        exps = jnp.exp(logits - top[:, None])
        total = all_reduce(exps.sum(-1), "tensor")
        is_target = row == target[:, None]
        at_target = all_reduce(jnp.where(is_target, logits, 0).sum(-1), "tensor")
        lse = jnp.log(total) + top
        loss = lse - at_target
        nll = nll + jnp.where(counts, loss, 0).sum()
        if smoothing:
            mean = all_reduce(jnp.where(valid, logits, 0).sum(-1), "tensor") / vocab_size
            loss = loss + smoothing * (at_target - mean)
        loss = loss + z_loss * lse**2
        objective = objective + jnp.where(counts, loss, 0).sum()
        if not with_grads:
            return ((objective, nll), d_head), None
        d = exps * ((1 + 2 * z_loss * lse) / total)[:, None] - (1 - smoothing) * is_target - smoothing / vocab_size * valid
        d = jnp.where(counts[:, None], d, 0).astype(x.dtype)
        d_head = d_head + product(d.T, x, out_dtype=jnp.float32)
        return ((objective, nll), d_head), product(d, head)

    axes = compat.varying_axes(x) | compat.varying_axes(head) | compat.varying_axes(targets)
    zero = compat.vary(jnp.float32(0), axes - {"tensor"})
    d_head = compat.vary(jnp.zeros(head.shape, jnp.float32), axes) if with_grads else None
    (sums, d_head), d_xs = lax.scan(one, ((zero, zero), d_head), (xs, ts))
    if not with_grads:
        return sums, None
    d_x = d_xs.reshape(-1, x.shape[1])[: x.shape[0]]
    return sums, (d_x, d_head)


def _forward(x, head, targets, vocab_size, label_smoothing, z_loss):  # type: ignore[no-untyped-def]
    sums, grads = _chunks(x, head, targets, vocab_size, label_smoothing, z_loss, with_grads=True)
    return sums, (*grads, head)


def _backward(vocab_size, label_smoothing, z_loss, saved, cotangents):  # type: ignore[no-untyped-def]
    d_x, d_head, head = saved
    scale, _ = cotangents
    return (d_x * scale).astype(d_x.dtype), (d_head * scale).astype(head.dtype), None


cross_entropy.defvjp(_forward, _backward)
