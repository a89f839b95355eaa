"""`show`: its bytes are the bytes that are held, and its tables can be read."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import re
from collections import Counter
from typing import Any

import jax
import pytest
from rich.console import Console

from sharded_train.errors import ConfigError
from sharded_train.mesh import MeshConfig, build_mesh, layout, stand_ins
from sharded_train.mesh_picture import draw_mesh
from sharded_train.models.decoder import DecoderConfig
from sharded_train.optimizer import SGD, Adafactor, AdamW, Lion, Muon, Optimizer
from sharded_train.precision import Bf16Layers, Fp8Config, PrecisionConfig
from sharded_train.recipe import Recipe, TrainConfig, from_dict, program_on
from sharded_train.sharding import ZeroConfig
from sharded_train.show import bytes_held, describe, show
from sharded_train.step import TrainState
from sharded_train.tables import attention_in_words, bytes_in_words, flops_in_words, print_facts

SMALL = DecoderConfig(vocab_size=67, d_model=24, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=20, bias=True)


def recipe(**changes: Any) -> Recipe:
    train = TrainConfig(global_batch_size=16, sequence_length=16)
    return dataclasses.replace(Recipe(model=SMALL, train=train), **changes)


@functools.cache
def first_state(recipe: Recipe) -> TrainState:
    return program_on(recipe, build_mesh(recipe.mesh)).init(0)


def held_by_each_device(tree: Any) -> Counter[int]:
    held: Counter[int] = Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return held


def text_of(recipe: Recipe, cluster: str, width: int = 100) -> str:
    devices = stand_ins(cluster)
    out = io.StringIO()
    picture = draw_mesh(layout(recipe.mesh, devices), recipe.mesh.order)
    print_facts(describe(recipe, devices), picture, Console(file=out, width=width, highlight=False))
    return out.getvalue()


# Bytes


@pytest.mark.parametrize(
    ("stage", "tensor", "optimizer"),
    [
        *((stage, 2, AdamW()) for stage in range(4)),
        (1, 4, AdamW()),  # fewer kv heads than tensor
        (3, 1, SGD(momentum=0.9)),
        (2, 2, SGD()),
        (3, 2, Lion(moments_dtype="bfloat16")),
        (1, 4, Adafactor(momentum=0.9)),
        (3, 2, Adafactor()),
        (2, 4, Muon()),
    ],
)
def test_state_bytes_are_those_really_held(stage: Any, tensor: int, optimizer: Optimizer) -> None:
    asked = recipe(mesh=MeshConfig(tensor=tensor), zero=ZeroConfig(stage), optimizer=optimizer)
    facts = describe(asked, jax.devices())
    state = first_state(asked)
    assert held_by_each_device(state) == {d.id: facts["state_bytes_total"] for d in jax.devices()}
    assert held_by_each_device(state.params)[jax.devices()[0].id] == facts["state_bytes"]["master_weights"]
    assert sum(facts["state_bytes"].values()) == facts["state_bytes_total"]
    rest = {"moments", "counters"}
    held = held_by_each_device((state.step, state.skipped, state.opt_state))[jax.devices()[0].id]
    assert held == sum(facts["state_bytes"][kind] for kind in rest)


def test_bytes_of_each_parameter_are_those_really_held() -> None:
    train = TrainConfig(global_batch_size=16, sequence_length=16, ema_decay=0.9)
    asked = recipe(mesh=MeshConfig(tensor=2), zero=ZeroConfig(3), train=train)
    facts = describe(asked, jax.devices())
    arrays = dict(jax.tree_util.tree_leaves_with_path(first_state(asked).params))
    by_name = {jax.tree_util.keystr(path, simple=True, separator="/"): array for path, array in arrays.items()}
    assert [p["name"] for p in facts["parameters"]] == list(by_name)
    for p in facts["parameters"]:
        array = by_name[p["name"]]
        assert tuple(p["shape"]) == array.shape
        assert p["bytes"]["master_weights"] == bytes_held(array) == array.addressable_shards[0].data.nbytes
        assert p["bytes"]["moments"] == 2 * p["bytes"]["master_weights"]  # Adam's two
        assert p["bytes"]["averaged_weights"] == p["bytes"]["master_weights"]
    assert facts["state_bytes"]["counters"] == 8  # the step, and how many were skipped
    assert facts["state_bytes_total"] == held_by_each_device(first_state(asked))[jax.devices()[0].id]


def test_scales_of_fp8_are_state() -> None:
    """Of each layer 18 tensors have a scale and 16 amaxes."""
    model = DecoderConfig(vocab_size=64, d_model=32, num_layers=4, num_heads=4, d_ff=64)
    asked = recipe(model=model, precision=PrecisionConfig("fp8_delayed"))
    assert describe(asked, stand_ins("1x4"))["state_bytes"]["scales"] == 4 * 18 * 17 * 4
    said = text_of(asked, "1x4")
    assert "scales and histories of FP8" in said
    assert "weights to multiply with, bfloat16 and FP8" in said


def test_bytes_of_the_step_by_hand() -> None:
    model = DecoderConfig(vocab_size=64, d_model=32, num_layers=4, num_heads=4, d_ff=64)
    weights = {"embedding": 64 * 32, "head": 64 * 32, "final_norm": 32}
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    whole = sum(weights.values()) + 4 * layer

    def step(stage: Any, num_microbatches: int, dtype: Any = "bf16", first: int = 0) -> dict[str, int]:
        train = TrainConfig(global_batch_size=16, sequence_length=16, num_microbatches=num_microbatches)
        precision = PrecisionConfig(dtype, Fp8Config(bf16_layers=Bf16Layers(first)))
        asked = Recipe(model=model, zero=ZeroConfig(stage), precision=precision, train=train)
        got: dict[str, int] = describe(asked, stand_ins("1x4"))["step_bytes"]
        return got

    for stage in (0, 1, 2):
        assert step(stage, 1)["gathered_weights"] == step(stage, 1)["weight_gradients"] == 2 * whole
    at_once = sum(weights.values()) + layer
    assert step(3, 1)["gathered_weights"] == step(3, 1)["weight_gradients"] == 2 * at_once
    assert step(0, 1, "fp32")["gathered_weights"] == 0  # the master is multiplied with
    assert step(1, 1, "fp32")["gathered_weights"] == 4 * whole
    matrices = layer - 2 * 32
    assert step(1, 1, "fp8_delayed")["gathered_weights"] == 2 * whole - 4 * matrices  # a byte a number
    assert step(3, 1, "fp8_current")["gathered_weights"] == 2 * at_once - matrices
    assert step(1, 1, "fp8_current", first=1)["gathered_weights"] == 2 * whole - 3 * matrices
    assert step(3, 1, "fp8_current", first=1)["gathered_weights"] == 2 * at_once  # of the layer in bf16
    assert step(1, 1, "mxfp8")["gathered_weights"] == 2 * whole
    assert step(1, 1, "fp8_delayed")["weight_gradients"] == 2 * whole
    assert [step(stage, 1)["gradient_sums"] for stage in range(4)] == [4 * whole, *[whole] * 3]
    assert [step(stage, 2)["gradient_sums"] for stage in range(4)] == [4 * whole, 4 * whole, whole, whole]


def test_state_shrinks_by_the_ways_it_is_split() -> None:
    model = DecoderConfig(vocab_size=4096, d_model=256, num_layers=4, num_heads=8, d_ff=1024)
    meshes: list[tuple[int, Any]] = [(1, 0), (8, 3)]
    whole, split = (
        describe(Recipe(model=model, mesh=MeshConfig(tensor=t), zero=ZeroConfig(stage)), stand_ins("4x8"))
        for t, stage in meshes
    )
    gains = 4 * 3 * (2 * 4 + 1) * 256  # fp32, three arrays, nine norms: not split over tensor
    counters = whole["state_bytes"]["counters"]
    assert (whole["state_bytes_total"] - counters - gains) == 32 * (split["state_bytes_total"] - counters - gains // 4)


# What is left whole


def test_what_is_left_whole_is_named_with_bytes_and_reason() -> None:
    asked = recipe(mesh=MeshConfig(data=5, tensor=4), train=TrainConfig(global_batch_size=20, sequence_length=16))
    facts = describe(asked, stand_ins("5x4"))
    whole = {p["name"]: p["left_whole"] for p in facts["parameters"] if p["left_whole"]}
    assert any("vocab 67 is no multiple of tensor 4" in reason for reason in whole["embedding"])
    assert any("kv_heads 2 is no multiple of tensor 4" in reason for reason in whole["layers/attention/k"])
    assert any("whole over data" in reason for reason in whole["layers/mlp/norm/gain"])
    split = [p for p in facts["parameters"] if not p["left_whole"]]
    assert all(any("data" in dim for dim in p["stored"]) for p in split)
    text = text_of(asked, "5x4")
    section = text[text.index("Left whole") : text.index("Work")]
    assert all(name in section for name in whole)


def test_nothing_is_reported_whole_when_everything_divides() -> None:
    assert "Nothing: every parameter" in text_of(Recipe(mesh=MeshConfig(tensor=2)), "1x8")
    assert "ZeRO 0 keeps" in text_of(Recipe(zero=ZeroConfig(0)), "1x8")


# Words


@pytest.mark.parametrize("stage", [0, 3])
def test_the_tables_fit_the_page_and_name_everything(stage: Any) -> None:
    asked = recipe(mesh=MeshConfig(tensor=2), zero=ZeroConfig(stage))
    text = text_of(asked, "2x4")
    assert max(map(len, text.splitlines())) <= 100
    facts = describe(asked, stand_ins("2x4"))
    for p in facts["parameters"]:
        assert f"{p['name'].removeprefix('layers/')} " in text
    assert "NVLink: 2 devices" in text
    assert f"{facts['state_bytes_total']:,}" in text
    assert f"{facts['num_parameters']:,}" in text
    assert facts["flops_convention"] in text
    assert all(warning[:60] in text for warning in facts["warnings"])
    assert "Traceback" not in text_of(asked, "2x4", width=60)


def test_show_prints_json_that_says_what_the_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    asked = recipe(mesh=MeshConfig(tensor=2))
    assert show(asked, cluster="2x8", json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(describe(asked, stand_ins("2x8"))))
    assert facts["mesh"]["sizes"] == {"pipeline": 1, "data": 8, "sequence": 1, "tensor": 2}
    assert facts["mesh"]["num_hosts"] == 2
    assert facts["tokens_per_step"] == 16 * 16
    assert sum(facts["flops_per_step"].values()) == facts["flops_per_step_total"]


def test_show_of_the_devices_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(recipe(mesh=MeshConfig(tensor=2))) == 0
    out = capsys.readouterr().out
    assert f"data {jax.device_count() // 2} × tensor 2 = {jax.device_count()} devices on 1 host" in out
    assert "shared memory" in out


def test_a_cluster_that_is_not_there_costs_nothing() -> None:
    before = len(jax.live_arrays())
    facts = describe(Recipe(train=TrainConfig(global_batch_size=16384), mesh=MeshConfig(tensor=4)), stand_ins("2048x8"))
    assert facts["mesh"]["num_devices"] == 16384
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    ("mesh", "cluster", "message"),
    [
        (MeshConfig(tensor=3), "1x8", "mesh.tensor = "),
        (MeshConfig(tensor=4), "4x2", "lies across hosts"),
        (MeshConfig(data=3), "1x8", "number of devices is 8"),
        (MeshConfig(), "1by8", "HOSTSxDEVICES"),
    ],
)
def test_a_recipe_that_does_not_fit_the_cluster_is_refused(mesh: MeshConfig, cluster: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        show(recipe(mesh=mesh), cluster=cluster)


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (100 * 2**20, "100 MiB"),
        (2**40, "1.00 TiB"),
    ],
)
def test_bytes_in_words(n: int, words: str) -> None:
    assert bytes_in_words(n) == words


def test_words_never_need_more_than_three_digits_before_the_unit() -> None:
    for exponent, factor in itertools.product(range(3, 20), (1, 9.994, 9.996, 9.99951)):
        number = flops_in_words(factor * 10**exponent).split()[0]
        assert 3 <= len(number) <= 4, number
        assert float(number) < 1000


def test_windows_are_told_with_the_layers_that_have_them() -> None:
    facts = describe(from_dict({}, ["--config.model.attention_windows=64,64,0"]), stand_ins("1x8"))
    assert facts["attention"] == {"by": "cudnn", "layers": [[64, 3], [None, 1]]}
    words = attention_in_words(facts["attention"])
    assert words == "cuDNN's flash attention; causal, over a window of 64 keys in 3 layers and all keys in 1 layer"


@pytest.mark.parametrize(
    ("context", "window", "warns"),
    [("ring", 255, False), ("ring", 256, True), ("all_gather", 300, True), ("ulysses", 300, False)],
)
def test_a_window_that_costs_more_than_it_hides_is_warned_of(context: str, window: int, warns: bool) -> None:
    """Each of the 2 S chunks of a row has the window's keys before it, also where there are none."""
    changes = ("mesh.sequence=4", "model.num_heads=8", f"attention.context={context}", "train.sequence_length=512")
    overrides = [f"--config.{change}" for change in (*changes, f"model.attention_windows={window},0")]
    found = [words for words in describe(from_dict({}, overrides), stand_ins("1x8"))["warnings"] if "window" in words]
    assert len(found) == warns
    assert all(f"a window of {window} keys" in words for words in found)


