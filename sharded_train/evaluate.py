"""Validation: what a model makes of the text that it was not trained on."""

from __future__ import annotations

import dataclasses
import json as jsons
import math
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from sharded_train import assemble
from sharded_train.data.loader import num_train_steps, validation_batches
from sharded_train.data.prepare import TextData
from sharded_train.errors import ConfigError
from sharded_train.params import Tree
from sharded_train.recipe import Recipe
from sharded_train.step import Batch, Program


@dataclasses.dataclass(frozen=True)
class Validation:
    """Sums over the validation text, or over the first of its batches."""

    nll: float  # nats
    num_tokens: int  # predicted, ends of documents included
    num_bytes: int  # of text that they stand for
    num_batches: int
    of_batches: int
    averaged: bool = False  # whether it is that of averaged weights (train.ema_decay)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        """What the model would compress the text to: comparable between tokenizers, and with gzip."""
        return self.nll / math.log(2) / self.num_bytes

    @property
    def scope(self) -> str:
        part = "all" if self.num_batches == self.of_batches else f"{self.num_batches} of"
        return f"{part} {self.of_batches} batches"


def validate(program: Program, weights: Tree, data: TextData, recipe: Recipe) -> Validation:
    """The model on the validation text, on `evaluate.num_batches` of it."""
    batch_shape = (recipe.train.global_batch_size, recipe.train.sequence_length)
    token_bytes = jax.device_put(data.tokenizer.token_bytes, NamedSharding(program.mesh, PartitionSpec()))
    nll, num_tokens, num_bytes, num_batches = 0.0, 0, 0, 0
    with validation_batches(
        data.validation,
        batch_shape=batch_shape,
        sharding=program.batch_sharding,
        num_threads=recipe.data.read_threads,
        num_batches=recipe.evaluate.num_batches,
        token_order=program.token_order,
        max_documents=program.attending.max_documents,
    ) as batches:
        for batch in batches:
            loss, bytes_ = jax.device_get(program.eval_step(weights, Batch(**batch), token_bytes))
            nll += float(loss.nll)
            num_tokens += int(loss.num_tokens)
            num_bytes += int(bytes_)
            num_batches += 1
    of_batches = num_train_steps(len(data.validation), batch_shape[0], 1)
    averaged = program.train.ema_decay is not None
    return Validation(nll, num_tokens, num_bytes, num_batches, of_batches, averaged)


def evaluate(recipe: Recipe, workdir: Path, *, json: bool = False) -> int:
    """Prints validation loss and bits per byte of the latest checkpoint, beside two baselines. The exit code."""
    program = assemble.program_of(recipe)
    checkpointer = assemble.checkpointer_of(recipe, workdir)
    step = checkpointer.latest_step()
    if step is None:
        raise ConfigError(f"{workdir} has no checkpoint to evaluate yet")
    progress = Console(stderr=True, highlight=False, quiet=jax.process_index() != 0)
    data = assemble.text_of(recipe, workdir, lambda text: progress.print(text, markup=False, style="dim"))
    state, _ = assemble.restore(program, checkpointer, step, data)
    found = validate(program, state.evaluated, data, recipe)
    if jax.process_index() == 0:
        facts = {
            "step": step,
            "validation_loss": found.loss,
            "validation_bits_per_byte": found.bits_per_byte,
            **data.baselines(),
            "num_tokens": found.num_tokens,
            "num_bytes": found.num_bytes,
            "num_batches": found.num_batches,
            "of_batches": found.of_batches,
            "averaged_weights": found.averaged,
        }
        print(jsons.dumps(facts, indent=2) if json else in_words(step, found, data))
    return 0


def in_words(step: int, found: Validation, data: TextData) -> str:
    """Bits per byte beside those of the baselines."""
    baselines, averaged = data.baselines(), ", of averaged weights" if found.averaged else ""
    return (
        f"validation after {step} steps{averaged}, on {found.scope}: loss {found.loss:.4f}, "
        f"{found.bits_per_byte:.3f} bits per byte (byte bigram {baselines['byte_bigram_bits_per_byte']:.3f}, "
        f"gzip -9 {baselines['gzip_bits_per_byte']:.3f})"
    )
