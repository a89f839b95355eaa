"""cuDNN's flash attention by the calls inside JAX: the one place that knows them.

JAX's public call rounds the logsumexp to the output's dtype, runs its forward pass again under rematerialisation, and
turns a mask of documents into a bias of `[seq, seq]`, of which it writes the gradient too. Here the forward pass
returns the logsumexp in fp32, the backward pass starts from it, and documents are told by start and length.

q and out are `[batch, seq, heads, head_dim]`, k and v `[batch, keys, kv_heads, head_dim]`, bf16 or fp16; lse is
`[batch, heads, seq]` fp32. The calls are for one device: inside the manual `jax.shard_map`, not under the partitioner.

**Compiled for GPUs, never run on one by us.** `attention_check` compares it all with plain XLA, and raises.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharded_train import compat

FP32 = jnp.dtype(jnp.float32)
MOST_DOCUMENTS = 64  # a row, unless told; each costs `heads * seq` fp32 numbers beside the output, and an idle kernel
OUT_OF_SIGHT = 1e30  # the logsumexp of a query that sees nothing: exp(score - lse) is 0
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def capability() -> float:
    """Compute capability of the GPUs here, 0 of other makers'; what is only compiled is taken to be for new ones."""
    if jax.default_backend() != "gpu":
        return math.inf
    number = jax.local_devices()[0].compute_capability
    return float(number) if number.replace(".", "", 1).isdigit() else 0.0


def packs() -> bool:
    """Has cuDNN the packed layout here? From Hopper on."""
    return capability() >= 9.0


class Attended(NamedTuple):
    """Queries, keys and values, and what attention made of them: what a backward pass begins with."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    lse: jax.Array


class Documents(NamedTuple):
    """Rows cut into documents as cuDNN's packed layout has them: `limit` a row, of all rows together, in order."""

    lengths: jax.Array  # [batch, limit], 0 beyond the last document
    starts: jax.Array  # [batch, limit + 1] tokens from the first row's beginning; the end beyond the last document
    number: jax.Array  # [batch * seq]: which document a token belongs to
    place: jax.Array  # [batch * seq]: and which of its tokens it is
    fit: jax.Array  # bool: there are not too many


def documents(segments: jax.Array, limit: int) -> Documents:
    """Every run of equal numbers in a row of `segments [batch, seq]` is a document, padding as well: no token is left
    out, since cuDNN does not write the output of tokens that belong to no sequence.
    """
    batch, seq = segments.shape
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], [(0, 0), (1, 0)], constant_values=True).reshape(-1)
    starts = jnp.nonzero(first, size=batch * (limit + 1), fill_value=batch * seq)[0].astype(jnp.int32)
    ends = jnp.append(starts[1:], batch * seq)
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    place = jnp.arange(batch * seq, dtype=jnp.int32) - starts[number]
    lengths = (ends - starts)[: batch * limit].reshape(batch, limit)
    return Documents(lengths, starts.reshape(batch, -1), number, place, number[-1] < batch * limit)


# ---- each query sees the keys of its own document up to its place ---------------------------------------------------


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, limit: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Output and lse; of the last `window` keys only, where one is given.

    With `limit` 1 the rows are taken for one document each, as `segments` are then not looked at. With more documents
    than `limit` a row everything is NaN: no wrong number is returned, and the loss shows it.
    """
    if limit == 1:
        return _call("fwd", (q, k, v), "CAUSAL", window=window)
    if not packs():
        return _call("fwd", (q, k, v), "NO_MASK", bias=_bias(segments, window, q.dtype))
    docs = documents(segments, limit)
    out, stats = _call("fwd", (q, k, v), "PADDING_CAUSAL", *_packed(docs, q, k), window=window)
    lse = stats[docs.number, :, docs.place].reshape(*segments.shape, -1).transpose(0, 2, 1)
    return jnp.where(docs.fit, out, jnp.nan).astype(q.dtype), jnp.where(docs.fit, lse, jnp.nan)


def backward(x: Attended, d_out: jax.Array, segments: jax.Array, limit: int, window: int | None) -> Gradients:
    """Gradients of q, k and v in their dtypes."""
    if limit == 1:
        return _backward(x, d_out, "CAUSAL", window=window)
    if not packs():
        return _backward(x, d_out, "NO_MASK", bias=_bias(segments, window, x.q.dtype))
    docs, (batch, heads, seq) = documents(segments, limit), x.lse.shape
    by_token = x.lse.transpose(0, 2, 1).reshape(batch * seq, heads)
    stats = compat.vary(jnp.zeros((batch * limit, heads, seq), FP32), compat.varying_axes(x.lse))
    stats = stats.at[docs.number, :, docs.place].set(by_token, unique_indices=True, mode="drop")
    return _backward(x._replace(lse=stats), d_out, "PADDING_CAUSAL", *_packed(docs, x.q, x.k), window=window)


def _packed(docs: Documents, q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
    """cuDNN wants starts in numbers, not tokens. JAX's own conversion takes the query's heads for the key's in 0.10."""
    tokens, most = q.shape[0] * q.shape[1], max(q.shape[2], k.shape[2]) * q.shape[3]
    if tokens * most >= 2**31:
        raise ValueError(
            f"{q.shape[0]} rows x {q.shape[1]} tokens x {most} numbers a token are {tokens * most}, and cuDNN's packed "
            f"layout counts in 32 bits, to {2**31 - 1}: use more microbatches, or tensor or sequence parallelism"
        )
    starts = [docs.starts * (x.shape[2] * x.shape[3]) for x in (q, k)]
    return docs.lengths, docs.lengths, *starts


