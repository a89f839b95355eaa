"""FLOPs and parameter counts against published numbers and hand computation."""

from __future__ import annotations

import dataclasses

import pytest

from sharded_train import params
from sharded_train.flops import flops_of_step
from sharded_train.models.decoder import DecoderConfig

GPT2 = DecoderConfig(
    vocab_size=50257,
    d_model=768,
    num_layers=12,
    num_heads=12,
    d_ff=3072,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=1024,
    tied_embedding=True,
    bias=True,
)


def llama3(num_layers: int, d_model: int, d_ff: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(128256, d_model, num_layers, num_heads, num_kv_heads=8, d_ff=d_ff, rope_theta=500000.0)


LLAMA3_8B = llama3(32, 4096, 14336, 32)
LLAMA3_70B = llama3(80, 8192, 28672, 64)
LLAMA3_405B = llama3(126, 16384, 53248, 128)
# FACTS of the project: 396 GFLOP a step with causal attention counted whole.
BENCH = DecoderConfig(8192, 384, 6, 6, d_ff=1024)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (GPT2, 124_439_808),  # Radford et al. 2019, as released
        (LLAMA3_8B, 8_030_261_248),  # Llama 3 (arXiv:2407.21783), as released
        (LLAMA3_70B, 70_553_706_496),
        (LLAMA3_405B, 405_853_388_800),
    ],
    ids=["gpt2", "llama3-8b", "llama3-70b", "llama3-405b"],
)
def test_published_parameter_counts(config: DecoderConfig, published: int) -> None:
    assert params.count(config.param_specs()) == published


def test_gpt2_by_hand() -> None:
    flops = flops_of_step(GPT2.param_specs(), num_rows=2, sequence_length=1024)
    tokens = 2 * 1024
    assert flops.by_kind == {
        "layers/attention": 6 * tokens * 12 * 4 * 768 * 768,
        "layers/mlp": 6 * tokens * 12 * 2 * 768 * 3072,
        "attention scores": 3 * 2 * 12 * 12 * (4 * 64) * (1024 * 1025 // 2),
        "head": 6 * tokens * 50257 * 768,
    }
    assert flops.num_tokens == tokens
    assert flops.per_token == pytest.approx(6 * 123_532_032 + 6 * 12 * 768 * 1025)


def test_llama3_8b_by_hand_with_grouped_queries() -> None:
    flops = flops_of_step(LLAMA3_8B.param_specs(), num_rows=1, sequence_length=8192)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024  # q and out; k and v of 8 heads of 128
    assert flops.by_kind["layers/attention"] == 6 * 8192 * 32 * attention
    assert flops.by_kind["layers/mlp"] == 6 * 8192 * 32 * 3 * 4096 * 14336
    assert flops.by_kind["attention scores"] == 12 * 32 * 32 * 128 * (8192 * 8193 // 2)  # all 32 query heads
    assert flops.by_kind["head"] == 6 * 8192 * 128256 * 4096


def test_a_window_counts_the_pairs_that_it_shows() -> None:
    """GPT-2 with a window of 3 in every second layer, rows of 5: 1 + 2 + 3 + 3 + 3 pairs, and all 15."""
    specs = dataclasses.replace(GPT2, attention_windows=(3, 0)).param_specs()
    flops = flops_of_step(specs, 1, 5, dataclasses.replace(GPT2, attention_windows=(3, 0)).layer_windows)
    assert flops.by_kind["attention scores"] == 3 * 12 * (4 * 64) * (6 * 12 + 6 * 15)
    longer = flops_of_step(specs, 1, 5, [5] * 12)
    assert longer == flops_of_step(specs, 1, 5)


def test_the_small_benchmark_model_with_attention_counted_twice_is_the_number_measured_by_others() -> None:
    by_kind = flops_of_step(BENCH.param_specs(), num_rows=8, sequence_length=512).by_kind
    whole = sum(by_kind.values()) + by_kind["attention scores"] * 511 / 513
    assert whole == pytest.approx(396e9, rel=2e-3)


def test_the_embedding_costs_the_same_tied_or_not_and_lookups_nothing() -> None:
    tied = flops_of_step(dataclasses.replace(BENCH, tied_embedding=True).param_specs(), 8, 512)
    assert tied == flops_of_step(BENCH.param_specs(), 8, 512)
    learned = dataclasses.replace(BENCH, positions="learned", max_positions=4096)
    assert flops_of_step(learned.param_specs(), 8, 512) == tied


def test_biases_and_norms_are_no_products() -> None:
    full = dataclasses.replace(BENCH, bias=True, norm="layernorm")
    assert flops_of_step(full.param_specs(), 8, 512) == flops_of_step(BENCH.param_specs(), 8, 512)


def test_products_scale_with_tokens_and_attention_with_pairs() -> None:
    short, long = (flops_of_step(BENCH.param_specs(), 4096 // t, t) for t in (128, 512))
    for kind in ("layers/attention", "layers/mlp", "head"):
        assert short.by_kind[kind] == long.by_kind[kind]
    assert long.by_kind["attention scores"] / short.by_kind["attention scores"] == pytest.approx(513 / 129)
