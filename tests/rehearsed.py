"""A small train step rehearsed on two hosts of two H100, once for all tests of a process; skips where it cannot be."""

from __future__ import annotations

import functools

import pytest

from sharded_train import recipe
from sharded_train.errors import ConfigError
from sharded_train.rehearse import clusters
from sharded_train.rehearse.compile import check_plugin
from sharded_train.rehearse.run import Rehearsal, rehearse

TINY = {
    "model": {"vocab_size": 512, "d_model": 256, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512},
    "mesh": {"data": 2, "tensor": 2},
    "precision": {"recipe": "bf16"},
    "zero": {"stage": 3},
    "train": {"global_batch_size": 8, "sequence_length": 256, "num_microbatches": 2, "remat": "selective"},
}


@functools.cache
def tiny() -> Rehearsal:
    """The facts and the text of TINY on h100:2x2."""
    try:
        check_plugin()
    except ConfigError as error:
        pytest.skip(str(error))
    return rehearse(recipe.from_dict(TINY), clusters.parse("h100:2x2"))
