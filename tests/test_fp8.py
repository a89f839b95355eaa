"""FP8 by itself: casts, scales and their state, one product and what it sees."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train.models.decoder import DecoderConfig, projections
from sharded_train.models.deferring import defer, deferred_gradients, later
from sharded_train.models.fp8_layers import found
from sharded_train.models.stack import SEEN
from sharded_train.ops.fp8 import Observed, Quantised, one_use
from sharded_train.ops.linear import Deferred, deferred_gradient, linear, linears
from sharded_train.precision import Fp8Config, LossScaleConfig, blocks, delayed, loss_scale
from sharded_train.precision.formats import E4M3, E5M2, LEAST, MOST, Fp8, current_scale, observe, quantise, scale_for

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
CURRENT, MX = Fp8("current"), Fp8("blocks", E4M3, E4M3)
NP = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
number = lambda x: jnp.float32(x)


def ready(w: jax.Array, how: Fp8 = CURRENT, uses: int = 1, **scales: Any) -> Observed:
    if how.scaling == "blocks":
        return Observed.of(Quantised(w.astype(BF16), None, None, None, how), uses, BF16, x=True, axes=())
    w_scale = current_scale(jnp.abs(w).max(), how.forward, how.margin)
    known = Quantised(quantise(w, w_scale, how.forward), w_scale, scales.get("x"), scales.get("g"), how)
    return Observed.of(known, uses, BF16, x=True, axes=())


# Formats


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_are_those_of_ml_dtypes(dtype: jnp.dtype) -> None:
    """Every bf16 number, and in fp32 every number of the format, what lies halfway between two and beyond, and the next
    numbers on both sides of those; clipped first: beyond 464 e4m3 would have NaN.
    """
    top = float(ml_dtypes.finfo(NP[dtype]).max)
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    own = np.arange(2**8, dtype=np.uint8).view(NP[dtype]).astype(np.float32)
    own = np.sort(own[np.isfinite(own)])
    halves = np.concatenate([own, (own[1:] + own[:-1]) / 2, own * 1.0625, [1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38]])
    halves = halves.astype(np.float32)
    sides = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    for numbers in (every[np.isfinite(every.astype(np.float32))], np.concatenate([halves, *sides])):
        want = np.clip(numbers.astype(np.float32), -top, top).astype(NP[dtype])
        got = np.asarray(jax.jit(quantise, static_argnums=2)(jnp.asarray(numbers), number(1), dtype))
        assert got.view(np.uint8).tolist() == want.view(np.uint8).tolist()
    assert np.isnan(
        np.asarray(quantise(jnp.array([np.inf, -np.inf, np.nan]), number(1), dtype)).astype(np.float32)
    ).all()


def test_on_cpus_no_stack_of_fp8_is_written_to() -> None:
    """XLA would convert all of the stack to write one layer of it: emulated FP8 then takes twice a step of bf16."""
    w = ready(jnp.eye(16))

    @jax.jit
    def layers(x: jax.Array) -> Any:
        return jax.lax.scan(lambda x, _: jax.vjp(linear, x, w), x, length=3)

    text = layers.lower(jnp.ones((32, 16), BF16)).compile().as_text() or ""
    written = set(re.findall(r"= (\w+)\[3,32,16\]\S* dynamic-update-slice\(", text))  # without the weights, [3,16,16]
    assert {"u8"} <= written <= {"u8", "f32"}


def test_what_saturates_and_what_is_lost_is_counted() -> None:
    """e4m3 with scale 2: beyond 224 saturates, up to 2^-11 (half of the smallest, scaled) is lost, zero is not."""
    x = jnp.array([300.0, -225.0, 224.0, 2.0**-11, -(2.0**-12), 2.0**-10, 0.0, 1.0])
    assert observe(x, number(2), E4M3).tolist() == [300.0, 2 / 8, 2 / 8]
    assert (np.asarray(quantise(x, number(2), E4M3), np.float32) == 0).sum() == 3


@pytest.mark.parametrize("amax", [1e-36, 1e-30, 1.0, 3e38])
def test_scales_and_their_inverses_are_finite(amax: float) -> None:
    """CASES 18: amax 1e-36 makes a scale neither zero nor infinite."""
    for scale in (scale_for(number(amax), E4M3, 0), current_scale(number(amax), E5M2, 3)):
        assert LEAST <= float(scale) <= MOST
        assert 0 < float(1 / scale) < math.inf
    assert float(current_scale(number(amax), E4M3, 0)) == 2.0 ** math.floor(math.log2(min(448 / amax, MOST)))


def test_nothing_seen_is_scaled_by_one() -> None:
    assert [float(current_scale(number(amax), E4M3, 0)) for amax in (0.0, math.inf, math.nan)] == [1, 1, 1]


# Blocks


def mx_of_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """OCP's MX formats along the last dim: elements, and of each 32 the least scale that leaves none out of range."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1)
    scale = 2.0 ** np.clip(np.ceil(np.log2(np.where(amax > 0, amax, 2.0**-200) / 448)), -127, 127)
    q = (blocks / scale[..., None]).astype(np.float32).astype(NP[E4M3])
    return q.reshape(x.shape), scale.astype(ml_dtypes.float8_e8m0fnu)


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_to_the_bit(dim: int) -> None:
    """CASES 18: amax from 2^-126 to 3e38, just at and beyond 448 and 1.75 x 2^n, a block of zeros; and back exactly."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (64, 256)) * np.exp2(rng.uniform(-100, 100, (64, 8))).repeat(32, 1)
    x[0, :32], x[1, :32], x[2, 0], x[3, :32], x[4, 32:64] = 0, 1e-36, 3e38, 2.0**-126, 500
    x[5, :32], x[5, 32:64], x[6, :32], x[6, 32:64] = (
        448,
        np.nextafter(np.float32(448), 500),
        7 * 2.0**20,
        7.01 * 2.0**20,
    )
    x = x.astype(np.float32)
    q, scale = mx_of_numpy(x)
    got = jax.jit(blocks.quantised, static_argnums=1)(x if dim else x.T, dim)
    back = np.asarray(jax.jit(blocks.dequantised)(got), np.float32)
    ours = [np.asarray(a) if dim else np.asarray(a).T for a in (got.q, got.scale, back)]
    assert ours[0].tobytes() == q.tobytes()
    assert ours[1].tobytes() == scale.tobytes()
    exact = q.astype(np.float64) * scale.astype(np.float64).repeat(32, 1)
    there = np.abs(exact) >= 2.0**-126
    assert (ours[2][there] == exact[there]).all()
    assert (scale[5, :2].astype(float).tolist(), scale[6, :2].astype(float).tolist()) == ([1, 2], [2.0**14, 2.0**15])
    assert np.asarray(blocks.observe(jnp.asarray(x), 1)).tolist()[:2] == [np.float32(3e38), 0]
    bad = blocks.quantised(jnp.ones((1, 64)).at[0, 3].set(jnp.inf), 1)
    assert np.isnan(np.asarray(blocks.dequantised(bad), np.float32)).any()


def test_factors_in_blocks_lie_along_what_is_contracted() -> None:
    """Each product is that of numpy's dequantised factors."""
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 1, shape) * np.exp2(rng.integers(-9, 9, shape)), BF16)
    x, w, d_y = draw(32, 64), draw(64, 96), draw(32, 96)

    @jax.jit
    def ours() -> Any:
        y, back = jax.vjp(linear, x, ready(w, MX))
        return y, *back(d_y)

    y, d_x, d_w = ours()

    def rounded(a: jax.Array, dim: int) -> np.ndarray:
        q, scale = mx_of_numpy(np.asarray(a if dim else a.T, np.float32))
        whole = q.astype(np.float64) * scale.astype(np.float64).repeat(32, 1)
        return whole if dim else whole.T

    (kept,) = jax.vjp(lambda w: linear(x, w), Deferred.of(ready(w, MX), 32, 64, x=True, axes=()))[1](d_y)
    later = deferred_gradient(kept.x, kept, (64, 96))
    assert np.asarray(later) == pytest.approx(np.asarray(d_w.grad, np.float32), rel=2**-8)
    pairs = {
        "y": (y, rounded(x, 1) @ rounded(w, 0)),
        "d_x": (d_x, rounded(d_y, 1) @ rounded(w, 1).T),
        "d_w": (d_w.grad, rounded(x, 0).T @ rounded(d_y, 0)),
    }
    for name, (got, want) in pairs.items():
        assert np.asarray(got, np.float64) == pytest.approx(want, rel=2**-8, abs=1e-4 * np.abs(want).max()), name
    assert d_w.x[0, 0] == jnp.abs(x.astype(FP32)).max()
    assert d_w.g[0, 0] == jnp.abs(d_y.astype(FP32)).max()


