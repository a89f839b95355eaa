"""Every mesh is the same run: the loss and every gradient leaf of any layout against one device's.

A `Layout` is a mesh with all that may be chosen on it; `measure` runs one step's loss and gradients on a hard batch,
`errors` compares two measurements by the contract of docs/architecture.md. A new axis or option joins with a field here
and a line in tests/test_equivalence.py.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, Literal

import jax
import numpy as np

from sharded_train.local import AttentionConfig
from sharded_train.mesh import MeshConfig, build_mesh
from sharded_train.models.block import Remat
from sharded_train.models.decoder import DecoderConfig
from sharded_train.optimizer import SGD, Constant
from sharded_train.params import named_leaves
from sharded_train.pipeline import PipelineConfig
from sharded_train.precision import PrecisionConfig, Recipe
from sharded_train.sharding import ZeroConfig
from sharded_train.step import Batch, Program, TrainConfig, build_program

TOLERANCE = 1e-5  # of a leaf's norm

ROWS, SEQ = 8, 16
ONE_STEP = TrainConfig(global_batch_size=ROWS, sequence_length=SEQ, clip_norm=None)
SMALL = DecoderConfig(vocab_size=96, d_model=32, num_layers=3, num_heads=4, d_ff=64)
MODELS = {
    "llama": SMALL,
    "llama_gqa": dataclasses.replace(SMALL, num_kv_heads=2, tied_embedding=True, head_dim=16),
    "gpt2": dataclasses.replace(
        SMALL, norm="layernorm", activation="gelu", positions="learned", max_positions=SEQ, bias=True,
        tied_embedding=True, dropout=0.25, vocab_size=97,
    ),
    "shallow": dataclasses.replace(SMALL, num_layers=1),
    "windows": dataclasses.replace(SMALL, num_layers=5, num_kv_heads=2, attention_windows=(5, 0)),
    "deep": dataclasses.replace(SMALL, num_layers=7, num_kv_heads=2, tied_embedding=True, dropout=0.1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one step is laid out; the defaults are one device with everything at once."""

    data: int = 1
    tensor: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    group: int | None = None  # data ranks that share one copy of the state
    num_microbatches: int = 1
    remat: Remat = "none"
    overlap: bool = False
    pipeline: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    chunks: int | None = None
    layers: tuple[int, ...] | None = None  # of each chunk
    sequence: int = 1
    strategy: Literal["auto", "all_gather", "ring", "ulysses"] = "auto"

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        group = f"in{self.group}" if self.group else ""
        pipe = f"pipe{self.pipeline}-{self.schedule}{self.chunks or ''}-" if self.pipeline > 1 else ""
        overlap = "-overlap" if self.overlap else ""
        row = f"seq{self.sequence}-{self.strategy}-" if self.sequence > 1 else ""
        axes = f"{pipe}{row}data{self.data}-tensor{self.tensor}"
        return f"{axes}-zero{self.zero}{group}-micro{self.num_microbatches}-{self.remat}{overlap}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One step's loss (mean nats per token), global gradient norm and gradients by leaf name."""

    loss: float
    grad_norm: float
    grads: dict[str, np.ndarray]


def program(model: DecoderConfig, layout: Layout, *, recipe: Recipe = "fp32", **train: Any) -> Program:
    """A program whose optimizer is SGD with learning rate 1: Adam hides a gradient that is k times too large."""
    steps = dataclasses.replace(
        ONE_STEP, num_microbatches=layout.num_microbatches, remat=layout.remat, overlap=layout.overlap
    )
    return build_program(
        model,
        build_mesh(
            MeshConfig(layout.data, layout.tensor, layout.pipeline, layout.sequence),
            jax.devices()[: layout.num_devices],
        ),
        zero=ZeroConfig(layout.zero, group_size=layout.group),
        precision=PrecisionConfig(recipe),
        optimizer=SGD(),
        schedule=Constant(1.0),
        train=dataclasses.replace(steps, **train),
        pipeline=PipelineConfig(layout.schedule, layout.chunks, layout.layers),
        attention=AttentionConfig(layout.strategy),
    )


