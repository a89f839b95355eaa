"""CASES 28 in the whole train step: what a token's loss depends on, and documents that share a row.

Every token of a row is another one, so that the gradient of its row of the embedding is that of its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from sharded_train import equivalence
from sharded_train.equivalence import ROWS, SEQ, SMALL, Layout, Measurement, placed, weights
from sharded_train.params import named_leaves
from sharded_train.step import Batch

SPLIT = {
    "one device": Layout(),
    **{strategy: Layout(sequence=4, strategy=strategy) for strategy in ("ring", "all_gather", "ulysses")},  # type: ignore[arg-type]
    "pipeline and tensor": Layout(sequence=2, pipeline=2, tensor=2, num_microbatches=2, strategy="ring"),
}
LAYERS, WINDOW = 2, 3
WAYS = [*((way, 0) for way in SPLIT), ("ring", WINDOW), ("ulysses", WINDOW), ("one device", WINDOW)]
FIRST = 9  # tokens of the first document, which ends within a chunk of the sequence axis


@functools.cache
def measure(way: str, window: int) -> Callable[[Batch], Measurement]:
    """One step's loss and gradients, compiled once."""
    model = dataclasses.replace(SMALL, num_layers=LAYERS, num_kv_heads=2, attention_windows=(window,))
    p = equivalence.program(model, SPLIT[way])
    step, shards = jax.jit(p.loss_and_grads), weights(p)

    def run(batch: Batch) -> Measurement:
        loss, grads, norm = step(shards, placed(p, batch), jax.random.key(0))
        leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(p.of_model(grads), None)}
        return Measurement(float(loss.nll / loss.num_tokens), float(norm), leaves)

    return run


def batch(rows: list[list[np.ndarray]]) -> Batch:
    """Rows of documents, each predicting its own next tokens and none beyond; the rest is padding."""
    shape = (ROWS, SEQ)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    targets = np.full(shape, -1, np.int32)
    for r, documents in enumerate(rows):
        at = 0
        for number, document in enumerate(documents, 1):
            end = at + len(document)
            tokens[r, at:end], segments[r, at:end] = document, number
            positions[r, at:end] = np.arange(len(document))
            targets[r, at : end - 1] = document[1:]
            at = end
    return Batch(tokens, targets, segments, positions)


@pytest.mark.parametrize(("way", "window"), WAYS)
def test_a_token_s_loss_depends_on_what_it_may_see(way: str, window: int) -> None:
    """Exactly zero by later tokens, by other documents, and by what is out of sight of the window in every layer."""
    row = np.arange(1, SEQ + 1)
    whole = batch([[row[:FIRST], row[FIRST:]]])
    reach = LAYERS * (window - 1) if window else SEQ
    for token in (0, 4, FIRST - 1, FIRST, SEQ - 1):
        targets = np.full_like(whole.targets, -1)
        targets[0, token] = 50
        pull = measure(way, window)(whole.replace(targets=targets)).grads["embedding"][row]
        behind, same = token - np.arange(SEQ), (np.arange(SEQ) < FIRST) == (token < FIRST)
        assert (np.abs(pull).max(1) > 0).tolist() == ((behind >= 0) & (behind <= reach) & same).tolist()


@pytest.mark.parametrize(("way", "window"), WAYS)
def test_two_documents_in_a_row_are_two_rows(way: str, window: int) -> None:
    rng = np.random.default_rng(0)
    documents: list[Any] = [rng.integers(1, SMALL.vocab_size, n) for n in (FIRST, SEQ - FIRST, 4, 5, 1, 2)]
    together = batch([documents[:2], documents[2:]])
    apart = batch([[document] for document in documents])
    errors = equivalence.errors(measure(way, window)(together), measure("one device", window)(apart))
    assert max(errors.values()) <= equivalence.TOLERANCE, errors