# The state


def histories(amaxes: list[float], **config: Any) -> list[dict[str, np.ndarray]]:
    settings = Fp8Config(amax_history_length=4, **config)
    tensor, states = delayed.fresh(1, 4), []
    for amax in amaxes:
        tensor = delayed.moved_on(tensor, jnp.array([amax], jnp.float32), E4M3, settings)
        states.append({name: np.asarray(x[0]) for name, x in tensor.items()})
    return states


def test_a_spike_lowers_the_scale_and_is_forgotten_with_the_history() -> None:
    """CASES 18."""
    scales = [float(s["scale"]) for s in histories([1, 1, 10, 1, 1, 1, 1])]
    assert scales == pytest.approx([448, 448, 44.8, 44.8, 44.8, 44.8, 448])
    assert [float(s["scale"]) for s in histories([1, 10, 1], algorithm="most_recent", margin=1)] == pytest.approx(
        [224, 22.4, 224]
    )


@pytest.mark.parametrize("nothing", [0.0, math.inf, math.nan])
def test_where_nothing_was_seen_scale_and_history_stay(nothing: float) -> None:
    """CASES 18: a shard without data, an infinite amax."""
    before, after = histories([2, 4, nothing])[1:]
    assert before["scale"] == after["scale"] == 112
    assert before["history"].tolist() == after["history"].tolist() == [4, 2, 0, 0]


