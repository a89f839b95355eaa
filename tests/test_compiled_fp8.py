"""FP8 in the compiled program: every product that is asked for is a cuBLAS call in FP8, and weights are sent in it."""

from __future__ import annotations

import io
from typing import Any

import jax
import pytest
from rehearsed import CLUSTER, PIPELINE, TINY
from rich.console import Console
from test_compiled_zero import collectives_of, entries

from sharded_train import recipe, train_precision
from sharded_train.errors import ConfigError
from sharded_train.rehearse import clusters, computed, fp8, hlo
from sharded_train.rehearse.compile import check_plugin, compile_for
from sharded_train.rehearse.run import facts_of

try:
    check_plugin()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

LAYERS, M = 3, 2
LAYER = 256 * 128 + 2 * 256 * 64 + 128 * 256 + 3 * 256 * 256  # entries of a layer's matrices on a tensor rank
# XLA joins products of one input: q, k, v are one, up and gate too, and so are the gradients of those weights.
FORWARD, BACKWARD = 4, 7 + 4
CURRENT = "precision.recipe=fp8_current"
DELAYED: dict[str, Any] = {"precision": {"recipe": "fp8_delayed"}}
slow = pytest.mark.slow
# (settings, changes, products in the text of one layer)
CASES = [
    pytest.param({**TINY, **DELAYED}, ["train.overlap=false"], FORWARD + BACKWARD, id="zero3-tensor2-selective"),
    pytest.param(
        {**TINY, **DELAYED}, ["train.overlap=false", "train.remat=none"], FORWARD + BACKWARD, id="none", marks=slow
    ),
    pytest.param(
        {**TINY, **DELAYED},
        ["train.overlap=false", "train.remat=full"],
        2 * FORWARD - 1 + BACKWARD,  # nothing back needs what down makes
        id="full",
        marks=slow,
    ),
    pytest.param(
        {**TINY, **DELAYED}, ["train.overlap=false", CURRENT], FORWARD + BACKWARD, id="current", marks=slow
    ),
    pytest.param({**PIPELINE, **DELAYED}, ["pipeline.num_chunks=1"], FORWARD + BACKWARD, id="1f1b", marks=slow),
    pytest.param(
        {**TINY, **DELAYED},
        ["train.overlap=false", "precision.fp8.bf16_products=down"],
        FORWARD + BACKWARD - 3,
        id="down-in-bf16",
        marks=slow,
    ),
    *(
        pytest.param(
            {**TINY, **DELAYED},
            ["train.overlap=false", f"zero.stage={stage}"],
            FORWARD + BACKWARD,
            id=f"zero{stage}",
            marks=slow,
        )
        for stage in (0, 1, 2)
    ),
    # The last layer stands by itself, and layers work on two halves: four times as many.
    pytest.param({**TINY, **DELAYED}, [], 4 * (FORWARD + BACKWARD), id="overlap", marks=slow),
    *(
        pytest.param(
            {**PIPELINE, **DELAYED},
            [f"pipeline.schedule={schedule}", f"pipeline.num_chunks={chunks}", f"model.num_layers={layers}", *changes],
            FORWARD + BACKWARD,
            id="-".join([schedule, *changes]),
            marks=slow,
        )
        for schedule, chunks, layers, changes in (
            ("gpipe", 1, 3, ()),
            ("interleaved", 2, 4, ()),
            ("zero_bubble", 1, 3, ()),
            ("1f1b", 1, 3, ("zero.stage=3",)),
        )
    ),
    pytest.param(
        {**TINY, **DELAYED},
        ["train.overlap=false", "precision.fp8.bf16_layers.first=1"],
        FORWARD + BACKWARD,
        id="first-layer-in-bf16",
        marks=slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "changes", "products"), CASES)
