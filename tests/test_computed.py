"""FLOPs of compiled programs, against numbers worked out by hand, on saved programs of both jax versions and others."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from sharded_train.flops import Flops
from sharded_train.ops import attention
from sharded_train.rehearse import computed, hlo
from sharded_train.rehearse.products import Product, work_of
from tests.rehearsed import tiny

SAVED = Path(__file__).parent / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")
M, K, N = 128, 512, 256  # of the weight's products
PAIRS = 2 * 4 * 256 * 257 // 2  # batch, heads, causal pairs of 256 tokens
ALL = 2 * 4 * 256 * 256
D = 64


def saved(name: str, version: str) -> hlo.Module:
    return hlo.parse((SAVED / f"{name}-{version}.txt").read_text())


def products_of(module: hlo.Module) -> list[tuple[Product, int]]:
    kept, _ = computed.one_branch_each(computed.count(module))
    return [(product, each.run.times) for each in kept for product in each.work.products]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kind_of_product_by_hand(version: str) -> None:
    section = computed.describe(saved("products", version), Flops({}, 1), "bf16")
    one = 2 * M * K * N
    assert section["by_kind"] == {
        "products in FP8": one,
        "products in fp32": one,
        "products in fp16": one,  # two halves of e5m2 by e5m2
        "products in bf16": 2 * one,  # computed again, and the gradient
        "attention by cuDNN": 2 * D * (2 * PAIRS + 5 * PAIRS + 2 * ALL),
    }
    assert section["explained"][computed.REMATERIALISED] == one
    assert section["explained"][computed.AGAIN] == 2 * D * PAIRS
    assert section["explained"][computed.HIDDEN] == 2 * 2 * D * (ALL - PAIRS)
    assert [remark for remark in computed.remarks(section) if "as a bias" in remark]
    assert sum(section["explained"].values()) == section["products"]
    assert not section["unknown"]


@pytest.mark.parametrize("version", VERSIONS)
def test_products_that_fell_back_are_named(version: str) -> None:
    rows = computed.describe(saved("products", version), Flops({}, 1), "bf16")["fallbacks"]
    assert {(row["kind"], row["asked"], row["runs"]) for row in rows} == {
        ("products in fp32", "bf16", 1),
        ("products in fp16", "FP8", 2),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_loops_multiply(version: str) -> None:
    """3 microbatches of 5 layers, `[64, 64] @ [64, 64]` each."""
    assert [(product.flops, times) for product, times in products_of(saved("loops", version))] == [(2 * 64**3, 15)]


@pytest.mark.parametrize("version", VERSIONS)
def test_of_a_conditional_the_branch_with_the_most_flops_counts(version: str) -> None:
    section = computed.describe(saved("loops", version), Flops({}, 1), "f32")
    (decided,) = section["conditionals"]
    assert decided["flops"][decided["taken"]] == max(decided["flops"])
    assert any("branch with the most FLOPs" in remark for remark in computed.remarks(section))


HANDMADE = """HloModule handmade, is_scheduled=true, num_partitions=2

