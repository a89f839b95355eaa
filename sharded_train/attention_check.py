"""Does cuDNN's attention compute here what plain XLA does? Asked once before a GPU is trusted with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train.ops import attention, cudnn, tiles, zigzag

HEADS, KV_HEADS = 4, 2
Backward = Callable[[attention.Attended], attention.Gradients]
MOST = 0.02  # relative error of bf16 against fp32 with the same inputs; about 0.004 is rounding
MOST_OF_LSE = 0.001  # that of the logsumexp is fp32


class Result(NamedTuple):
    """Relative errors of one case; None where both have no number, as they should."""

    case: str
    errors: dict[str, float | None]

    @property
    def right(self) -> bool:
        most = lambda name: MOST_OF_LSE if name == "lse" else MOST
        return all(error is None or error <= most(name) for name, error in self.errors.items())  # NaN is not

    def __str__(self) -> str:
        shown = (f"{name} {'NaN' if error is None else f'{error:.1e}'}" for name, error in self.errors.items())
        return f"{'right' if self.right else 'WRONG'}  {self.case}: {', '.join(shown)}"


def check(head_dim: int, dtype: jnp.dtype, window: int | None = None, seq: int = 512) -> list[Result]:
    """Small cases on the first local device, forward and backward, in some seconds; `RuntimeError` if one is wrong.

    One document a row; several, of a single token, of odd lengths, padding; more than the table holds, which must give
    NaN; a `window`; pairs of chunks that share a document, or the half of one, or nothing, whole and in a corner.
    """
    results = list(_results(head_dim, dtype, window, seq))
    if not all(result.right for result in results):
        raise RuntimeError(
            "cuDNN's attention is not what plain XLA computes. Relative errors:\n"
            + "\n".join(map(str, results))
            + '\nUse model.attention = "xla", and report this with your GPU and the versions of jax and cuDNN'
        )
    return results


def _results(head_dim: int, dtype: jnp.dtype, window: int | None, seq: int) -> Iterator[Result]:
    some, chunk = seq // 4 + 3, seq // 2
    ends = [(1, 2, some, some + 1, chunk + some), (seq // 4, chunk, chunk + seq // 4), (), (seq - 1,)]
    packed = jnp.asarray([np.searchsorted(row, np.arange(seq), side="right") + 1 for row in ends], jnp.int32)
    packed = packed.at[0, ends[0][-1] :].set(0)
    whole = jnp.ones_like(packed)
    args = _numbers(len(ends), seq, head_dim, dtype)
    for name, segments, keys, limit in (
        ("one document a row", whole, None, 1),
        ("one document in a table of many", whole, None, 8),
        ("packed documents", packed, None, 8),
        *([(f"a window of {window}", packed, min(window, some), 8)] if window is not None else []),
    ):
        kernel = attention.Kernel("cudnn", keys, limit)
        got = _of_rows(*args, segments, kernel)
        yield _compared(name, got, _of_rows(*_fp32(args), segments, kernel._replace(name="xla")))
    many = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32) // 2, packed.shape)
    out, *_ = _of_rows(*args, many, attention.Kernel("cudnn", None, 8))
    if cudnn.packs():
        yield Result("more documents than the table holds", {"out": None if jnp.isnan(out).all() else float("inf")})
    args = _numbers(4, chunk, head_dim, dtype)
    for name, first, last in (
        ("pairs of chunks in one document", [chunk] * 4, [chunk] * 4),
        ("pairs that share a part, or nothing", [chunk, some, 1, 0], [1, some - 20, chunk, 0]),
    ):
        sight = zigzag.Sight(jnp.bool_(True), jnp.int32(first), jnp.int32(last))
        got = _of_pairs(*args, sight, attention.Kernel("cudnn", None, 8))
        yield _compared(name, got, _of_pairs(*_fp32(args), sight, attention.Kernel("xla", None, 8)))
        if window is not None:
            yield _compared(f"{name}, in a corner", _of_corners(*args, sight), _of_tiles(*_fp32(args), sight))


def _numbers(batch: int, seq: int, head_dim: int, dtype: jnp.dtype) -> list[jax.Array]:
    """q, k, v and the gradient of the output."""
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=(batch, seq, n, head_dim)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def _fp32(args: list[jax.Array]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in args]


@functools.partial(jax.jit, static_argnums=5)
def _of_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, segments: jax.Array, kernel: attention.Kernel
) -> tuple[jax.Array, ...]:
    out, lse = attention.forward(q, k, v, segments, kernel)
    return out, lse, *attention.backward(attention.Attended(q, k, v, out, lse), d_out, segments, kernel)


@functools.partial(jax.jit, static_argnums=5)
def _of_pairs(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, sight: zigzag.Sight, kernel: attention.Kernel
) -> tuple[jax.Array, ...]:
    back = lambda x: zigzag.pair_backward(x, d_out, sight, kernel)
    return _with_gradients(q, k, v, zigzag.pair_forward(q, k, v, sight, kernel), back)


@jax.jit
def _of_corners(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, sight: zigzag.Sight
) -> tuple[jax.Array, ...]:
    back = lambda x: cudnn.corner_backward(x, d_out, sight.rows, sight.keys)
    return _with_gradients(q, k, v, cudnn.corner_forward(q, k, v, sight.rows, sight.keys), back)


@jax.jit
def _of_tiles(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, sight: zigzag.Sight) -> tuple[jax.Array, ...]:
    """The same by plain XLA: query t sees keys from t on, of those that it sees at all."""
    at, of = jnp.arange(q.shape[1]), lambda x: x[:, None, None]
    seen = (at[:, None] <= at) & (at[:, None] < of(sight.rows)) & (at >= q.shape[1] - of(sight.keys))
    visible, every = lambda rows, keys: seen[:, rows, keys], list(tiles.whole_tiles(q.shape[1], q.shape[1]))
    back = lambda x: tiles.tiled_backward(x, d_out, every, visible)
    return _with_gradients(q, k, v, tiles.tiled_forward(q, k, v, every, visible), back)


def _with_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, made: tuple[jax.Array, jax.Array], backward: Backward
) -> tuple[jax.Array, ...]:
    """The gradients as if each query had seen other keys too."""
    out, lse = made
    seen = lse > -1e29
    out, lse = jnp.where(seen.swapaxes(1, 2)[..., None], out, 0), jnp.where(seen, lse, 0)
    return out, lse, *backward(attention.Attended(q, k, v, out, jnp.logaddexp(lse, 0)))


def _compared(case: str, got: tuple[jax.Array, ...], want: tuple[jax.Array, ...]) -> Result:
    norm: Callable[[Any], float] = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))
    of = lambda got, want: norm(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / norm(want)
    return Result(case, dict(zip(("out", "lse", "d_q", "d_k", "d_v"), map(of, got, want), strict=True)))