def test_every_product_is_fp8_and_weights_are_gathered_in_it(
    settings: dict[str, Any], changes: list[str], products: int
) -> None:
    asked = recipe.from_dict(settings, [f"--config.{change}" for change in changes])
    with jax.default_matmul_precision("default"):  # as in a run; tests have "highest"
        compiled = compile_for(asked, CLUSTER)
    found = fp8.of_text(compiled.text)
    assert found is not None
    assert found["missing"] == []
    assert found["asked"] == found["in_fp8"] == products
    calls = [line for line in compiled.text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in line]
    assert len(calls) == products
    exact = sum('"operand_precision":["HIGHEST","HIGHEST"]' in line for line in calls)  # not summed fast
    in_bf16 = 2 * len(asked.precision.fp8.bf16_products)
    assert exact == max(1, products // (FORWARD + BACKWARD)) * BACKWARD - in_bf16
    assert fp8.words(found) == f"FP8: all {found['asked']} of the products that are asked for run in FP8"
    if asked.mesh.pipeline > 1:  # how often it gathers there is not read from the program
        assert any("f8e4m3fn" in line and " all-gather" in line for line in compiled.text.splitlines())
        return
    found_there = collectives_of(compiled)
    over = lambda axis: entries([each for each in found_there if each.op == "all-gather" and each.axes == (axis,)])
    gathered, activations = over("data"), over("tensor")
    once = M * 2 * 256 * 256  # of a microbatch's numbers between layers, 2 rows a device
    layers = LAYERS - asked.precision.fp8.bf16_layers.first
    forward = activations["u8"] // (2 * layers * once) if asked.precision.recipe == "fp8_delayed" else 0
    assert activations["u8"] == forward * 2 * layers * once
    if asked.precision.recipe == "fp8_delayed":  # going back their cotangents are bf16, as is what is not in FP8
        assert forward == (1 if asked.train.remat == "none" else 2)
        alone = 2 * (LAYERS - layers)  # a layer in no loop: XLA keeps what it gathered on the way up
        assert activations["bf16"] == (2 * LAYERS + 2 + alone) * once
    if asked.zero.stage == 3:
        layer = LAYER - (256 * 256 if asked.precision.fp8.bf16_products else 0)
        assert gathered["f8e4m3fn"] % layer == 0
        assert layers * M <= gathered["f8e4m3fn"] // layer <= 2 * layers * M
        if not asked.precision.fp8.bf16_products and layers == LAYERS:
            assert gathered["bf16"] <= M * (2 * 256 * 256 + 256 + 2 * LAYERS * 2 * 256)  # tables, and gains twice
    else:
        assert gathered.get("f8e4m3fn", 0) == (LAYERS * LAYER if asked.zero.stage else 0)


def test_products_that_fall_back_are_named_loudly() -> None:
    """CASES 20: an A100 has no FP8, and XLA multiplies in bf16 without a word; of a rehearsal it is a warning, and the
    same is said by `train`.
    """
    model = {**TINY["model"], "num_layers": 1}
    settings = {**TINY, **DELAYED, "model": model, "mesh": {"data": 1, "tensor": 1}, "zero": {"stage": 0}}
    compiled = compile_for(recipe.from_dict(settings), clusters.parse("a100:1x1"))
    facts = facts_of(compiled)
    assert (facts["fp8"]["asked"], facts["fp8"]["in_fp8"]) == (FORWARD + BACKWARD, 0)
    assert sum(row["products"] for row in facts["fp8"]["missing"]) == FORWARD + BACKWARD
    (told,) = [words for words in facts["warnings"] if "SHORTFALL" in words]
    assert told.startswith(
        f"FP8 SHORTFALL: only 0 of the {FORWARD + BACKWARD} products that are asked for run in FP8: "
    )
    assert "1 of mlp, forward (bf16[1024,512] · bf16[512,256]) as products in bf16" in told

    class OnGpu:
        as_text = lambda self: compiled.text

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    train_precision.tell(compiled.recipe, "gpu", OnGpu(), console)  # type: ignore[arg-type]
    assert console.file.getvalue() == f"\x1b[1;31m{told}\x1b[0m\n"  # type: ignore[attr-defined]


@slow
@pytest.mark.parametrize("changes", [[], ["train.overlap=false"]], ids=["overlap", "plain"])
def test_every_product_in_blocks_is_a_call_of_cudnn_on_blackwell(changes: list[str]) -> None:
    """7 products forward and 14 backward, none joined, more where layers stand alone and in halves.

    XLA pads dims to multiples of 128, so heads are as many as make them that. Weights are gathered in bf16.
    """
    model = {**TINY["model"], "num_kv_heads": 4}
    settings = {**TINY, "model": model, "mesh": {"data": 4, "tensor": 2}, "precision": {"recipe": "mxfp8"}}
    asked = recipe.from_dict(settings, [f"--config.{change}" for change in changes])
    compiled = compile_for(asked, clusters.parse("b200:1x8"))
    found = fp8.of_text(compiled.text)
    assert found is not None
    assert found["missing"] == []
    assert found["asked"] == found["in_fp8"] == compiled.text.count('"__cudnn$blockScaledDot"')
    assert found["asked"] % (3 * 7) == 0
    tokens, layer = 8 * 256 // 4 // M, 4 * 256 * 128 + 3 * 256 * 256  # of a device at once; entries of its matrices
    counted = computed.describe(hlo.parse(compiled.text), None, "bf16")
    assert counted["by_kind"]["products in FP8"] == 3 * LAYERS * M * 2 * tokens * layer
    assert not [what for what in counted["unknown"] if "blockScaledDot" in what]
    gathered = entries([e for e in collectives_of(compiled) if e.op == "all-gather" and e.axes == ("data",)])
    assert set(gathered) == {"bf16"}


@slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_in_bf16_are_counted_as_often_as_stages_have_them(schedule: str) -> None:
    """One of three layers: two stages share a program that has its loop, which the second passes over."""
    changes = [f"pipeline.schedule={schedule}", "pipeline.num_chunks=1", "precision.fp8.bf16_layers.first=1"]
    asked = recipe.from_dict({**PIPELINE, **DELAYED}, [f"--config.{change}" for change in changes])
    facts = facts_of(compile_for(asked, CLUSTER))
    assert facts["fp8"]["asked"] == facts["fp8"]["in_fp8"] == FORWARD + BACKWARD
    assert facts["computed"]["explained"][computed.REST] == 0
    tokens = 8 * 256 // 2  # of a device; matrices are whole on it
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    assert facts["computed"]["by_kind"]["products in FP8"] == (3 * 2 * tokens * layer) * (LAYERS - 1) // 2