%inner (p: bf16[8,32,64], q: bf16[8,64,16]) -> bf16[8,32,16] {
  %p = bf16[8,32,64]{2,1,0} parameter(0)
  %q = bf16[8,64,16]{2,1,0} parameter(1)
  ROOT %dot.1 = bf16[8,32,16]{2,1,0} dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

ENTRY %main (a: bf16[8,32,64], b: bf16[8,64,16]) -> bf16[8,32,16] {
  %a = bf16[8,32,64]{2,1,0} parameter(0)
  %b = bf16[8,64,16]{2,1,0} parameter(1)
  %product = bf16[8,32,16]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%inner, metadata={op_name="jit(f)/jvp(mlp)/dot_general"}
  %strange = bf16[8,32,16]{2,1,0} custom-call(%product), custom_call_target="mystery"
  %unread = bf16[8,32,16]{2,1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{},}
  ROOT %odd = bf16[8,32,16]{2,1,0} convolution(%strange, %unread)
}
"""  # noqa: E501


def test_what_is_not_understood_is_listed_and_not_counted() -> None:
    section = computed.describe(hlo.parse(HANDMADE), Flops({}, 1), "bf16")
    assert section["products"] == 2 * 8 * 32 * 64 * 16
    names = sorted(section["unknown"])
    assert [name.split(" (")[0] for name in names] == [
        "convolution",
        "custom-call __cublas$gemm",
        "custom-call mystery",
    ]
    assert len([remark for remark in computed.remarks(section) if "Not understood" in remark]) == 3
    assert section["by_part"] == [
        {"part": "mlp, forward", "kinds": {"products in bf16": 2**19}, "flops": 2**19, "runs": 1}
    ]


def test_plain_attention_is_told_by_its_scope() -> None:
    module = hlo.parse(HANDMADE.replace("jvp(mlp)", "transpose(jvp(attention))/scores"))
    section = computed.describe(module, Flops({}, 1), "bf16")
    assert section["by_kind"] == {"attention by XLA": 2**19}
    assert section["explained"][computed.AGAIN] == 0  # there is no forward pass to measure it by
    assert section["explained"][computed.REST] == 2**19


TABLES = """FileNames
1 "/somewhere/sharded_train/optimizer/muon.py"

FunctionNames
1 "newton_schulz"

FileLocations
1 {file_name_id=1 function_name_id=1 line=85}

StackFrames
1 {file_location_id=1}

%inner"""
OF_MUON = 'calls=%inner, metadata={op_name="jit(f)/dot_general" stack_frame_id=1}'
WIDE = HANDMADE.replace("bf16[", "f32[").replace("%inner", TABLES, 1)


@pytest.mark.parametrize("told", [OF_MUON, 'calls=%inner, metadata={op_name="jit(f)/optimizer/dot_general"}'])
def test_the_optimizers_products_are_its_own_in_a_type_of_its_own(told: str) -> None:
    """By the source file, or by a scope; in the model the same product in fp32 fell back."""
    metadata = 'calls=%inner, metadata={op_name="jit(f)/jvp(mlp)/dot_general"}'
    assert computed.describe(hlo.parse(WIDE), Flops({}, 1), "bf16")["fallbacks"]
    section = computed.describe(hlo.parse(WIDE.replace(metadata, told)), Flops({}, 1), "bf16")
    assert section["by_kind"] == {"the optimizer's products in TF32": 2**19}
    assert [row["part"] for row in section["by_part"]] == ["optimizer"]
    assert section["explained"][computed.OPTIMIZER] == 2**19
    assert section["explained"][computed.REST] == 0
    assert not section["fallbacks"]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("layers", [1, 3])
def test_plain_attention_is_the_model_and_scores_again_and_the_corners_of_tiles(
    window: int | None, layers: int
) -> None:
    """Two tiles of 128 queries, to 128 and 256 keys (a window of 100 spares the second 29). Of one layer XLA still has
    the scores when its backward pass begins; of a loop, of layers or of a window's bands, it has not.
    """

    def layer(q: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            return attention.attention(q, q, q, jnp.zeros((2, 256), jnp.int32), "xla", windows=(window,))

    def loss(q: jax.Array) -> jax.Array:
        return (layer(q) if layers == 1 else lax.scan(lambda q, _: (layer(q), None), q, None, layers)[0]).sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(jnp.zeros((2, 256, 4, D))).compile()
    module = hlo.parse(compiled.as_text() or "")
    scores = layers * 3 * 2 * 2 * D * PAIRS
    section = computed.describe(module, Flops({"attention scores": scores}, 2 * 256), "f32")
    tiles = layers * 2 * D * 2 * 4 * 128 * (128 + 256 if window is None else 2 * 227)
    again = 0 if layers == 1 and window is None else tiles
    assert section["products"] == 6 * tiles + again
    assert section["explained"][computed.AGAIN] == again
    assert section["explained"][computed.TILES] == 6 * tiles - scores
    assert section["explained"][computed.REST] == 0
    assert [remark for remark in computed.remarks(section) if "in tiles" in remark]


def test_a_window_and_a_causal_mask_count_the_pairs_they_show() -> None:
    call = saved("products", "0.10.2")
    entry = call.computations[call.entry]
    name = next(each.name for each in entry if '"__cudnn$fmhaSoftmax"' in each.raw_attributes)
    text = (
        (SAVED / "products-0.10.2.txt").read_text().replace('"sliding_window_length": 0', '"sliding_window_length": 32')
    )
    windowed = hlo.parse(text)
    entry = windowed.computations[windowed.entry]
    (product,) = work_of(windowed, entry, entry.instructions[name]).products
    pairs = sum(min(i + 1, 32) for i in range(256))
    assert product.flops == 2 * 2 * D * 2 * 4 * pairs


@pytest.mark.parametrize("version", VERSIONS)
def test_of_keys_that_are_another_devices_all_pairs_are_visible(version: str) -> None:
    """Context parallelism: neither a causal mask nor a bias, only lengths."""
    text = (SAVED / f"products-{version}.txt").read_text()
    assert re.search('"mask_type": *"CAUSAL"', text)
    module = hlo.parse(re.sub('"mask_type": *"CAUSAL"', '"mask_type": "PADDING"', text))
    of = {(p.hidden, p.flops, p.again) for p, _ in products_of(module) if p.attention}
    one = 2 * D * ALL
    assert of == {(0, 2 * one, 0), (0, 5 * one, one), (2 * 2 * D * (ALL - PAIRS), 2 * one, 0)}  # the last has a bias


def test_a_train_step_is_the_model_and_what_is_said_beside_it() -> None:
    """Nothing is unexplained, and under remat "selective" no product is computed again but the kernel's own scores."""
    section = tiny().facts["computed"]
    tokens, layers, heads, seq = 2048, 3, 4, 256
    attention, mlp, head = 256 * 64 * (2 * 4 + 2 * 2), 3 * 256 * 512, 256 * 512
    scores = 3 * layers * 4 * heads * D * (tokens // seq) * seq * (seq + 1) // 2
    assert section["model"] == (6 * tokens * (layers * (attention + mlp) + head) + scores) // 4
    assert section["explained"][computed.REST] == 0
    assert section["explained"][computed.REMATERIALISED] == 0
    assert not section["fallbacks"]
    assert not section["unknown"]