def hard_batch(model: DecoderConfig, seed: int = 0, shape: tuple[int, int] = (ROWS, SEQ)) -> Batch:
    """Random tokens in rows of several documents; targets missing here and there, in one row of several altogether."""
    rng, (rows, seq) = np.random.default_rng(seed), shape
    tokens, targets = rng.integers(0, model.vocab_size, (2, rows, seq))
    targets[rng.random(shape) < np.linspace(0.1, 0.8, rows)[:, None]] = -1  # uneven between ranks
    targets[2 : 3 * (rows > 3)] = -1
    segments = np.sort(rng.integers(1, 4, shape), axis=1)
    segments[5:6, -4:], targets[5:6, -4:] = 0, -1  # padding
    if not (targets >= 0).any():
        targets[0, 0] = 0
    starts = [[np.argmax(row == s) for s in row] for row in segments]
    positions = np.arange(seq) - np.array(starts)
    return Batch(*(a.astype(np.int32) for a in (tokens, targets, segments, positions)))


def weights(program: Program) -> dict:
    """Weights without the symmetry of fresh ones (gains of 1, biases of 0), a function of each leaf's name.

    Twice as strong as fresh ones: with stronger ones the rounding of a gradient that is zero in exact arithmetic, such
    as GPT-2's key bias, comes near the floor below which errors do not count.
    """
    named = dict(named_leaves(program.specs))

    def draw(name: str) -> np.ndarray:
        spec = named[name]
        noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.04, spec.shape).astype(np.float32)
        return noise + np.float32(name.endswith("gain"))

    drawn = iter([draw(name) for name in named])
    whole = program.staged(jax.tree.map(lambda _: next(drawn), program.abstract_state.params))
    return jax.tree.map(lambda w, x: jax.device_put(w, x.sharding), whole, program.abstract_state.params)


def placed(program: Program, batch: Batch) -> Batch:
    """A batch on the program's devices."""
    order = program.token_order
    return jax.tree.map(lambda a: jax.device_put(a[:, order], program.batch_sharding), batch)  # type: ignore[no-any-return]


def batch_of(program: Program, seed: int = 0) -> Batch:
    """The hard batch with the program's rows, on its devices."""
    shape = (program.train.global_batch_size, program.train.sequence_length)
    return placed(program, hard_batch(program.model, seed, shape))


def measure(program: Program, seed: int = 0) -> Measurement:
    """Loss and gradients of the hard batch, gradients read back whole."""
    batch, key = batch_of(program, seed), jax.random.key(seed)
    loss, grads, norm = jax.jit(program.loss_and_grads)(weights(program), batch, key)
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(program.of_model(grads), None)}
    return Measurement(float(loss.nll / loss.num_tokens), float(norm), leaves)


def errors(got: Measurement, want: Measurement) -> dict[str, float]:
    """Per leaf the norm of the difference over max(its norm, 1e-3 x global norm x sqrt(its size / all)).

    The floor is there for leaves whose gradient is zero in exact arithmetic, such as GPT-2's key bias. Also "loss" and
    "grad_norm", relative.
    """
    assert got.grads.keys() == want.grads.keys()
    total = sum(g.size for g in want.grads.values())
    found = {
        "loss": abs(got.loss - want.loss) / abs(want.loss),
        "grad_norm": abs(got.grad_norm - want.grad_norm) / want.grad_norm,
    }
    for name, leaf in want.grads.items():
        floor = 1e-3 * want.grad_norm * math.sqrt(leaf.size / total)
        difference = float(np.linalg.norm(got.grads[name] - leaf))
        found[name] = difference / max(float(np.linalg.norm(leaf)), floor)
    return found
