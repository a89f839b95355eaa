"""Text from a trained model, sampled on the mesh of its run."""

from __future__ import annotations

import dataclasses
import json as jsons
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_train import assemble, compat
from sharded_train import workdir as layout
from sharded_train.collectives import all_max, index_of
from sharded_train.data.tokenizer import TextTokenizer, load_tokenizer
from sharded_train.decode import Cache, advance, empty_cache
from sharded_train.errors import ConfigError
from sharded_train.params import Tree
from sharded_train.recipe import Recipe
from sharded_train.step import Program


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else at random among the `top_k` likeliest."""

    max_tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


def generate(
    recipe: Recipe,
    workdir: Path,
    *,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    num_samples: int,
    seed: int,
    json: bool,
) -> int:
    """Prints texts that go on from `prompt`, by the newest checkpoint of the run in `workdir`. The exit code."""
    program = assemble.program_of(recipe)
    checkpointer = assemble.checkpointer_of(recipe, workdir)
    step = checkpointer.latest_step()
    if step is None:
        raise ConfigError(f"{workdir} has no checkpoint to generate with yet")
    tokenizer = load_tokenizer(workdir / layout.TOKENIZER, recipe.model.vocab_size, lambda text: None)
    sampling = Sampling(max_tokens, temperature, top_k, seed)
    check(program, tokenizer, prompt, sampling)
    state, _ = assemble.to_read(program, checkpointer, step)
    texts = sample_text(program, state.evaluated, tokenizer, prompt, sampling, num_samples)
    if jax.process_index() == 0:
        if json:
            print(jsons.dumps({"step": step, "prompt": prompt, "samples": texts}, indent=2))
        else:
            print(("\n" + "-" * 40 + "\n").join(prompt + text for text in texts))
    return 0


def check(program: Program, tokenizer: TextTokenizer, prompt: str, sampling: Sampling) -> None:
    """Raises ConfigError for text that the model has no positions for; says when it goes beyond what it has seen."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8: {error}") from error
    length = 1 + len(tokenizer.encode(prompt)) + sampling.max_tokens
    words = f"1 + {length - 1 - sampling.max_tokens} tokens of the prompt + max_tokens {sampling.max_tokens} = {length}"
    limit, seen = program.model.max_positions, program.train.sequence_length
    if program.model.positions == "learned" and limit is not None and length > limit:
        raise ConfigError(f"{words}, but the model has model.max_positions = {limit}: shorten the prompt or max_tokens")
    if length > seen and jax.process_index() == 0:
        print(f"note: {words}, more than the train.sequence_length = {seen} it was trained on", file=sys.stderr)


def sample_text(
    program: Program, params: Tree, tokenizer: TextTokenizer, prompt: str, sampling: Sampling, num_samples: int = 1
) -> list[str]:
    """Texts that go on from `prompt`, without it, each up to the end of its document or `max_tokens`."""
    start = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    rows = sample_tokens(program, params, start, sampling, num_samples, limit=tokenizer.vocab_size)
    texts = []
    for row in rows.tolist():
        end = row.index(tokenizer.end_of_text) if tokenizer.end_of_text in row else len(row)
        texts.append(tokenizer.decode(row[:end]))
    return texts


def sample_tokens(
    program: Program, params: Tree, prompt: Sequence[int], sampling: Sampling, num_samples: int, *, limit: int
) -> np.ndarray:
    """`[num_samples, max_tokens]` tokens below `limit` after the prompt; samples are split over the data axis.

    A sample is a function of its number and the seed, not of the mesh.
    """
    program, params = program.for_decoding(params)
    ways = math.prod(program.mesh.shape[axis] for axis in program.local.row_axes)
    rows = -(-num_samples // ways)

    def local(shards: Tree, prompt: jax.Array, key: jax.Array) -> jax.Array:
        return _sample(program, shards, prompt, key, sampling, rows, limit)

    spec = P(program.local.row_axes or None)
    run = jax.jit(program.on_mesh(local, (program.plan.stored, P(), P()), spec))
    tokens = run(params, jnp.asarray(prompt, jnp.int32), jax.random.key(sampling.seed))
    whole = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(program.mesh, P()))(tokens)
    return np.asarray(whole)[:num_samples]


def _sample(
    program: Program, shards: Tree, prompt: jax.Array, key: jax.Array, sampling: Sampling, rows: int, limit: int
) -> jax.Array:
    """On one device: its `[rows, max_tokens]`."""
    model, local, axes = program.model, program.local, program.plan.axes
    layers = local.kept_layers(shards)
    outer = local.outer(shards)
    own = index_of(local.row_axes) * rows + jnp.arange(rows)
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(own)

    def read(tokens: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
        return advance(model, outer, layers.stacked, layers.fetch, tokens, cache, start)

    def choose(logits: jax.Array, place: jax.Array | int) -> jax.Array:
        pick = lambda key, row: _choose(row[:limit], jax.random.fold_in(key, place), sampling)
        # Equal on all devices of tensor already; the maximum makes it equal by construction.
        return compat.vary(all_max(jax.vmap(pick)(keys, logits), "tensor"), local.row_axes)

    def next_token(carry: tuple, place: jax.Array) -> tuple[tuple, jax.Array]:
        token, cache = carry
        logits, cache = read(token[:, None], cache, len(prompt) + place - 1)
        token = choose(logits, place)
        return (token, cache), token

    cache = empty_cache(model, rows, len(prompt) + sampling.max_tokens, program.precision.compute_dtype)
    cache = jax.tree.map(lambda x: compat.vary(x, axes), cache)
    logits, cache = read(jnp.broadcast_to(prompt, (rows, len(prompt))), cache, 0)
    first = choose(logits, 0)
    _, rest = lax.scan(next_token, (first, cache), jnp.arange(1, sampling.max_tokens))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def _choose(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token from `[vocab]` logits."""
    if sampling.temperature == 0:
        return logits.argmax().astype(jnp.int32)
    if sampling.top_k is not None:
        least = lax.top_k(logits, min(sampling.top_k, logits.shape[0]))[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / sampling.temperature).astype(jnp.int32)
