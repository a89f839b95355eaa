"""Out of memory: named arrays, and only advice that would change something."""

from __future__ import annotations

import types
from typing import Any

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
    assert not any(words in text for words in ("zero.stage", "remat", "config.train.num_microbatches=8:", "bf16:"))
    assert "mesh.tensor=2 config.mesh.data=4 config.train.num_microbatches=2:" in text


def long_rows(**mesh: int) -> recipe.Recipe:
    return recipe.from_dict(
        {
            "model": {"vocab_size": 512, "d_model": 512, "num_layers": 2, "num_heads": 8, "d_ff": 1024},
            "mesh": mesh,
            "precision": {"recipe": "bf16"},
            "train": {"global_batch_size": 8, "sequence_length": 8192, "num_microbatches": 1, "remat": "selective"},
        }
    )


def test_what_frees_most_comes_first_and_what_frees_nothing_is_not_said() -> None:
    cluster = stand_ins("2x4")
    held = {memory.MOMENTS: 10, memory.GRADIENTS: 50, memory.ACTIVATIONS: 1000}
    found = memory.remedies(long_rows(data=8), cluster, held)
    assert found[0].startswith("config.train.remat=full:")
    assert found[1].startswith("config.mesh.sequence=2 config.mesh.data=4 config.train.num_microbatches=2:")
    assert found[-1].startswith("config.train.sequence_length=4096:")
    found = memory.remedies(long_rows(data=8), cluster, {memory.GRADIENTS: 1000, memory.ACTIVATIONS: 1})
    assert found[0].startswith("config.zero.stage=2:")
    assert not any("remat" in words for words in found)


def test_no_advice_is_refused() -> None:
    """Tensor parallelism ends at a host's devices, and ZeRO-2 is no advice for a pipeline."""
    assert any("mesh.tensor=4" in words for words in memory.remedies(long_rows(tensor=2), stand_ins("2x4"), {}))
    assert not any("mesh.tensor" in words for words in memory.remedies(long_rows(tensor=4), stand_ins("2x4"), {}))
    assert any("zero.stage=2" in words for words in memory.remedies(long_rows(), stand_ins("1x2"), {}))
    assert not any("zero.stage" in words for words in memory.remedies(long_rows(pipeline=2), stand_ins("1x4"), {}))


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


def test_the_peak_is_that_of_the_fullest_device_where_devices_say_it() -> None:
    def device(stats: dict[str, int] | None) -> Any:
        return types.SimpleNamespace(memory_stats=lambda: stats)

    assert memory.peak([device(None), device({"peak_bytes_in_use": 3})]) is None
    full, other = ({"peak_bytes_in_use": used, "bytes_limit": 9} for used in (7, 5))
    assert memory.peak([device(None), device(other), device(full)]) == (7, 9)
    assert memory.peak(jax.local_devices()) is None  # CPUs
