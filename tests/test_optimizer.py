"""Optimizers and schedules: against optax on whole arrays, on every mesh, with what they hold and what they send."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from sharded_train import equivalence
from sharded_train.equivalence import MODELS, Layout
from sharded_train.errors import ConfigError
from sharded_train.evaluate import Validation, in_words
from sharded_train.mesh import AXES
from sharded_train.optimizer import (
    SGD,
    WSD,
    Adafactor,
    AdamW,
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Lion,
    Muon,
    Optimizer,
    learning_rate,
)
from sharded_train.optimizer.leaf import Leaf
from sharded_train.optimizer.muon import is_hidden_matrix, newton_schulz
from sharded_train.params import ParamSpec, Tree, named_leaves, tree_map
from sharded_train.recipe import check, from_dict, warnings_of
from sharded_train.sharding import ZeroConfig, is_placement, place
from sharded_train.show import bytes_held
from sharded_train.step import Program, TrainState

ONE, ZERO0, ZERO3 = Layout(), Layout(data=4, tensor=2), Layout(data=4, tensor=2, zero=3)
GROUPS = Layout(data=4, tensor=2, zero=1, group=2)  # two copies of the state
RATE, NUM_STEPS = 0.01, 4
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(weight_decay=0.2),
    "sgd": SGD(momentum=0.9, nesterov=True, weight_decay=0.2),
    "lion": Lion(),
    "adafactor": Adafactor(momentum=0.5, weight_decay=0.2),
    "muon": Muon(weight_decay=0.2),
}


@functools.cache
def program(optimizer: Optimizer, layout: Layout, ema_decay: float | None = None) -> Program:
    p = equivalence.program(MODELS["llama_gqa"], layout)
    train = dataclasses.replace(p.train, ema_decay=ema_decay)
    return dataclasses.replace(p, optimizer=optimizer, schedule=Constant(RATE), train=train)


@functools.cache
def compiled(optimizer: Optimizer, layout: Layout, ema_decay: float | None = None) -> Any:
    """The update alone."""
    p = program(optimizer, layout, ema_decay)
    state = p.abstract_state
    return jax.jit(p.update).lower(state, state.params, jax.ShapeDtypeStruct((), jnp.float32)).compile()


def specs() -> dict[str, ParamSpec]:
    return dict(named_leaves(program(AdamW(), ONE).specs))


def drawn(seed: int) -> Tree:
    """Something like gradients: leaves of very different sizes, and a row of the embedding that nothing has touched."""
    names = iter(specs())

    def draw(spec: ParamSpec) -> np.ndarray:
        rng = np.random.default_rng((seed, zlib.crc32(next(names).encode())))
        return (rng.normal(0, 10.0 ** rng.integers(-4, 1), spec.shape)).astype(np.float32)

    tree = tree_map(draw, program(AdamW(), ONE).specs)
    tree["embedding"][3] = 0
    return tree


def first(p: Program) -> TrainState:
    """The state before the first update, with drawn weights."""
    weights = drawn(0)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), p.abstract_state)
    state = state.replace(params=weights, ema=None if state.ema is None else weights)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, p.abstract_state)  # type: ignore[no-any-return]


def updates(*asked: Any, num_steps: int = NUM_STEPS) -> list[TrainState]:
    """The states after each of some updates, with drawn gradients."""
    states = [first(program(*asked))]
    for step in range(num_steps):
        grads = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), drawn(1 + step), states[0].params)
        states.append(compiled(*asked)(states[-1], grads, jnp.float32(RATE)))
    return states[1:]


def named(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree, None)}


# Against optax, on whole arrays


def layers_apart(tree: Tree) -> dict[str, list[np.ndarray]]:
    """By name the weights of all layers, matrices with two dims."""
    apart = {}
    for name, leaf in named_leaves(tree, None):
        spec = specs()[name]
        shape = spec.shape[1:] if spec.stacked else spec.shape
        if spec.is_matrix:
            shape = (shape[0], -1) if spec.axes[-1] != "embed" else (-1, shape[-1])
        apart[name] = [layer.reshape(shape) for layer in (leaf if spec.stacked else [leaf])]
    return apart


def of_optax(optimizer: Optimizer, name: str) -> optax.GradientTransformation:
    """What optax has for the parameter of that name."""
    decay = optimizer.weight_decay if specs()[name].is_matrix else 0.0
    match optimizer:
        case AdamW(b1, b2, eps):
            return optax.adamw(RATE, b1, b2, eps, weight_decay=decay)
        case SGD(momentum, nesterov):
            return optax.chain(optax.add_decayed_weights(decay), optax.sgd(RATE, momentum, nesterov))
        case Lion(b1, b2):
            return optax.lion(RATE, b1, b2, weight_decay=decay)
        case Muon(beta) if is_hidden_matrix(specs()[name]):
            return optax.contrib.muon(RATE, beta=beta, weight_decay=decay, consistent_rms=optimizer.update_rms)
        case Muon():
            return of_optax(optimizer.adamw, name)
        case Adafactor():
            factored = optax.adafactor(min_dim_size_to_factor=1, momentum=optimizer.momentum)  # its sign is turned
            return optax.chain(factored, optax.add_decayed_weights(-decay), optax.scale(RATE))


@functools.cache
def wanted(name: str) -> dict[str, np.ndarray]:
    """The weights after the same updates by optax, every layer's a parameter of its own."""
    rules = {leaf: of_optax(OPTIMIZERS[name], leaf) for leaf in specs()}
    weights = layers_apart(drawn(0))
    state = {leaf: rules[leaf].init(weights[leaf]) for leaf in rules}

    @jax.jit
    def step(grads: Any, state: Any, weights: Any) -> Any:
        out = {leaf: rules[leaf].update(grads[leaf], state[leaf], weights[leaf]) for leaf in rules}
        moved = {leaf: optax.apply_updates(weights[leaf], out[leaf][0]) for leaf in rules}
        return moved, {leaf: out[leaf][1] for leaf in rules}

    for number in range(NUM_STEPS):
        weights, state = step(layers_apart(drawn(1 + number)), state, weights)
    return {leaf: np.stack(layers).reshape(specs()[leaf].shape) for leaf, layers in weights.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [*itertools.product(OPTIMIZERS, [ONE, ZERO0, ZERO3]), ("adafactor", GROUPS), ("muon", GROUPS)],
    ids=str,
)
def test_updates_on_any_mesh_are_those_of_optax_on_whole_arrays(name: str, layout: Layout) -> None:
    got, want, before = named(updates(OPTIMIZERS[name], layout)[-1].params), wanted(name), named(drawn(0))
    for leaf in want:
        error = np.linalg.norm(got[leaf] - want[leaf]) / np.linalg.norm(want[leaf] - before[leaf])
        assert error < 1e-5, (leaf, error)