def test_five_steps_of_flax() -> None:
    """A product and its gradients with both states. flax computes a step's scale when it begins, and keeps inverses."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, rng.uniform(1, 9), shape), BF16)
    kinds = {"x": ("lhs", E4M3), "w": ("rhs", E4M3), "g": ("grad", E5M2)}
    theirs = {f"{side}_scale": jnp.ones(1) for side, _ in kinds.values()}
    theirs |= {f"{side}_amax_history": jnp.zeros(16) for side, _ in kinds.values()}
    ours = {kind: delayed.fresh(1, 16) for kind in kinds}

    @jax.jit
    def flax(x: jax.Array, w: jax.Array, d_y: jax.Array, state: Any) -> Any:
        dims = (((1,), (0,)), ((), ()))
        product = lambda x, w, state: fp8_ops.fp8_scaled_dot_general(x, w, dims, None, FP32, **state)
        y, back = jax.vjp(product, x.astype(FP32), w.astype(FP32), state)  # in bf16 it rounds the scales too
        return y, *back(d_y.astype(FP32))

    @jax.jit
    def us(x: jax.Array, w: jax.Array, d_y: jax.Array, scales: Any) -> Any:
        q = Quantised(quantise(w, scales["w"], E4M3), scales["w"], scales["x"], scales["g"], Fp8("delayed"))
        y, back = jax.vjp(linear, x, Observed.of(q, 1, BF16, x=True, axes=()))
        return y, *back(d_y)

    for _ in range(5):
        x, w, d_y = draw(16, 32), draw(32, 16), draw(16, 16)
        *want, theirs = flax(x, w, d_y, theirs)
        scales = {kind: state["scale"][0] for kind, state in ours.items()}
        y, d_x, d_w = us(x, w, d_y, scales)
        for one, other in zip((y, d_x, d_w.grad), want, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)
        amaxes = {"x": d_w.x[:, 0], "w": jnp.abs(w).max()[None].astype(FP32), "g": d_w.g[:, 0]}
        for kind, (side, dtype) in kinds.items():
            assert 1 / scales[kind] == pytest.approx(float(theirs[f"{side}_scale"][0]), rel=1e-3)
            ours[kind] = delayed.moved_on(ours[kind], amaxes[kind], dtype, Fp8Config())
            history = theirs[f"{side}_amax_history"].tolist()
            assert sorted(ours[kind]["history"][0].tolist()) == pytest.approx(sorted(history), rel=1e-3)


def test_loss_scale_halves_grows_and_has_patience() -> None:
    """CASES 21."""
    config = LossScaleConfig(growth_interval=3, hysteresis=2)
    state, scales = loss_scale.fresh(config), []
    for finite in (False, False, True, True, True, False, True, False):
        state = loss_scale.moved_on(state, jnp.bool(finite), config)
        scales.append(float(state["loss_scale"]) / 2**16)
    assert scales == [1, 0.5, 0.5, 0.5, 1, 1, 1, 0.5]


def test_loss_scale_ends_at_1_and_at_2_to_the_24() -> None:
    """CASES 21: it neither grows until every step overflows, nor shrinks until gradients are lost."""
    config = LossScaleConfig(growth_interval=1, hysteresis=1)
    ends = []
    for finite in (True, False):
        state = loss_scale.fresh(config)
        for _ in range(30):
            state = loss_scale.moved_on(state, jnp.bool(finite), config)
        ends.append(float(state["loss_scale"]))
    assert ends == [2.0**24, 1]


# One product


def sqnr(got: jax.Array, want: jax.Array) -> float:
    """dB."""
    a, b = (np.asarray(x, np.float64) for x in (got, want))
    return float(20 * np.log10(np.linalg.norm(b) / np.linalg.norm(a - b)))


@pytest.mark.parametrize(
    "how",
    [CURRENT, Fp8("current", E4M3, E4M3), Fp8("delayed"), MX],
    ids=["hybrid", "e4m3", "delayed", "mx"],
)
def test_a_swiglu_mlp_on_gaussian_numbers_keeps_20_db(how: Fp8) -> None:
    """Delayed scales are those of the amaxes that current scaling has seen."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), FP32)
    x, d_y = draw(64, 128), draw(64, 128)
    weights = {"up": draw(128, 256) / 11, "gate": draw(128, 256) / 11, "down": draw(256, 128) / 16}

    def mlp(x: jax.Array, w: Any) -> jax.Array:
        return linear(jax.nn.silu(linear(x, w["gate"])) * linear(x, w["up"]), w["down"])

    def in_fp8(how: Fp8, seen: Any) -> Any:
        scales: Any = lambda of: {"x": scale_for(of["x"][0], E4M3, 0), "g": scale_for(of["g"][0], E5M2, 0)}
        ws = {name: ready(w, how, **(scales(seen[name]) if seen else {})) for name, w in weights.items()}
        got, back = jax.vjp(lambda x, w: mlp(x, w["mlp"]), x.astype(BF16), {"mlp": ws})
        d_x, d_w = back(d_y.astype(BF16))
        return got, d_x, found(d_w)

    @jax.jit
    def both() -> Any:
        want, back = jax.vjp(mlp, x, weights)
        seen = in_fp8(CURRENT, None)[2][SEEN].of["mlp"] if how.scaling == "delayed" else None
        return want, back(d_y), in_fp8(how, seen)

    want, (d_x, d_w), (got, d_x_fp8, grads) = both()
    pairs = {"y": (got, want), "x": (d_x_fp8, d_x), **{name: (grads["mlp"][name], d_w[name]) for name in weights}}
    assert {name: db for name, pair in pairs.items() if (db := sqnr(*pair)) <= 20} == {}