def _bias(segments: jax.Array, window: int | None, dtype: jnp.dtype) -> jax.Array:
    """GPUs before Hopper have no packed layout in cuDNN: there it is `[batch, 1, seq, seq]`."""
    place = jnp.arange(segments.shape[1])
    behind = place[:, None] - place
    visible = (behind >= 0) & (segments[:, :, None] == segments[:, None, :])
    visible &= behind < (segments.shape[1] if window is None else window)
    lowest = -(2.0**41) if dtype == jnp.bfloat16 else -(2.0**15)  # as JAX has it: cuDNN subtracts them from each other
    return jnp.where(visible, 0, lowest).astype(dtype)[:, None]


# ---- the first queries see the last keys: all that one document does in two chunks of a row ------------------------


def pair_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first `rows [batch]` queries see the last `keys [batch]` keys, both 0 or neither.

    The other queries have output 0 and lse -1e30. Without a causal mask keys have no order, so that the last ones are
    made the first, which is what cuDNN can mask.
    """
    lengths = jnp.maximum(rows, 1), jnp.maximum(keys, 1)
    out, lse = _call("fwd", (q, k[:, ::-1], v[:, ::-1]), "PADDING", *lengths)
    seen = _first(rows, q.shape[1])
    return jnp.where(seen[..., None, None], out, 0), jnp.where(seen[:, None], lse, -OUT_OF_SIGHT)


def pair_backward(x: Attended, d_out: jax.Array, rows: jax.Array, keys: jax.Array) -> Gradients:
    """Gradients, `out` and `lse` being those over all the keys of the row and not just these."""
    seen, lengths = _first(rows, x.q.shape[1]), (jnp.maximum(rows, 1), jnp.maximum(keys, 1))
    lse, d_out = jnp.where(seen[:, None], x.lse, OUT_OF_SIGHT), jnp.where(seen[..., None, None], d_out, 0)
    x = x._replace(k=x.k[:, ::-1], v=x.v[:, ::-1], lse=lse)
    d_q, d_k, d_v = _backward(x, d_out, "PADDING", *lengths)
    of_keys = _first(keys, x.k.shape[1])[..., None, None]
    d_k, d_v = (jnp.where(of_keys, d, 0)[:, ::-1] for d in (d_k, d_v))
    return jnp.where(seen[..., None, None], d_q, 0), d_k, d_v


# ---- a corner: keys go out of sight one by one ----------------------------------------------------------------------


def corner_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `pair_forward`, of as many queries as keys, query t seeing those from key t on of the last `keys`.

    With both turned round that is a causal mask, and the keys are the first.
    """
    whole = jnp.full_like(rows, q.shape[1])
    out, lse = _call("fwd", (q[:, ::-1], k[:, ::-1], v[:, ::-1]), "PADDING_CAUSAL", whole, jnp.maximum(keys, 1))
    seen = _first(rows, q.shape[1])
    return jnp.where(seen[..., None, None], out[:, ::-1], 0), jnp.where(seen[:, None], lse[..., ::-1], -OUT_OF_SIGHT)


def corner_backward(x: Attended, d_out: jax.Array, rows: jax.Array, keys: jax.Array) -> Gradients:
    """As `pair_backward`."""
    seen, whole = _first(rows, x.q.shape[1]), jnp.full_like(rows, x.q.shape[1])
    lse, d_out = jnp.where(seen[:, None], x.lse, OUT_OF_SIGHT), jnp.where(seen[..., None, None], d_out, 0)
    turned = Attended(x.q[:, ::-1], x.k[:, ::-1], x.v[:, ::-1], x.out[:, ::-1], lse[..., ::-1])
    grads = _backward(turned, d_out[:, ::-1], "PADDING_CAUSAL", whole, jnp.maximum(keys, 1))
    d_q, d_k, d_v = (d[:, ::-1] for d in grads)
    of_keys = jnp.arange(x.k.shape[1]) >= x.k.shape[1] - keys[:, None]
    d_k, d_v = (jnp.where(of_keys[..., None, None], d, 0) for d in (d_k, d_v))
    return jnp.where(seen[..., None, None], d_q, 0), d_k, d_v


def _first(count: jax.Array, length: int) -> jax.Array:
    return jnp.arange(length) < count[:, None]


def _backward(x: Attended, d_out: jax.Array, *how: Any, **settings: Any) -> Gradients:
    others = (x.lse, x.out, d_out.astype(x.q.dtype))
    return _call("bwd", (x.q, x.k, x.v), *how, others=others, **settings)  # type: ignore[no-any-return]


def _call(
    direction: str,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    mask: str,
    *lengths_and_starts: jax.Array,
    bias: jax.Array | None = None,
    window: int | None = None,
    others: tuple[jax.Array, ...] = (),
) -> Any:
    """cuDNN's call: what is not given, page tables among it, is an empty array."""
    nothing = jnp.zeros(0, qkv[0].dtype)
    given = [nothing if bias is None else bias, *lengths_and_starts]
    settings: dict[str, Any] = {"is_training": True} if direction == "fwd" else {}
    return compat.cudnn_attention(
        direction,
        (*qkv, *given, *[nothing] * (7 - len(given)), *others),
        scale=qkv[0].shape[-1] ** -0.5,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(bias is not None, False),  # there is a bias; its gradient is wanted
        mask_type=mask,
        sliding_window_length=window,
        **settings,
    )