@pytest.mark.slow  # ten whole training steps are compiled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_steps_on_a_mesh_are_those_of_one_device(name: str) -> None:
    def trained(layout: Layout) -> dict[str, np.ndarray]:
        p = program(OPTIMIZERS[name], layout, 0.9)
        p = dataclasses.replace(p, schedule=Constant(1e-3))
        state = p.init(0)
        for step in range(4):
            state, _ = p.train_step(state, jax.device_put(equivalence.hard_batch(p.model, step), p.batch_sharding))
        return named((state.params, state.ema))

    many, one = trained(ZERO3), trained(ONE)
    for leaf in one:
        assert np.linalg.norm(many[leaf] - one[leaf]) < 1e-5 * np.linalg.norm(one[leaf]), leaf


# What is held, and where


def abstract(optimizer: Optimizer, layout: Layout) -> dict[str, Any]:
    return dict(named_leaves(program(optimizer, layout).abstract_state, None))


@pytest.mark.parametrize("layout", [ZERO0, ZERO3], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_lies_where_the_plan_says_and_where_its_parameter_lies(name: str, layout: Layout) -> None:
    want, got = abstract(OPTIMIZERS[name], layout), dict(named_leaves(updates(OPTIMIZERS[name], layout)[-1], None))
    assert want.keys() == got.keys()
    for leaf, array in got.items():
        assert array.sharding.is_equivalent_to(want[leaf].sharding, array.ndim), leaf
        assert array.addressable_shards[0].data.nbytes == bytes_held(want[leaf])
        parameter = want.get("params/" + leaf.removeprefix("opt_state/").rpartition("/")[0])
        if parameter is not None and array.shape == parameter.shape:
            assert want[leaf].sharding == parameter.sharding


def held(optimizer: Optimizer, layout: Layout) -> int:
    """Bytes on each device of the optimizer's state."""
    found = abstract(optimizer, layout)
    return sum(bytes_held(leaf) for name, leaf in found.items() if name.startswith("opt_state/"))


def test_bytes_of_the_state_by_hand() -> None:
    sizes = {name: spec.size for name, spec in specs().items()}
    gains = sum(size for name, size in sizes.items() if "gain" in name)
    matrices, table = sum(sizes.values()) - gains, sizes["embedding"]
    for moments, number, eighth in (
        (AdamW(), 4 * 2, matrices),
        (AdamW(moments_dtype="bfloat16"), 2 * 2, matrices),
        (SGD(momentum=0.9), 4, matrices),
        (Lion(), 4, matrices),
    ):
        assert held(moments, ONE) == number * (matrices + gains)
        assert held(moments, ZERO0) == number * (matrices // 2 + gains)
        assert held(moments, ZERO3) == number * (eighth // 8 + gains // 4)
    assert held(SGD(), ONE) == 0
    assert held(Muon(), ONE) == 4 * (matrices + table + 2 * gains)
    assert held(Muon(), ZERO3) == 4 * ((matrices + table) // 8 + gains // 2)


def test_factored_state_keeps_the_placement_of_the_dims_it_has() -> None:
    """Of q [3, embed 32, heads 4, 16], embed split over data and heads over tensor; of out the same turned round."""
    found = abstract(Adafactor(), ZERO3)

    def lies(name: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        leaf = found[f"opt_state/{name}"]
        return leaf.shape, tuple(leaf.sharding.spec)

    assert lies("layers/attention/q/row") == ((3, 32), (None, "data"))
    assert lies("layers/attention/q/column") == ((3, 4, 16), (None, "tensor", None))
    assert lies("layers/attention/out/row") == ((3, 4, 16), (None, "tensor", None))
    assert lies("layers/attention/out/column") == ((3, 32), (None, "data"))
    assert lies("layers/mlp/norm/gain/nu") == ((3, 32), (None, "data"))
    assert lies("embedding/row") == ((96,), ("tensor",))
    assert lies("embedding/column") == ((32,), ("data",))
    assert held(Adafactor(), ONE) < held(AdamW(), ONE) / 20
    assert held(Adafactor(), ZERO3) < held(Adafactor(), ONE) / 2


def test_which_matrices_are_for_muon() -> None:
    """Layers' matrices, biases of [heads, head_dim] not among them; no table whose rows are looked up."""
    model = dataclasses.replace(MODELS["gpt2"], tied_embedding=False, activation="swiglu")
    chosen = {name for name, spec in named_leaves(model.param_specs()) if is_hidden_matrix(spec)}
    attention, mlp = (f"layers/attention/{name}" for name in ("q", "k", "v", "out")), ("up", "gate", "down")
    assert chosen == {*attention, *(f"layers/mlp/{name}" for name in mlp)}


def test_matrices_are_told_by_their_logical_axes() -> None:
    dims = {
        name: Leaf(placement, ()).matrix_dims
        for name, placement in named_leaves(program(AdamW(), ONE).plan.placements, is_placement)
        if placement.spec.is_matrix
    }
    assert dims["layers/attention/q"] == dims["layers/attention/k"] == ((1,), (2, 3))
    assert dims["layers/attention/out"] == ((1, 2), (3,))
    assert dims["layers/mlp/up"] == dims["layers/mlp/down"] == ((1,), (2,))
    assert dims["embedding"] == ((0,), (1,))


# What is sent


def sent(optimizer: Optimizer, layout: Layout) -> dict[str, list[int]]:
    """For each kind of collective in the compiled update the numbers that each one carries for a device."""
    found: dict[str, list[int]] = {}
    pattern = r"= (.*?) (all-[\w-]+|reduce-scatter|collective-[\w-]+|ragged-[\w-]+)\("
    for shapes, kind in re.findall(pattern, compiled(optimizer, layout).as_text()):
        sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"f32\[([\d,]*)\]", shapes)]
        found.setdefault(kind.removesuffix("-start"), []).append(sum(sizes))
    return found


@pytest.mark.parametrize("layout", [ZERO0, ZERO3], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_an_elementwise_update_sends_nothing(name: str, layout: Layout) -> None:
    assert sent(OPTIMIZERS[name], layout) == {}


def test_adafactor_sends_sums_of_rows_and_columns() -> None:
    """Each at most once on its way to a mean, with some scalars for each layer, and never the weight."""
    found = sent(OPTIMIZERS["adafactor"], ZERO3)
    assert found.keys() == {"all-reduce"}
    kept = abstract(Adafactor(), ZERO3).items()
    factored = [math.prod(x.sharding.shard_shape(x.shape)) for name, x in kept if name.endswith(("/row", "/column"))]
    assert sum(found["all-reduce"]) <= sum(factored) + 3 * 3 * len(specs())


def test_muon_moves_each_matrix_there_and_back_once() -> None:
    """Five iterations, and yet two all-to-alls a matrix and axis. Of 3 layers over data 4 a shard of zeros travels too.

    With n the size of a layer's matrix, data carries 4 n / 8 to each device, tensor 2 n / 2.
    """
    sizes = [spec.size // 3 for spec in specs().values() if is_hidden_matrix(spec)]
    found = sent(OPTIMIZERS["muon"], ZERO3)
    assert found.keys() == {"all-to-all"}
    assert sorted(found["all-to-all"]) == sorted(2 * [n // 2 for n in sizes] + 2 * sizes)
    found = sent(OPTIMIZERS["muon"], ZERO0)  # whole on every device of data, which share the layers
    assert sorted(found["all-to-all"]) == sorted(2 * sizes)
    assert sum(found["all-gather"]) == sum(4 * n // 2 for n in sizes)
    assert found.keys() == {"all-to-all", "all-gather"}


# Single pieces


def test_newton_schulz_keeps_the_singular_vectors_and_makes_the_values_nearly_one() -> None:
    rng = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(rng.normal(size=(2, 6, 9)), full_matrices=False)
    x = jnp.asarray(u * rng.uniform(0.1, 3, (2, 1, 6)) @ vt, jnp.float32)
    got = newton_schulz(x, 5)
    values = np.einsum("lik,lij,lkj->lk", u, got, vt)
    assert np.abs(got - u * values[:, None] @ vt).max() < 1e-4
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert np.asarray(newton_schulz(x.mT, 5)) == pytest.approx(np.asarray(got.mT), abs=1e-6)
    assert not newton_schulz(jnp.zeros((1, 3, 4)), 5).any()
    assert np.asarray(newton_schulz(1e-9 * x, 5)) == pytest.approx(np.asarray(got), abs=1e-4)


def test_adafactor_of_a_matrix_by_hand() -> None:
    """After two updates of one matrix of rank one, whose factored squares are its squares."""
    grad = np.outer([1.0, 2.0], [3.0, 1.0, 2.0]).astype(np.float32)
    weight = np.full_like(grad, 0.5)
    spec = ParamSpec((2, 3), ("embed", "mlp"), lambda key, shape: jnp.zeros(shape))
    leaf = Leaf(place(spec, dict.fromkeys(AXES, 1), ZeroConfig(0)), ())
    slots = {"row": jnp.zeros(2), "column": jnp.zeros(3)}
    rule = Adafactor(clip_threshold=0.5)
    out, slots = rule.direction(leaf, jnp.asarray(grad), slots, jnp.asarray(weight), jnp.int32(0))
    assert np.asarray(slots["row"]) == pytest.approx((grad**2).mean(1))
    assert np.asarray(out) == pytest.approx(np.full((2, 3), 0.5 * 0.5), rel=1e-6)  # clipped from 1, times rms(weight)
    out, slots = rule.direction(leaf, jnp.asarray(2 * grad), slots, jnp.asarray(weight), jnp.int32(1))
    keep = 1 - 2**-0.8
    assert np.asarray(slots["column"]) == pytest.approx((keep + (1 - keep) * 4) * (grad**2).mean(0), rel=1e-6)


def test_bf16_moments_are_the_fp32_ones_rounded_once_a_step() -> None:
    optimizer, ema = AdamW(b1=0.8, b2=0.9, moments_dtype="bfloat16"), 0.6
    weights, mu, nu = (named(tree) for tree in (drawn(0), zeros_like(drawn(0)), zeros_like(drawn(0))))
    average = dict(weights)
    for step, state in enumerate(updates(optimizer, ZERO3, ema)):
        for leaf, grad in named(drawn(1 + step)).items():
            mu[leaf] = np.float32(0.8) * mu[leaf] + np.float32(0.2) * grad
            nu[leaf] = np.float32(0.9) * nu[leaf] + np.float32(0.1) * grad**2
            out = mu[leaf] / (1 - 0.8 ** (step + 1)) / (np.sqrt(nu[leaf] / (1 - 0.9 ** (step + 1))) + 1e-8)
            decay = optimizer.weight_decay if specs()[leaf].is_matrix else 0.0
            weights[leaf] = weights[leaf] - RATE * (out + decay * weights[leaf])
            kept = min(ema, (step + 1) / (step + 10))
            average[leaf] = kept * average[leaf] + (1 - kept) * weights[leaf]
            mu[leaf], nu[leaf] = (np.asarray(x, jnp.bfloat16).astype(np.float32) for x in (mu[leaf], nu[leaf]))
        assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.bfloat16, state.opt_state))
    for leaf, want in weights.items():
        assert named(state.params)[leaf] == pytest.approx(want, rel=1e-3, abs=1e-6)
        assert named(state.ema)[leaf] == pytest.approx(average[leaf], rel=1e-3, abs=1e-6)
    assert state.evaluated is state.ema
    assert state.replace(ema=None).evaluated is state.params


def test_an_evaluation_says_whose_weights_it_is_of() -> None:
    data: Any = SimpleNamespace(baselines=lambda: {"byte_bigram_bits_per_byte": 3.0, "gzip_bits_per_byte": 2.0})
    assert "after 5 steps, of averaged weights, on" in in_words(5, Validation(1.0, 1, 1, 1, 1, averaged=True), data)
    assert "after 5 steps, on" in in_words(5, Validation(1.0, 1, 1, 1, 1), data)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(np.zeros_like, tree)


# Schedules


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        (Constant(2.0), {0: 2, 99: 2, 10**6: 2}),
        (Constant(2.0, warmup_steps=4), {0: 0.5, 1: 1, 3: 2, 4: 2, 10**6: 2}),
        (Linear(2.0, warmup_steps=20), {0: 0.1, 19: 2, 20: 2, 60: 1, 80: 0.5, 100: 0, 101: 0}),
        (Linear(2.0, decay_steps=50, final_fraction=0.5), {0: 2, 25: 1.5, 50: 1, 100: 1}),
        (Cosine(2.0, warmup_steps=20), {19: 2, 20: 2, 60: 1.1, 100: 0.2, 10**6: 0.2}),
        (Cosine(2.0, decay_steps=50, final_fraction=0.0), {0: 2, 25: 1, 50: 0, 100: 0}),
        (InverseSqrt(2.0, warmup_steps=10, timescale=10), {0: 0.2, 9: 2, 10: 2, 40: 1, 90: 2 / 3, 1000: 0.2}),
        (InverseSqrt(2.0, timescale=100), {0: 2, 300: 1}),
        (WSD(2.0, warmup_steps=10), {0: 0.2, 10: 2, 80: 2, 90: 1, 95: 0.5, 100: 0, 101: 0}),
        (WSD(2.0, decay_fraction=0.5, final_fraction=0.5), {0: 2, 50: 2, 75: 1.5, 100: 1}),
        (WSD(2.0, decay_fraction=0.0), {0: 2, 100: 2}),
    ],
    ids=str,
)
def test_schedules_at_their_corners(schedule: Any, at: dict[int, float]) -> None:
    rate = learning_rate(schedule, 100)
    assert {step: float(rate(step)) for step in at} == pytest.approx(at, rel=1e-6, abs=1e-7)


# Configs


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["optimizer.type=muon", "optimizer.num_iterations=0"], "optimizer.num_iterations = 0: must be at least 1"),
        (["optimizer.type=adafactor", "optimizer.clip_threshold=0"], "optimizer.clip_threshold = 0.0: must be above 0"),
        (["train.ema_decay=1"], "train.ema_decay = 1.0: must be at least 0 and below 1"),
        (["schedule.type=wsd", "schedule.decay_fraction=1.1"], "schedule.decay_fraction = 1.1: must be from 0 to 1"),
        (
            ["schedule.type=wsd", "schedule.warmup_steps=801"],
            "schedule.warmup_steps = 801 > train.num_steps x (1 - schedule.decay_fraction) = 1000 x (1 - 0.2) = 800",
        ),
        (["schedule.type=constant", "schedule.warmup_steps=1001"], "schedule.warmup_steps = 1001 > train.num_steps"),
        (
            ["optimizer.b2=0.999", "optimizer.moments_dtype=bfloat16"],
            "optimizer.b2 = 0.999 with optimizer.moments_dtype = bfloat16: 1 - 0.999 = 0.001 is below 2^-8",
        ),
    ],
)
def test_what_is_refused(overrides: list[str], problem: str) -> None:
    asked = from_dict({}, [f"--config.{override}" for override in overrides])
    with pytest.raises(ConfigError) as error:
        check(asked, 8)
    (found,) = error.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.momentum=0.9", "an option of sgd and adafactor and muon, but config.optimizer.type is adamw"),
        ("schedule.timescale=5", "an option of inversesqrt, but config.schedule.type is cosine"),
        ("optimizer.type=adamx", "wanted one of adamw, sgd, lion, adafactor, muon"),
        ("optimizer.moments_dtype=float16", "wanted one of float32, bfloat16"),
    ],
)
def test_an_option_belongs_to_its_type(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_dict({}, [f"--config.{override}"])


def test_bf16_averages_within_what_is_allowed_do_fall() -> None:
    for keep in (0.9, 0.99, 0.996):
        grid = jnp.linspace(1, 2, 500).astype(jnp.bfloat16)
        assert ((keep * grid.astype(jnp.float32)).astype(jnp.bfloat16) < grid).all(), keep
    assert ((0.999 * grid.astype(jnp.float32)).astype(jnp.bfloat16) == grid).any()


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["optimizer.type=muon", "optimizer.momentum=0"], "optimizer.nesterov changes nothing"),
        (["optimizer.type=adafactor", "optimizer.moments_dtype=bfloat16"], "moments_dtype = bfloat16 changes nothing"),
        (
            ["optimizer.type=adafactor", "optimizer.relative=false", "optimizer.min_scale=1"],
            "optimizer.min_scale changes nothing: optimizer.relative is false",
        ),
    ],
)
def test_what_changes_nothing_is_said(overrides: list[str], warning: str) -> None:
    asked = from_dict({}, [f"--config.{override}" for override in overrides])
    (found,) = warnings_of(asked, 8)
    assert warning in found


def test_the_default_schedule_is_a_cosine_and_a_type_chooses_another() -> None:
    assert from_dict({"schedule": {"learning_rate": 1.0}}).schedule == Cosine(1.0)
    assert from_dict({}, ["--config.schedule.type=wsd"]).schedule == WSD()
