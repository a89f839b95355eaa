"""Attention of rows split over `sequence`, against attention of whole rows on one device."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train.ops import attention, context, zigzag

STRATEGIES = ("all_gather", "ring", "ulysses")
SEQ, HEADS, KV_HEADS, DIM = 64, 8, 2, 8


def rows(*ends: tuple[int, ...], seq: int = SEQ) -> np.ndarray:
    """Documents that end there, numbered from 1; 0 after the last."""
    out = np.zeros((len(ends), seq), np.int32)
    for row, places in zip(out, ends, strict=True):
        for number, (start, end) in enumerate(itertools.pairwise((0, *places)), 1):
            row[start:end] = number
    return out


WHOLE = rows((SEQ,), (SEQ,))
PACKED = rows(
    (1, 2, 30, 61),  # single tokens, documents over several chunks, ragged end
    (4, 8, 32, 36, 60, 64),  # ends where chunks end
    (),  # nothing but padding
    (SEQ,),
)


def arrays(segments: np.ndarray, heads: int = HEADS, kv_heads: int = KV_HEADS, dtype: Any = np.float32) -> list[Any]:
    """q, k, v and the gradient of the output."""
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=(*segments.shape, n, DIM)), dtype) for n in (heads, kv_heads, kv_heads, heads)]


def with_gradients(fn: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: fn(q, k, v, segments), q, k, v)
        return out, *pullback(d_out)

    return both


def split(size: int, strategy: context.Strategy, window: int | None = None) -> Callable[..., Any]:
    """Output and gradients in the zigzag, jitted."""
    fn = functools.partial(context.context_attention, implementation="xla", strategy=strategy, window=window)
    mesh = Mesh(np.array(jax.devices()[:size]), ("sequence",))
    spec = P(None, "sequence")
    run = jax.shard_map(with_gradients(fn), mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 4)
    return jax.jit(run)


def on_devices(size: int, strategy: context.Strategy, args: list[Any], window: int | None = None) -> list[np.ndarray]:
    arranged = [zigzag.arrange(np.asarray(x), size) for x in args]
    return [zigzag.undo(np.asarray(x), size) for x in split(size, strategy, window)(*arranged)]


def on_one_device(args: list[Any], window: int | None = None) -> list[np.ndarray]:
    fn = functools.partial(attention.attention, implementation="xla", window=window)
    return [np.asarray(x) for x in jax.jit(with_gradients(fn))(*args)]


def relative(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_the_zigzag_gives_each_device_an_early_and_a_late_chunk() -> None:
    assert zigzag.arrange(np.arange(8), 2, 0).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag.arrange(np.arange(8), 4, 0).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    for size in (1, 2, 4, 8):
        assert (zigzag.undo(zigzag.arrange(np.arange(64), size, 0), size, 0) == np.arange(64)).all()


@pytest.mark.parametrize("segments", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_output_and_gradients_are_those_of_one_device(
    strategy: context.Strategy, size: int, segments: np.ndarray
) -> None:
    args = [*arrays(segments), segments]
    for got, want in zip(on_devices(size, strategy, args), on_one_device(args), strict=True):
        assert np.isfinite(got).all()
        assert relative(got, want) < 2e-6
