"""One device's loss and gradients against a naive decoder in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from sharded_train import equivalence
from sharded_train.equivalence import MODELS, TOLERANCE, Layout, Measurement, hard_batch
from sharded_train.models.decoder import DecoderConfig, RopeScaling
from sharded_train.params import Tree, named_leaves
from sharded_train.step import Program
from tests import oracle

# With what no model of `MODELS` has; two layers, since the oracle unrolls them and compiles each.
SCALING = RopeScaling(factor=4.0, original_context=32)
LLAMA = dataclasses.replace(MODELS["llama"], num_layers=2)
GQA = dataclasses.replace(MODELS["llama_gqa"], num_layers=2, bias=True, rope_theta=30.0, rope_scaling=SCALING)
GPT2 = dataclasses.replace(MODELS["gpt2"], num_layers=2, attention_windows=(5, 0), norm_eps=1e-3, dropout=0.0)


def measure(p: Program, weights: Tree) -> Measurement:
    loss, grads, norm = jax.jit(p.loss_and_grads)(weights, hard_batch(p.model), jax.random.key(0))
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(grads, None)}
    return Measurement(float(loss.nll / loss.num_tokens), float(norm), leaves)


@pytest.mark.parametrize(
    ("model", "terms"),
    [
        pytest.param(LLAMA, {"label_smoothing": 0.2, "z_loss": 0.05}, id="llama"),
        pytest.param(GQA, {}, id="llama_gqa"),
        pytest.param(GPT2, {}, id="gpt2"),
    ],
)
def test_one_device_equals_the_oracle(model: DecoderConfig, terms: dict[str, Any]) -> None:
    p = equivalence.program(model, Layout(), **terms)
    weights = jax.tree.map(np.asarray, equivalence.weights(p))
    errors = equivalence.errors(measure(p, weights), oracle.measure(model, weights, hard_batch(model), **terms))
    assert len(errors) == len(jax.tree.leaves(weights)) + 2
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}
