"""Small train steps rehearsed on H100s, once for all tests of a process; tests skip where that cannot be."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from sharded_train import recipe
from sharded_train.errors import ConfigError
from sharded_train.rehearse import clusters
from sharded_train.rehearse.compile import Compiled, check_plugin, compile_for
from sharded_train.rehearse.run import Rehearsal, facts_of

CLUSTER = clusters.parse("h100:2x2")
TINY: dict[str, Any] = {
    "model": {"vocab_size": 512, "d_model": 256, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512},
    "mesh": {"data": 2, "tensor": 2},
    "precision": {"recipe": "bf16"},
    "zero": {"stage": 3},
    "train": {"global_batch_size": 8, "sequence_length": 256, "num_microbatches": 2, "remat": "selective"},
}


PIPELINE = {  # two stages of data 2: the model's three layers are split 2 + 1, the smaller chunk padded
    **TINY,
    "mesh": {"pipeline": 2, "data": 2, "tensor": 1},
    "zero": {"stage": 1},
    "train": {**TINY["train"], "num_microbatches": 4},
}


@functools.cache
def tiny() -> Rehearsal:
    """The facts and the text of TINY on h100:2x2."""
    compiled = tiny_compiled(3)
    return Rehearsal(facts_of(compiled), compiled.text)


@functools.cache
def tiny_compiled(stage: int) -> Compiled:
    """TINY compiled for h100:2x2, under a ZeRO stage."""
    _check()
    return compile_for(recipe.from_dict({**TINY, "zero": {"stage": stage}}), CLUSTER)


@functools.cache
def pipeline(schedule: str = "1f1b", windows: tuple[int, ...] = (0,)) -> Compiled:
    """PIPELINE compiled for h100:2x2, under a schedule of one chunk a stage."""
    _check()
    settings = {**PIPELINE, "pipeline": {"schedule": schedule, "num_chunks": 1}}
    return compile_for(
        recipe.from_dict({**settings, "model": {**TINY["model"], "attention_windows": windows}}), CLUSTER
    )


def _check() -> None:
    try:
        check_plugin()
    except ConfigError as error:
        pytest.skip(str(error))