def test_uses_and_deferred_gradients() -> None:
    """Of two uses the larger amax counts, not the sum; a gradient left for later is the same one."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(0, 1, shape), BF16) for shape in ((32, 16), (16, 48)))
    both = lambda x, w: (
        linear(x[:16], one_use(w, 0)["a"]["b"]).sum() + linear(x[16:], one_use(w, 1)["a"]["b"]).sum() * 3
    )
    grads = found(jax.jit(jax.grad(both, 1))(x, {"a": {"b": ready(w.astype(FP32), uses=2)}}))
    seen = grads[SEEN].of["a"]["b"]
    assert seen["x"][0] == jnp.abs(x.astype(FP32)).max()
    assert seen["g"][0] == 3
    plain = ready(w.astype(FP32))
    deferred = Deferred.of(plain, 32, 16, x=True, axes=())
    loss = lambda w: (linear(x, w).astype(FP32) ** 2).sum()
    now, kept = (found({"a": {"b": jax.jit(jax.grad(loss))(w)}})["a"]["b"] for w in (plain, deferred))
    assert (kept.x.dtype, kept.y.dtype) == (E4M3, E5M2)
    later = deferred_gradient(kept.x, kept, (16, 48))
    assert np.asarray(later) == pytest.approx(np.asarray(now, np.float32), rel=2**-7)


def test_gradients_are_left_for_later_under_scales_that_all_devices_share() -> None:
    """Traced alone: it was refused, because what is left differs over the mesh, and given scales do not."""
    w = Quantised(jnp.eye(16).astype(E4M3), number(1), number(1), number(1), Fp8("delayed"))
    axes = ("data",)
    mesh = Mesh(np.array(jax.devices()[:2]), axes)

    def local(x: jax.Array) -> Any:
        deferred = Deferred.of(Observed.of(w, 1, BF16, x=True, axes=axes), 16, 16, x=True, axes=axes)
        (kept,) = jax.vjp(lambda w: linear(x, w), deferred)[1](x)
        return deferred_gradient(kept.x, kept, (16, 16))

    gradients = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.eval_shape(gradients, jnp.ones((32, 16), BF16)).shape == (32, 16)


def test_of_one_input_some_gradients_are_left_for_later_in_bf16() -> None:
    """q in bf16, k and v in FP8: each sort keeps the input as it multiplied by it."""
    config = DecoderConfig(d_model=16, num_heads=2, d_ff=16)
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), BF16)
    wide, square = (lambda: ready(draw(16, 2, 8).astype(FP32))), (lambda: ready(draw(16, 16).astype(FP32)))
    attention = {"q": draw(16, 2, 8), "k": wide(), "v": wide(), "out": square()}
    weights = {"attention": attention, "mlp": {"up": square(), "gate": square(), "down": square()}}
    x, d_y = draw(1, 16, 16), tuple(draw(1, 16, 2, 8) for _ in range(3))

    is_observed = lambda w: isinstance(w, Observed)

    def local(x: jax.Array, weights: Any, d_y: Any) -> Any:
        pull = lambda weights: jax.vjp(lambda w: projections(config, x, w["attention"], None), weights)[1](d_y)[0]
        _, kept = later(config, pull(defer(config, weights, 16, ())))
        now = {name: getattr(leaf, "grad", leaf) for name, leaf in pull(weights)["attention"].items()}
        like = jax.tree.map(lambda w: w.grad if isinstance(w, Observed) else w, weights, is_leaf=is_observed)
        return now, deferred_gradients(config, kept, like)["attention"]

    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    now, after = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))(x, weights, d_y)
    for name in ("q", "k", "v"):
        assert np.asarray(after[name]) == pytest.approx(np.asarray(now[name], np.float32), rel=2**-7, abs=2**-7), name


def test_weights_of_one_input_share_it() -> None:
    """One copy of it is kept for the backward pass, a byte a number; its cotangent is the sum of all."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.integers(-4, 5, shape), BF16)
    x, weights = draw(32, 16), [ready(draw(16, 16).astype(FP32)) for _ in range(3)]
    ys, back = jax.vjp(lambda x, *ws: linears(x, ws, [None] * 3), x, *weights)
    alone = [jax.vjp(linear, x, w) for w in weights]
    assert [leaf.shape for leaf in jax.tree.leaves(back) if leaf.dtype == jnp.uint8] == [x.shape]
    d_ys = [draw(32, 16) for _ in range(3)]
    d_x, *d_ws = back(d_ys)
    apart = [of_one(d_y) for (_, of_one), d_y in zip(alone, d_ys, strict=True)]
    assert all((y == one).all() for y, (one, _) in zip(ys, alone, strict=True))
    assert all((d.grad == one.grad).all() for d, (_, one) in zip(d_ws, apart, strict=True))
    assert np.asarray(d_x, np.float32) == pytest.approx(sum(np.asarray(d, np.float32) for d, _ in apart), rel=2**-7)


