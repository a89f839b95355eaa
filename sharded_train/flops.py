"""Model FLOPs of a training step, by kind, from the tree of `ParamSpec`.

What the model needs, not what the machine does: nothing is counted for recomputation (rematerialisation), norms,
activation functions, softmax and the optimizer. Forward, per row of T tokens,

- a product by a matrix of N entries: 2 N T;
- attention: 2 H D for a query meeting a key and 2 H D for its value, over the T (T + 1) / 2 pairs that the causal mask
  lets through, in each layer of H heads of size D; of a window of W < T keys over T W - W (W - 1) / 2. Documents packed
  into one row count as one;
- the head: 2 V E T; looking a token up in the embedding is no product, a tied embedding is the head.

Backward is twice that: a gradient for each of the two factors. Without attention this is the "6 N tokens" of Kaplan et
al. 2020 (arXiv:2001.08361); with it the count of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), but for
the causal mask, which they count twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sharded_train.ops.attention import Windows, pairs_seen
from sharded_train.params import ParamSpec, Tree, named_leaves
from sharded_train.step import Program

CONVENTION = "model FLOPs: backward twice the forward, causal attention counted once, nothing for recomputation"


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one training step over the whole global batch, forward and backward, by kind."""

    by_kind: Mapping[str, int]
    num_tokens: int

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    @property
    def per_token(self) -> float:
        return self.total / self.num_tokens


def flops_of(program: Program) -> Flops:
    """FLOPs of a program's step."""
    train = program.train
    return flops_of_step(program.specs, train.global_batch_size, train.sequence_length, program.model.layer_windows)


def flops_of_step(specs: Tree, num_rows: int, sequence_length: int, windows: Windows | None = None) -> Flops:
    """FLOPs of a step over `num_rows` rows of `sequence_length` tokens; `windows` of each layer, without them all keys.

    Kinds are the groups of the tree ("layers/attention", "layers/mlp"), "attention scores" and "head".
    """
    num_tokens = num_rows * sequence_length
    forward: dict[str, int] = {}
    for name, spec in named_leaves(specs):
        if not spec.is_matrix or {"vocab", "position"} & set(spec.axes):
            continue
        group = name.rpartition("/")[0] or name
        forward[group] = forward.get(group, 0) + 2 * spec.size * num_tokens
        if _ends_attention(spec):
            width = spec.size // (spec.shape[0] * spec.shape[-1])  # heads x head_dim
            pairs = num_rows * sum(pairs_seen(sequence_length, window) for window in windows or [None] * spec.shape[0])
            forward["attention scores"] = forward.get("attention scores", 0) + 4 * width * pairs
    vocabulary = [spec.size for _, spec in named_leaves(specs) if "vocab" in spec.axes]
    assert len(set(vocabulary)) == 1, vocabulary  # one matrix that is embedding and head, or one for each
    forward["head"] = 2 * vocabulary[0] * num_tokens
    return Flops({kind: 3 * flops for kind, flops in forward.items()}, num_tokens)


def _ends_attention(spec: ParamSpec) -> bool:
    """Whether it is the product after attention, which mixes its heads: there is one for each attention."""
    return spec.axes[-3:] == ("heads", "head_dim", "embed")
