"""Random settings against one device: a line for each case, then how many came to which outcome.

    python benchmarks/fuzz_layouts.py --cases=100            # cases 0 to 99, each about 8 CPU seconds
    python benchmarks/fuzz_layouts.py --first=17 --cases=1   # one of them again

A case is a function of its number: devices, settings, batch, and what is asked. Most ask for the loss and every
gradient leaf (`equivalence.errors`), and some also for an evaluation; every fifth goes on from one device's checkpoint.
`refused` is a ConfigError before anything is built, `CRASH` any other error; `ENDED` are those that took their process
with them, as one does that has no result within ten minutes.
A gradient that is zero but for rounding, of key biases under learned positions say, comes near the tolerance.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import math
import os
import random
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sharded_train import equivalence, launch
from sharded_train import recipe as recipes
from sharded_train.checkpoint import Checkpointer
from sharded_train.errors import ConfigError
from sharded_train.mesh import AXES, MeshConfig, build_mesh
from sharded_train.optimizer import SGD, Constant
from sharded_train.params import named_leaves
from sharded_train.pipeline import PipelineConfig
from sharded_train.recipe import Recipe
from sharded_train.sharding import ZeroConfig
from sharded_train.step import Program

OPTIMIZERS = ("adamw", "sgd momentum=0.9", "lion", "adafactor", "adafactor momentum=0.9 relative=false", "muon")
Settings = dict[str, Any]  # by key, as on the command line


def drawn(r: random.Random) -> tuple[int, Settings]:
    """A number of devices, and settings that mostly fit them and each other."""
    num_devices, sizes = r.choice((1, 2, 3, 4, 4, 5, 6, 8, 8, 8)), dict.fromkeys(AXES, 1)
    for prime in (2, 2, 2, 3, 5):
        if num_devices // math.prod(sizes.values()) % prime == 0:
            sizes[r.choice(AXES)] *= prime
    data, tensor, stages, ways = (sizes[axis] for axis in ("data", "tensor", "pipeline", "sequence"))
    m, unit = r.choice((1, 1, 2, 2, 3, 4)), tensor if ways == 1 else ways * math.lcm(2, tensor)
    length = unit * max(1, r.choice((8, 16, 24, 48)) // unit + r.choice((0, 1)))
    heads = tensor * r.choice((1, 1, 2, 3)) * r.choice((1, ways))
    divisors = lambda n: [k for k in range(1, n + 1) if n % k == 0]
    choices: dict[str, Any] = {
        "mesh.order": (",".join(AXES), ",".join(AXES), ",".join(r.sample(AXES, len(AXES)))),
        "train.num_microbatches": (m,),
        "train.global_batch_size": [data * m * rows for rows in (1, 2, 3, 4)],
        "train.sequence_length": (length,),
        **dict.fromkeys(("train.z_loss", "train.label_smoothing"), (0.0, 0.0, 0.1)),
        "zero.stage": (0, 1, 2, 3, 3),
        "zero.group_size": ("none", "none", *divisors(data)),
        "precision.recipe": ("fp32",),
        "model.num_layers": [stages * n + more for n in (1, 2) for more in (0, 1, 2)],
        "model.num_heads": (heads,),
        "model.num_kv_heads": [n for n in divisors(heads) if n % tensor == 0 or tensor % n == 0],
        "model.head_dim": (2, 4, 8, 16),
        "model.d_model": (8, 24, 32, 33, 48),
        "model.d_ff": (tensor, 3 * tensor, 20 * tensor),
        "model.vocab_size": (2, 3, 7, 50, 96, 97),
        "model.max_positions": (length, length + 3),
        "model.dropout": (0.0, 0.0, 0.1, 0.6),
        "model.attention_windows": ("0", "0", *(f"{r.randrange(length)}{more}" for more in ("", ",0", ",1"))),
        **dict.fromkeys(("train.overlap", "model.tied_embedding", "model.bias"), ("true", "false")),
        "train.remat": ("none", "selective", "full"),
        "attention.context": ("auto", "all_gather", "ring", "ulysses"),
        "model.norm": ("rmsnorm", "layernorm"),
        "model.activation": ("swiglu", "gelu"),
        "model.positions": ("rope", "rope", "learned"),
    }
    settings: Settings = {f"mesh.{axis}": size for axis, size in sizes.items()}
    settings |= {key: r.choice(values) for key, values in choices.items()}
    settings |= pipeline(r, stages, settings["model.num_layers"]) if stages > 1 else {}
    if r.random() < 0.3:
        settings[f"mesh.{r.choice(AXES)}"] = -1
    if r.random() < 0.15:  # something that may not fit
        key = r.choice([key for key, value in settings.items() if type(value) is int])
        settings[key] = r.choice((0, 1, 2, 3, 5, 7, settings[key] + 1, 2 * settings[key], -2))
    return num_devices, settings


def pipeline(r: random.Random, stages: int, num_layers: int) -> Settings:
    schedule, most = r.choice(("gpipe", "1f1b", "interleaved", "zero_bubble")), num_layers // stages
    chunks = {"interleaved": max(2, most), "zero_bubble": r.randint(1, most)}.get(schedule, 1)
    layers = [r.choice((0, 1)), *[1] * (stages * chunks - 2), r.choice((0, 1))]  # the ends may have none
    for _ in range(num_layers - sum(layers)):
        layers[r.randrange(len(layers))] += 1
    own = r.choice(("none", ",".join(map(str, layers))))
    return {"pipeline.schedule": schedule, "pipeline.num_chunks": chunks, "pipeline.layers": own}


def program(recipe: Recipe, num_devices: int) -> Program:
    return recipes.program_on(recipe, build_mesh(recipe.mesh, jax.devices()[:num_devices]))


def alone(recipe: Recipe) -> Program:
    """On one device, all rows at once."""
    train = dataclasses.replace(recipe.train, num_microbatches=1, remat="none", overlap=False)
    plain: Any = {"mesh": MeshConfig(1, 1, 1, 1), "zero": ZeroConfig(0), "pipeline": PipelineConfig(), "train": train}
    return program(dataclasses.replace(recipe, **plain), 1)


def gradients(recipe: Recipe, num_devices: int, seed: int) -> dict[str, float]:
    """Errors of loss and gradients, and of an evaluation."""
    recipe = dataclasses.replace(recipe, optimizer=SGD(), schedule=Constant(1.0))
    programs = program(recipe, num_devices), alone(recipe)
    errors = equivalence.errors(*(equivalence.measure(p, seed) for p in programs))
    if seed % 3 == 0:
        token_bytes = np.ones(recipe.model.vocab_size, np.int32)
        nll = lambda p: p.eval_step(equivalence.weights(p), equivalence.batch_of(p, seed), token_bytes)[0].nll
        errors["evaluation"] = abs(float(nll(programs[0])) / float(nll(programs[1])) - 1)
    return errors


def resumed(recipe: Recipe, num_devices: int, seed: int) -> dict[str, float]:
    """Errors of two steps that go on from one device's checkpoint, which is taken up to the bit; compiled once."""
    many, one = program(recipe, num_devices), alone(recipe)

    def trained(p: Program, state: Any, steps: range) -> tuple[Any, list[float]]:
        losses = []
        for step in steps:
            state, metrics = p.train_step(state, equivalence.batch_of(p, seed + step))
            losses.append(float(metrics["loss"]))
        assert p.train_step._cache_size() == 1, "compiled more than once"  # type: ignore[attr-defined]
        return state, losses

    bits = lambda p, state: {n: np.asarray(x).tobytes() for n, x in named_leaves(p.to_checkpoint(state), None)}
    state, _ = trained(one, one.init(recipe.train.seed), range(2))
    saved = bits(one, state)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(Path(folder))
        checkpointer.save(2, state, {})
        checkpointer.wait()
        taken_up = many.from_checkpoint(checkpointer.restore(2, many.abstract_checkpoint)[0])
        checkpointer.close()
    assert bits(many, taken_up) == saved, "another state than was saved"
    losses = zip(*(trained(p, at, range(2, 4))[1] for p, at in ((many, taken_up), (one, state))), strict=True)
    return {f"loss of step {step}": abs(got / want - 1) for step, (got, want) in enumerate(losses, 2)}


