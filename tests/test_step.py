"""The step: means over the global batch, accumulation, clipping, decay, and what its compiled program does."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharded_train import equivalence
from sharded_train.equivalence import MODELS, ROWS, SEQ, SMALL, Layout, hard_batch
from sharded_train.models.decoder import DecoderConfig
from sharded_train.optimizer import AdamW, Cosine, learning_rate
from sharded_train.params import Tree, named_leaves
from sharded_train.step import Batch, Program, TrainState


def program(
    model: DecoderConfig,
    layout: Layout,
    *,
    rows: int = ROWS,
    seq: int = SEQ,
    recipe: Literal["fp32", "bf16"] = "fp32",
    **train: Any,
) -> Program:
    """As `equivalence.program`, with SGD of rate 1, for batches of any size."""
    p = equivalence.program(model, layout, recipe=recipe)
    steps = dataclasses.replace(p.train, global_batch_size=rows, sequence_length=seq, **train)
    return dataclasses.replace(p, train=steps)


def state_of(p: Program, weights: Tree) -> TrainState:
    """The state before the first step, with the given weights."""
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), p.abstract_state).replace(params=weights)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, p.abstract_state)  # type: ignore[no-any-return]


def on_device(p: Program, batch: Batch) -> Batch:
    return jax.device_put(batch, p.batch_sharding)  # type: ignore[no-any-return]


def named(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree, None)}


def norm_of(leaves: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float((leaf.astype(np.float64) ** 2).sum()) for leaf in leaves.values()))


# A model of which everything is known: two tokens, layers that add nothing, and after token i a loss of LOSSES[i] nats
# where token 0 is to be predicted.

LOSSES = (2.0, 10.0)
KNOWN = DecoderConfig(vocab_size=2, d_model=4, num_layers=1, num_heads=2, d_ff=4, norm_eps=1e-12)


def known_state(p: Program) -> TrainState:
    weights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), p.abstract_state.params)
    weights["embedding"][...] = np.eye(2, 4)  # 2 when normalised
    weights["final_norm"]["gain"][...] = 1
    weights["head"][1, :2] = [math.log(math.exp(nats) - 1) / 2 for nats in LOSSES]
    return state_of(p, weights)


def known_gradient(*counts: int) -> np.ndarray:
    """The mean loss's by the head, where after token i a token 0 is to be predicted `counts[i]` times."""
    pull = [2 * count / sum(counts) * (1 - math.exp(-nats)) for count, nats in zip(counts, LOSSES, strict=True)]
    return np.array([[-pull[0], -pull[1], 0, 0], [pull[0], pull[1], 0, 0]])


def known_batch(rows: list[tuple[int, int]], seq: int) -> Batch:
    """A row for each pair (token, number of targets), the targets 0 at its end."""
    tokens = np.array([[token] * seq for token, _ in rows], np.int32)
    targets = np.array([[-1] * (seq - count) + [0] * count for _, count in rows], np.int32)
    return Batch(tokens, targets, np.ones_like(tokens), np.tile(np.arange(seq, dtype=np.int32), (len(rows), 1)))


# Means


def test_the_loss_is_the_mean_over_the_tokens_of_the_global_batch() -> None:
    """CASES 1: sums and counts (2, 1) and (90, 9) on two ranks are 9.2, not 6.0.

    The second microbatch is without a target on all ranks, and two of the four ranks are in both.
    """
    p = program(KNOWN, Layout(data=4, tensor=2, zero=2, num_microbatches=2), seq=10)
    batch = on_device(p, known_batch([(0, 1), (1, 0), (1, 9), *[(0, 0)] * 5], 10))
    got, grads, _ = jax.jit(p.loss_and_grads)(known_state(p).params, batch, jax.random.key(0))
    assert float(got.nll / got.num_tokens) == pytest.approx(9.2, rel=1e-6)
    assert int(got.num_tokens) == 10
    assert np.asarray(grads["head"]) == pytest.approx(known_gradient(1, 9), rel=1e-5, abs=1e-7)


def test_hundreds_of_bf16_microbatches_are_summed_in_fp32() -> None:
    """CASES 2: in bf16 a sum of equal parts stops growing after 256 of them."""
    p = program(KNOWN, Layout(data=2, zero=1, num_microbatches=512), rows=1024, seq=1, recipe="bf16")
    batch = on_device(p, known_batch([(0, 1)] * 1024, 1))
    got, grads, _ = jax.jit(p.loss_and_grads)(known_state(p).params, batch, jax.random.key(0))
    assert float(got.nll / got.num_tokens) == pytest.approx(2, rel=4e-3)
    assert np.asarray(grads["head"]) == pytest.approx(known_gradient(1, 0), rel=8e-3)


def test_the_norm_is_that_of_the_whole_gradient() -> None:
    """CASES 6: tied embeddings, and leaves that are whole over data, over tensor or both, each counted once."""
    model = dataclasses.replace(SMALL, vocab_size=5, d_model=6, num_kv_heads=1, head_dim=4, tied_embedding=True)
    p = program(model, Layout(data=4, tensor=2, zero=3))
    axes = {tuple(axis for axis in ("data", "tensor") if axis in str(spec)) for spec in jax.tree.leaves(p.plan.stored)}
    assert axes == {("data", "tensor"), ("data",), ()}
    got = equivalence.measure(p)
    assert all(leaf.any() for leaf in got.grads.values())
    assert got.grad_norm == pytest.approx(norm_of(got.grads), rel=1e-6)


