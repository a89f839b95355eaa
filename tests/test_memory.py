"""Out of memory: named arrays, and only advice that would change something."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from sharded_train import memory, recipe
from sharded_train.mesh import stand_ins
from sharded_train.show import describe

RECIPE = recipe.from_dict({"mesh": {"data": 4, "tensor": 2}, "precision": {"recipe": "fp32"}})


def test_names_what_is_large_and_what_would_shrink_it() -> None:
    text = memory.explain("6 GiB asked, 2 GiB free", RECIPE, describe(RECIPE, stand_ins("1x8")))
    assert "6 GiB asked, 2 GiB free" in text
    assert "optimizer" not in text.split("shrink")[1].split("gradients")[0]  # stage 1 splits it already
    for words in ("master weights", "mlp/gate", "zero.stage=2", "num_microbatches=2", "remat=selective", "bf16"):
        assert words in text


def test_gives_no_advice_that_is_taken_already() -> None:
    smallest = recipe.from_dict(
        {
            "mesh": {"data": 8, "tensor": 1},
            "zero": {"stage": 3},
            "train": {"global_batch_size": 8, "remat": "full"},
        }
    )
    text = memory.explain("", smallest, describe(smallest, stand_ins("1x8")))
    assert not any(words in text for words in ("zero.stage", "remat", "num_microbatches", "bf16:"))
    assert "mesh.tensor=2" in text


def test_refuses_a_step_that_cannot_fit() -> None:
    compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2 * 64 * 64 * 4 - 1})
    facts = describe(RECIPE, stand_ins("1x8"))
    assert (memory.needed(compiled) or 0) >= 2 * 64 * 64 * 4
    with pytest.raises(memory.OutOfMemory, match="needs 32"):
        memory.check(compiled, device, RECIPE, facts)  # type: ignore[arg-type]
    device.memory_stats = lambda: None  # a CPU
    memory.check(compiled, device, RECIPE, facts)  # type: ignore[arg-type]


def test_knows_the_error() -> None:
    assert memory.is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"))
    assert not memory.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))
