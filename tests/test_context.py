"""Attention of rows split over `sequence`, against attention of whole rows on one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train.ops import attention, context, context_cost, tiles, zigzag
from sharded_train.rehearse import hlo, wires

STRATEGIES = ("all_gather", "ring", "ulysses")
SEQ, HEADS, KV_HEADS, DIM = 64, 8, 2, 8
SPEC = P(None, "sequence")


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


def mesh_of(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("sequence",))


def split(size: int, strategy: context_cost.Strategy, window: int | None = None, kernel: Any = "xla") -> Any:
    """Output and gradients in the zigzag, jitted."""
    fn = functools.partial(context.context_attention, implementation=kernel, strategy=strategy, windows=(window,))
    run = jax.shard_map(with_gradients(fn), mesh=mesh_of(size), in_specs=(SPEC,) * 5, out_specs=(SPEC,) * 4)
    return jax.jit(run)


def on_devices(size: int, strategy: context_cost.Strategy, args: list[Any], **settings: Any) -> list[np.ndarray]:
    arranged = [zigzag.arrange(np.asarray(x), size) for x in args]
    return [zigzag.undo(np.asarray(x), size) for x in split(size, strategy, **settings)(*arranged)]


def on_one_device(args: list[Any], window: int | None = None) -> list[np.ndarray]:
    fn = functools.partial(attention.attention, implementation="xla", windows=(window,))
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
    strategy: context_cost.Strategy, size: int, segments: np.ndarray
) -> None:
    args = [*arrays(segments), segments]
    for got, want in zip(on_devices(size, strategy, args), on_one_device(args), strict=True):
        assert np.isfinite(got).all()
        assert relative(got, want) < 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_kv_head_and_a_head_each(strategy: context_cost.Strategy) -> None:
    """Of few kv heads ulysses makes copies, whose gradients are summed."""
    for heads, kv_heads in ((4, 1), (4, 4)):
        args = [*arrays(PACKED, heads, kv_heads), PACKED]
        for got, want in zip(on_devices(4, strategy, args), on_one_device(args), strict=True):
            assert relative(got, want) < 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_of_several_tiles(strategy: context_cost.Strategy) -> None:
    segments = rows((300, 301, 777, 1000), seq=1024)
    assert len(list(tiles.whole_tiles(256, 256))) == 2
    args = [*arrays(segments, 2, 1), segments]
    for got, want in zip(on_devices(2, strategy, args), on_one_device(args), strict=True):
        assert relative(got, want) < 2e-6


@pytest.mark.parametrize(("strategy", "window"), [*(("ring", w) for w in (3, 8, 9, 30, SEQ - 1)), ("ulysses", 9)])
def test_windows(strategy: context_cost.Strategy, window: int) -> None:
    """Shorter than a chunk of 8, just as long, one longer; over several chunks; almost the row."""
    args = [*arrays(PACKED), PACKED]
    want = on_one_device(args, window)
    assert relative(want[0], plain(args[0], args[1], args[2], PACKED, window)) < 2e-6
    for got, expected in zip(on_devices(4, strategy, args, window=window), want, strict=True):
        assert relative(got, expected) < 2e-6


def plain(q: Any, k: Any, v: Any, segments: np.ndarray, window: int) -> np.ndarray:
    """The formula, in fp64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    sees = (behind >= 0) & (behind < window) & (segments[:, :, None] == segments[:, None])
    exps = np.exp(np.einsum("bthd,bshd->bhts", q, k) / q.shape[3] ** 0.5) * sees[:, None]
    out: np.ndarray = np.einsum("bhts,bshd->bthd", exps / exps.sum(-1, keepdims=True), v)
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_is_rounded_as_on_one_device(strategy: context_cost.Strategy) -> None:
    args = [*arrays(PACKED, dtype=jnp.bfloat16), PACKED]
    exact = on_one_device([*(x.astype(jnp.float32) for x in args[:4]), PACKED])
    for got, one, want in zip(on_devices(4, strategy, args), on_one_device(args), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative(got, want) < max(1.5 * relative(one, want), 4e-3)


def test_many_tiles_of_a_window_are_one() -> None:
    """A loop over tiles of 128 queries on one device and of 64 on two, documents crossing them."""
    segments = rows((300, 301, 777, 1000), seq=1024)
    args = [*arrays(segments, 2, 1), segments]
    want = on_one_device(args, 100)
    assert relative(want[0], plain(args[0], args[1], args[2], segments, 100)) < 2e-6
    for got, expected in zip(on_devices(8, "ring", args, window=100), want, strict=True):
        assert relative(got, expected) < 2e-6


@pytest.mark.parametrize(("strategy", "window"), [*((s, None) for s in STRATEGIES), ("ring", 12)])
def test_nothing_is_seen_of_later_tokens_or_other_documents(
    strategy: context_cost.Strategy, window: int | None
) -> None:
    """The gradient of one token's output is exactly zero by every key that it may not see, and not by those it may."""
    q, k, v, _ = arrays(PACKED)
    size, run = 4, split(4, strategy, window)
    arranged = [zigzag.arrange(np.asarray(x), size) for x in (q, k, v, PACKED)]
    for token in (0, 1, 29, 30, 60, 61, 63):
        d_out = np.zeros(q.shape, np.float32)
        d_out[:, token] = np.random.default_rng(1).normal(size=d_out[:, token].shape)
        out = run(*arranged[:3], zigzag.arrange(d_out, size), arranged[3])
        _, d_q, d_k, d_v = (zigzag.undo(np.asarray(x), size) for x in out)
        behind = token - np.arange(SEQ)
        sees = (behind >= 0) & (behind < (window or SEQ)) & (PACKED[:, token : token + 1] == PACKED)
        alone = sees.sum(1) == 1  # its one key's score changes nothing, but for rounding
        assert ((np.abs(d_v).sum((2, 3)) > 0) == sees).all()
        assert ((np.abs(d_k).sum((2, 3)) > 0) <= sees).all()
        assert (np.abs(d_k).sum((2, 3))[~alone] > 0).sum() == sees[~alone].sum()
        assert not np.delete(d_q, token, 1).any()


WIRES = [*((s, n, None) for s in STRATEGIES for n in (2, 4, 8)), ("ring", 8, 6), ("all_gather", 4, 23)]


@pytest.mark.parametrize(("strategy", "size", "window"), WIRES)
def test_wires_carry_what_the_formula_says(strategy: context_cost.Strategy, size: int, window: int | None) -> None:
    """Two layers in a scan: in one program by itself XLA would take for the backward pass what the forward pass got.

    What tells documents apart is left out on both sides.
    """

    def layers(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        def layer(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            few = q[:, :, :KV_HEADS]
            return context.context_attention(q, k + few, v - few, segments, "xla", strategy, windows=(window,)), None

        return jax.lax.scan(layer, q, length=2)[0]

    step = jax.jit(
        jax.shard_map(with_gradients(layers), mesh=mesh_of(size), in_specs=(SPEC,) * 5, out_specs=(SPEC,) * 4)
    )
    text = step.lower(*arrays(PACKED), jnp.asarray(PACKED)).compile().as_text() or ""
    found, unknown = wires.collectives(hlo.parse(text), wires.Places.of(mesh_of(size)))
    assert not unknown
    sent = sum(one.wire_bytes * one.times for one in found if "s32" not in one.dtype)
    shape = context_cost.Shape(size, SEQ, HEADS, KV_HEADS, DIM, 4)
    assert sent == 2 * len(PACKED) * sum(context_cost.wire_bytes(strategy, shape, window))


def test_what_cannot_be_split_is_refused() -> None:
    args = [*arrays(PACKED, 4, 2), PACKED]
    with pytest.raises(ValueError, match=r"mesh\.sequence = 8 does not divide the 4 heads .* or sequence = 4"):
        on_devices(8, "ulysses", args)