def test_clipping_shortens_the_whole_gradient_to_its_limit() -> None:
    rate, limit = 0.5, 1.5
    p = program(KNOWN, Layout(data=2, tensor=2, zero=1), rows=2, seq=16, clip_norm=limit)
    p = dataclasses.replace(p, schedule=Cosine(rate, final_fraction=1.0))
    before = named(known_state(p).params)

    def steps(batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
        state, metrics = p.train_step(known_state(p), on_device(p, batch))
        return float(metrics["grad_norm"]), {name: before[name] - w for name, w in named(state.params).items()}

    norm, moved = steps(known_batch([(0, 4), (0, 1)], 16))
    assert norm > 1.2 * limit
    assert norm_of(moved) == pytest.approx(rate * limit, rel=1e-5)
    assert moved["head"] == pytest.approx(rate * limit / norm * known_gradient(1, 0), rel=1e-5, abs=1e-6)
    batch = known_batch([(0, 1), (1, 15)], 16)
    batch.targets[1, 1:] = 1  # after token 1 almost certain, so that one target in sixteen pulls
    norm, moved = steps(batch)
    assert 0.1 < norm < 0.5 * limit
    assert norm_of(moved) == pytest.approx(rate * norm, rel=1e-5)


# Dropout and evaluation


@functools.cache
def dropping() -> Program:
    model = dataclasses.replace(KNOWN, dropout=0.5)
    p = program(model, Layout(data=2), rows=4, seq=10, label_smoothing=0.1, z_loss=0.1)
    return dataclasses.replace(p, schedule=Cosine(0.0))


def test_every_step_drops_something_else_and_the_same_when_repeated() -> None:
    p = dropping()
    batch = on_device(p, known_batch([(0, 10), (1, 10), (0, 10), (1, 10)], 10))
    state, first = p.train_step(known_state(p), batch)
    state, second = p.train_step(state, batch)
    _, again = p.train_step(known_state(p), batch)
    assert int(state.step) == 2
    assert (np.asarray(state.params["head"]) == np.asarray(known_state(p).params["head"])).all()  # the rate is 0
    assert float(first["loss"]) == float(again["loss"]) != float(second["loss"])


def test_evaluation_sums_the_plain_loss_and_drops_nothing() -> None:
    p = dropping()
    batch = on_device(p, known_batch([(0, 1), (1, 0), (1, 9), (0, 0)], 10))
    got, num_bytes = p.eval_step(known_state(p).params, batch, jnp.array([7, 1]))
    assert float(got.nll) == pytest.approx(92, rel=1e-6)
    assert int(got.num_tokens) == 10
    assert int(num_bytes) == 70


@pytest.mark.parametrize("zero", [1, 3])
def test_evaluation_works_on_microbatches_as_training_does(zero: Any) -> None:
    """What a run can train on it can evaluate on: no more rows at once than in a microbatch, and the same loss."""
    batch, lengths = hard_batch(SMALL), jnp.ones(SMALL.vocab_size, jnp.int32)
    losses = []
    for num in (1, 4):
        p = program(SMALL, Layout(data=2, zero=zero, num_microbatches=num))
        traced = jax.make_jaxpr(p.eval_step)(p.abstract_state.params, p.abstract_batch, lengths)
        assert (f"f32[{ROWS // 2},{SEQ},{SMALL.d_model}]" in str(traced)) == (num == 1)
        loss, _ = p.eval_step(equivalence.weights(p), on_device(p, batch), lengths)
        losses.append(float(loss.nll / loss.num_tokens))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


# Causality of the whole model


def test_no_token_learns_from_a_later_one_or_another_document() -> None:
    """Of the loss at one place, the gradient by each token's embedding; every row has a vocabulary of its own."""
    p = program(dataclasses.replace(SMALL, vocab_size=ROWS * SEQ), Layout(data=2, tensor=2))
    tokens = np.arange(ROWS * SEQ, dtype=np.int32).reshape(ROWS, SEQ)
    segments = np.tile(np.repeat(np.array([1, 2, 0], np.int32), (6, 7, 3)), (ROWS, 1))
    positions = np.tile(np.concatenate([np.arange(n, dtype=np.int32) for n in (6, 7, 3)]), (ROWS, 1))
    places = np.array([0, 3, 5, 6, 7, 9, 11, 12])
    targets = np.full_like(tokens, -1)
    targets[np.arange(ROWS), places] = tokens[:, 0]
    batch = on_device(p, Batch(tokens, targets, segments, positions))
    _, grads, _ = jax.jit(p.loss_and_grads)(equivalence.weights(p), batch, jax.random.key(0))
    touched = np.asarray(grads["embedding"]).any(1).reshape(ROWS, SEQ)
    for row, place in enumerate(places):
        assert np.flatnonzero(touched[row]).tolist() == list(range(0 if place < 6 else 6, place + 1))


# AdamW, on a mesh and on one device

MESH = Layout(data=4, tensor=2, zero=3, num_microbatches=2)
SCHEDULE = Cosine(3e-3, warmup_steps=5)


@functools.cache
def adamw(layout: Layout) -> Program:
    p = program(MODELS["llama_gqa"], layout, num_steps=20)
    return dataclasses.replace(p, optimizer=AdamW(weight_decay=0.2), schedule=SCHEDULE)


@functools.cache
def twenty_steps(layout: Layout) -> list[dict[str, float]]:
    p = adamw(layout)
    state, history = state_of(p, equivalence.weights(p)), []
    for step in range(20):
        assert int(state.step) == step
        before = jax.tree.leaves(state)
        state, metrics = p.train_step(state, on_device(p, hard_batch(p.model, step)))
        history.append({name: float(value) for name, value in metrics.items()})
        assert all(leaf.is_deleted() for leaf in before)
    return history


@functools.cache
def compiled_step() -> Any:
    p = adamw(MESH)
    return p.train_step.lower(p.abstract_state, p.abstract_batch).compile()  # type: ignore[attr-defined]


def test_twenty_steps_are_those_of_one_device() -> None:
    """Compiles both programs, which the tests below look at again: about ten seconds on a busy machine."""
    many, one = ({name: [m[name] for m in twenty_steps(at)] for name in METRICS} for at in (MESH, Layout()))
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert many["num_tokens"] == one["num_tokens"]
    rate = learning_rate(SCHEDULE, 20)
    assert many["learning_rate"] == pytest.approx([float(rate(step)) for step in range(20)], rel=1e-6)


METRICS = ("loss", "grad_norm", "num_tokens", "learning_rate")


def test_the_step_is_compiled_once() -> None:
    twenty_steps(MESH)
    assert adamw(MESH).train_step._cache_size() == 1  # type: ignore[attr-defined]


def test_the_compiled_step_works_in_the_buffers_of_its_state() -> None:
    """CASES 14: ZeRO must not copy its state every step."""
    leaves = jax.tree.leaves(adamw(MESH).abstract_state)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    memory = compiled_step().memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert memory.output_size_in_bytes - held < 1024  # the metrics, and a table of pointers


def test_the_compiled_step_has_no_all_to_all() -> None:
    """CASES 14: rows become microbatches where they lie."""
    found = set(re.findall(r" (all-[\w-]+?|reduce-scatter|collective-[\w-]+?)(?:-start)?\(", compiled_step().as_text()))
    assert found == {"all-gather", "reduce-scatter", "all-reduce"}


def test_a_batch_without_targets_only_decays_matrices() -> None:
    """CASES 9: gains do not decay. CASES 1: no target gives zeros, not NaN."""
    p = adamw(MESH)
    batch = hard_batch(p.model)
    batch = on_device(p, batch.replace(targets=np.full_like(batch.targets, -1)))
    weights = equivalence.weights(p)
    before = named(weights)
    state, metrics = p.train_step(state_of(p, weights), batch)
    assert [float(metrics[name]) for name in ("loss", "grad_norm", "num_tokens")] == [0, 0, 0]
    kept = 1 - 0.2 * float(metrics["learning_rate"])
    assert kept < 0.9999
    for name, leaf in named(state.params).items():
        if name.endswith("gain"):
            assert (leaf == before[name]).all()
        else:
            assert leaf == pytest.approx(before[name] * kept, rel=1e-6)
    assert not any(leaf.any() for name, leaf in named(state.opt_state).items() if "count" not in name)


def test_matrices_are_told_by_their_logical_axes() -> None:
    """Stacked gains [layers, embed] and biases [layers, heads, head_dim] are none, whatever their number of dims."""
    specs = [spec for name in ("llama", "gpt2") for spec in named_leaves(MODELS[name].param_specs())]
    assert {name for name, spec in specs if spec.is_matrix} == {
        *("embedding", "head", "positions"),
        *(f"layers/attention/{name}" for name in ("q", "k", "v", "out")),
        *(f"layers/mlp/{name}" for name in ("up", "gate", "down")),
    }


def test_the_schedule_at_its_corners() -> None:
    rate = learning_rate(Cosine(2.0, warmup_steps=10, final_fraction=0.1), 110)
    at = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 35: 0.2 + 1.8 * (1 + 0.5**0.5) / 2, 60: 1.1, 110: 0.2, 10**6: 0.2}
    assert {step: float(rate(step)) for step in at} == pytest.approx(at, rel=1e-6)
    every = np.asarray(rate(np.arange(111)))
    assert (np.diff(every[:10]) > 0).all()
    assert (np.diff(every[10:]) < 0).all()
    shorter = learning_rate(Cosine(2.0, decay_steps=50, final_fraction=0.0), 110)
    assert [float(shorter(step)) for step in (0, 25, 50, 110)] == pytest.approx([2.0, 1.0, 0.0, 0.0], abs=1e-6)