def outcome(number: int) -> str:
    """Of a case, in one line; a traceback goes to stderr."""
    faulthandler.dump_traceback_later(600, exit=True)
    num_devices, settings = drawn(r := random.Random(number))
    kind = gradients if number % 5 else resumed
    if kind is resumed:
        settings |= {"train.num_steps": 4, "train.ema_decay": r.choice(("none", 0.9))}
        settings |= dict(f"optimizer.{option}".split("=") for option in f"type={r.choice(OPTIMIZERS)}".split())
    told = f"{kind.__name__} on {num_devices}: {' '.join(f'{key}={value}' for key, value in settings.items())}"
    try:
        try:
            recipe = recipes.from_dict({}, [f"--config.{key}={value}" for key, value in settings.items()])
            recipes.check(recipe, num_devices)
        except ConfigError as error:
            return f"refused {error.problems[0]}"
        errors = kind(recipe, num_devices, number)
    except Exception as error:
        traceback.print_exc()
        return f"CRASH {type(error).__name__} {told}"
    name, largest = max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return f"{'equal' if largest <= equivalence.TOLERANCE else 'WRONG'} {largest:.1e} ({name}) {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    args = parser.parse_args()
    flags = "--xla_backend_optimization_level=0"  # most of the time is compilation
    os.environ |= {"XLA_FLAGS": flags, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    new_pool = lambda: ProcessPoolExecutor(1, get_context("spawn"), launch.virtual_devices, max_tasks_per_child=20)
    found, pool = collections.Counter[str](), new_pool()
    for number in range(args.first, args.first + args.cases):
        try:
            line = pool.submit(outcome, number).result()
        except BrokenProcessPool:
            line, pool = "ENDED its process: it hung, or worse", new_pool()
        print(number, line, flush=True)
        found[line.split()[0]] += 1
    print(", ".join(f"{count} {word}" for word, count in found.most_common()))


if __name__ == "__main__":
    main()