def test_a_spike_saturates_and_an_infinity_is_nan() -> None:
    """CASES 18: ten times the amax that the scale is for."""
    x, w = jnp.ones((16, 16), BF16), jnp.eye(16)
    known = ready(w, Fp8("delayed"), x=number(448.0), g=number(1.0))
    y = lambda x: linear(x, known)
    assert (np.asarray(y(10 * x), np.float32) == 1).all()
    (d,) = jax.vjp(lambda w: linear(10 * x, w), known)[1](x)
    assert d.x[0].tolist() == [10, 1, 0]
    assert np.isnan(np.asarray(y(x.at[3, 3].set(jnp.inf)), np.float32)[3]).all()


def test_amax_on_a_mesh_is_that_of_one_device() -> None:
    """Rows over data x sequence, columns over tensor; whole numbers, of which every sum is exact."""
    rng = np.random.default_rng(2)
    x, w = rng.integers(-8, 9, (64, 32)).astype(np.float32), rng.integers(-4, 5, (32, 64)).astype(np.float32)
    axes = ("data", "sequence", "tensor")

    def local(axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
        how = Fp8("delayed")
        known = Quantised(quantise(w, number(1), E4M3), number(1), number(1), number(1), how)
        observed = Observed.of(known, 1, BF16, x=True, axes=axes)
        y, back = jax.vjp(lambda w: linear(x.astype(BF16), w), observed)
        (d,) = back(jax.lax.clamp(-64.0, y.astype(FP32), 64.0).astype(BF16))
        seen = jnp.stack([d.x[0, 0], d.g[0, 0]])
        return jax.lax.pmax(seen, axes) if axes else seen

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), axes)
    specs = (P(("data", "sequence")), P(None, "tensor"))
    many = jax.jit(jax.shard_map(functools.partial(local, axes), mesh=mesh, in_specs=specs, out_specs=P()))(x, w)
    assert many.tolist() == local((), jnp.asarray(x), jnp.asarray(w)).tolist()
