"""The layers as runs of alike ones: those that stay in bf16 before and after those in FP8. Passes go from run to run.

Each run is a loop of its own with its own kind of weights, so that no layer asks what it is. The stages of a pipeline
share one program: there a run is as long as the longest in any chunk, and padding is passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train.models import stack
from sharded_train.models.block import Block
from sharded_train.models.stack import Backward, Collect, Forward, Source
from sharded_train.params import Tree

Runs = tuple[Source, ...]
RUN = "run_"  # of scopes


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """Where the layers of a run are in every chunk of every stage: tables `[stage, chunk]`."""

    in_fp8: bool
    begin: np.ndarray  # the place of the first in the stage's dim 0
    number: np.ndarray  # the same in the model
    count: np.ndarray
    alone: bool  # whether there is no other run

    def taken(self, stacked: Tree, stage: jax.Array | int) -> Tree:
        """Of a stage's `[layers, ...]` those of this run, chunk after chunk."""
        if self.alone:
            return stacked
        rows = zip(self.begin, self.count, strict=True)
        here = [np.concatenate([b + np.arange(n) for b, n in zip(*row, strict=True)]) for row in rows]
        if len(here) == 1:
            return jax.tree.map(lambda x: x[here[0][0] : here[0][-1] + 1], stacked)
        places = [np.pad(places, (0, max(map(len, here)) - len(places))) for places in here]
        return jax.tree.map(lambda x: x[jnp.asarray(places)[stage]], stacked)

    def over(self, source: Source, *, taken: bool) -> Source:
        """The run's weights, of all or of those that were taken; `of_chunk` says what its tables come to."""
        start = np.cumsum(self.count, 1) - self.count if taken and not self.alone else self.begin
        where = {"start": start, "place": self.begin, "first": self.number, "count": self.count}
        return dataclasses.replace(source, **where, depth=int(self.count.max()))  # type: ignore[arg-type]


Spans = tuple[Span, ...]


def spans_of(number: np.ndarray, count: np.ndarray, width: int, ends: tuple[int, int]) -> Spans:
    """Of chunks `width` places wide that begin with layer `number` of the model; of it `ends` are in bf16."""
    first = np.clip(ends[0] - number, 0, count)
    last = np.clip(number + count - (count.sum() - ends[1]), 0, count)
    begin, spans = np.arange(count.shape[1]) * width + np.zeros_like(count), []
    for in_fp8, here in ((False, first), (True, count - first - last), (False, last)):
        if here.any():
            spans.append(Span(in_fp8, begin, number, here, not any(ends)))
        begin, number = begin + here, number + here
    return tuple(spans)


def of_chunk(run: Source, stage: jax.Array | int, chunk: jax.Array | int) -> Source:
    """Of a run's weights those of the layers in one chunk."""
    table: Any = run.count
    here = lambda table: int(table[0, 0]) if table.size == 1 else jnp.asarray(table, jnp.int32)[stage, chunk]
    count = None if (table == run.depth).all() else here(table)
    where = {name: here(getattr(run, name)) for name in ("start", "place", "first")}
    return dataclasses.replace(run, **where, count=count)  # type: ignore[arg-type]


def forward(
    block: Block, runs: Runs, x: jax.Array, context: Any, *, first: Tree | None = None, keep: Tree | None = None
) -> Forward:
    """As `stack.forward`; what it takes and leaves behind is of each run."""
    ups: list[Forward] = []
    for i, (source, early, room) in enumerate(zip(runs, _each(first, runs), _each(keep, runs), strict=True)):
        with _scope(runs, i):
            ups.append(stack.forward(block, source, x, context, first=early, keep=room))
        x = ups[-1].y
    return Forward(x, *(_together(getattr(up, name) for up in ups) for name in ("saved", "whole", "last")))


def backward(
    block: Block,
    runs: Runs,
    saved: Any,
    d_y: jax.Array,
    context: Any,
    collect: Collect,
    sums: Tree,
    *,
    last: Tree | None = None,
    beside: Tree = None,
) -> Backward:
    """As `stack.backward`, from the last run to the first."""
    downs: list[Backward] = []
    for i, at_hand in reversed(list(enumerate(_each(last, runs)))):
        with _scope(runs, i):
            down = stack.backward(block, runs[i], saved[i], d_y, context, collect, sums, last=at_hand, beside=beside)
        d_y, sums, beside = down.d_x, down.sums, None
        downs.insert(0, down)
    return Backward(d_y, sums, *(_together(getattr(down, name) for down in downs) for name in ("kept", "first")))


def backward_weights(runs: Runs, kept: Any, collect: Collect, sums: Tree) -> Tree:
    for i, source in enumerate(runs):
        with _scope(runs, i):
            sums = stack.backward_weights(source, kept[i], collect, sums)
    return sums


def _scope(runs: Runs, i: int) -> Any:
    """By which `rehearse.pace` knows a run's conditionals."""
    return jax.named_scope(RUN + str(i)) if len(runs) > 1 else contextlib.nullcontext()


def _each(of: Any, runs: Runs) -> Any:
    return [None] * len(runs) if of is None else of


def _together(parts: Iterable[Any]) -> Any:
    """What there is of each run, or None."""
    there = tuple(parts)
    return None if any(part is None for part in there) else there