def test_attention_over_the_sequence_axis_says_what_and_why() -> None:
    """By the fewest bytes inside a host, by what nothing hides across hosts, unless something is asked for."""

    def context(*changes: str, cluster: str = "1x8") -> dict[str, str]:
        overrides = [f"--config.{change}" for change in ("mesh.sequence=4", "model.num_heads=8", *changes)]
        return describe(from_dict({}, overrides), stand_ins(cluster))["context"]  # type: ignore[no-any-return]

    assert context()["strategy"] == "ulysses"  # all heads have keys of their own
    few = context("model.num_kv_heads=1")
    assert few["strategy"] == "ring"
    assert re.fullmatch(
        r"ring sends [\d.]+ MiB a row and layer, ulysses sends [\d.]+ MiB a row and layer, inside a host", few["why"]
    )
    assert context(cluster="8x1")["strategy"] == "ulysses"  # 64 tokens a device hide no hop
    long = context("train.sequence_length=131072", cluster="8x1")
    assert long["strategy"] == "ring"
    assert (
        "across 4 hosts; there the ring's hops hide behind its blocks of 32,768 tokens (16,000 are enough)"
        in long["why"]
    )
    near = context("train.sequence_length=131072", "model.attention_windows=1024")
    assert near["strategy"] == "ring"  # which sends 1,023 keys a chunk, and ulysses all
    assert "2 heads" in context("mesh.tensor=2", "mesh.data=1", "model.num_heads=4")["why"]
    assert context("attention.context=all_gather") == {
        "strategy": "all_gather",
        "why": "attention.context asks for it",
    }
