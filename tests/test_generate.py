"""The cache changes nothing, and samples are the same on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_train import equivalence
from sharded_train.collectives import TensorParallel
from sharded_train.equivalence import MODELS, Layout, program
from sharded_train.generate import Sampling, sample_tokens
from sharded_train.models.block import block_of
from sharded_train.models.stack import Source, run
from sharded_train.ops.linear import similarity
from sharded_train.step import Program

PROMPT = [3, 1, 4, 1, 5]


def strong_weights(p: Program) -> dict:
    """Weights whose layers outweigh the residual stream: with weak ones a tied model repeats its last token."""
    weights = equivalence.weights(p)
    return {**weights, "layers": jax.tree.map(lambda w: 12 * w, weights["layers"])}


def next_logits(model: str, tokens: np.ndarray) -> np.ndarray:
    """Logits after each of `tokens [batch, seq]` by the training pass on one device."""
    p = program(MODELS[model], Layout())
    weights = strong_weights(p)

    def forward(weights: dict, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        tp = TensorParallel()
        ctx = p.model.context(positions, jnp.ones_like(tokens), positions, None, tp)
        x = p.model.embed(weights, tokens, positions, ctx, tp)
        block = block_of(p.model.branches(p.attending.attend, tp))
        x = run(block, Source(weights["layers"]), x, ctx)
        x = p.model.final(x, weights, tp)
        rows = similarity(x.reshape(-1, x.shape[-1]), p.model.head(weights))
        return rows.reshape(*tokens.shape, -1)

    logits = jax.shard_map(forward, mesh=p.mesh, in_specs=(p.plan.stored, P()), out_specs=P())
    return np.asarray(jax.jit(logits)(weights, tokens))


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_the_whole_pass(model: str) -> None:
    p = program(MODELS[model], Layout())
    sampling = Sampling(max_tokens=8, temperature=0)
    tokens = sample_tokens(p, strong_weights(p), PROMPT, sampling, 1, limit=p.model.vocab_size)
    whole = np.array([PROMPT + tokens[0].tolist()], np.int32)
    expected = next_logits(model, whole)[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens[0].tolist() == expected.tolist()
    assert len(set(tokens[0].tolist())) > 2  # else the cache could have been ignored


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(data=4, tensor=2, zero=3)),
        ("llama_gqa", Layout(data=2, tensor=4, zero=1)),
        ("gpt2", Layout(tensor=2)),
    ],
    ids=str,
)
def test_samples_are_the_same_on_every_mesh(model: str, layout: Layout) -> None:
    def sample(layout: Layout) -> list:
        p = program(MODELS[model], layout)
        sampling = Sampling(max_tokens=6, temperature=0.7, top_k=20, seed=1)
        return sample_tokens(p, equivalence.weights(p), PROMPT, sampling, 3, limit=60).tolist()

    samples = sample(layout)
    assert samples == sample(Layout())
    assert len({tuple(s) for s in samples}) == 3
    assert max(map(max, samples)) < 60


def test_collectives_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a step: XLA's CPU back end gives them none."""

    def refused(fn: Any) -> Any:
        raise AssertionError("in order")

    monkeypatch.setattr("sharded_train.step.in_order", refused)
    p = program(MODELS["llama"], Layout(tensor=2))
    weights = equivalence.weights(p)
    with pytest.raises(AssertionError, match="in order"):
        sample_tokens(p, weights, PROMPT, Sampling(max_tokens=2), 1, limit=60)
