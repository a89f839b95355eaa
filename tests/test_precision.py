"""The precision recipes in the step: on any mesh, what is seen, what is skipped, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharded_train import equivalence
from sharded_train import recipe as recipes
from sharded_train.calibrate import calibrated
from sharded_train.checkpoint.leaves import by_name
from sharded_train.devices import DEVICES
from sharded_train.equivalence import MODELS, Layout, hard_batch, placed
from sharded_train.errors import ConfigError
from sharded_train.models.runs import spans_of
from sharded_train.optimizer import AdamW, Constant
from sharded_train.params import named_leaves
from sharded_train.precision import Bf16Layers, Fp8Config, PrecisionConfig, Recipe
from sharded_train.precision.formats import E4M3, E5M2, Fp8
from sharded_train.recipe.precision import on_device, warnings
from sharded_train.rehearse import clusters
from sharded_train.rehearse.compile import check_layout
from sharded_train.scaling import fp8_of, moved_on, told
from sharded_train.scaling_resumed import check_seen, shapes, wanted
from sharded_train.step import Program, TrainState

LLAMA = MODELS["llama"]
BLOCKS = dataclasses.replace(LLAMA, d_model=64, d_ff=128, num_layers=2)  # multiples of 32 over two tensor ranks


def named(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(tree, None)}


@dataclasses.dataclass(frozen=True)
class Pass:
    loss: float
    grads: dict[str, np.ndarray]
    seen: dict[str, np.ndarray]  # [layers of the model, 3]


def with_ends(p: Program, first: int, last: int) -> Program:
    """The program with so many of the first and last layers in bf16."""
    fp8 = Fp8Config(bf16_layers=Bf16Layers(first, last))
    return dataclasses.replace(p, precision=dataclasses.replace(p.precision, fp8=fp8))


def given(fresh: Any) -> Any:
    """Scales that fit about; on any mesh the same, so that a device's numbers do not depend on another's."""
    scales = {"x": 2.0**4, "w": 2.0**4, "g": 2.0**14}
    scaled = lambda path, x: x * scales[path[-2].key] if path[-1].key == "scale" else x
    return jax.tree_util.tree_map_with_path(scaled, fresh)


@functools.cache
def passed(model: str, layout: Layout, recipe: Recipe, ends: tuple[int, int] = (0, 0)) -> Pass:
    p = with_ends(equivalence.program({**MODELS, "blocks": BLOCKS}[model], layout, recipe=recipe), *ends)
    batch, key = placed(p, hard_batch(p.model)), jax.random.key(0)
    scaling = given(p.fresh_scaling()) if recipe == DELAYED else p.fresh_scaling()
    found = jax.jit(p.passes)(equivalence.weights(p), scaling, batch, key)
    seen = named(p.of_model({"layers": found.seen})["layers"]) if found.seen else {}
    return Pass(float(found.loss.nll / found.loss.num_tokens), named(p.of_model(found.grads)), seen)


def difference(got: Pass, want: Pass) -> float:
    """Of all gradients together, relative."""
    norm = lambda leaves: float(np.sqrt(sum(float((leaf**2).sum()) for leaf in leaves)))
    return norm(got.grads[name] - leaf for name, leaf in want.grads.items()) / norm(want.grads.values())


slow = pytest.mark.slow
KEY = jax.random.key(0)
FP8, DELAYED, MX = "fp8_current", "fp8_delayed", "mxfp8"
CASES = [
    (DELAYED, "deep", Layout(data=2, tensor=2, zero=3, num_microbatches=2, overlap=True, remat="selective")),
    pytest.param(FP8, "llama", Layout(data=2, tensor=2, zero=3, num_microbatches=2, remat="selective"), marks=slow),
    pytest.param(DELAYED, "llama_gqa", Layout(data=2, tensor=4, zero=1, num_microbatches=2, overlap=True), marks=slow),
    (FP8, "deep", Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="zero_bubble", chunks=1)),
    pytest.param(
        FP8,
        "llama",
        Layout(sequence=2, tensor=2, data=2, zero=2, num_microbatches=2, strategy="ring", remat="full"),
        marks=slow,
    ),
    (MX, "blocks", Layout(data=2, tensor=2, zero=3)),
    pytest.param(MX, "blocks", Layout(data=2, tensor=2, zero=3, overlap=True, remat="selective"), marks=slow),
    pytest.param(MX, "blocks", Layout(pipeline=2, data=2, zero=1, num_microbatches=2, remat="full"), marks=slow),
    pytest.param(
        MX, "blocks", Layout(pipeline=2, data=2, num_microbatches=2, schedule="zero_bubble", chunks=1), marks=slow
    ),
]


@pytest.mark.parametrize(("recipe", "model", "layout"), CASES, ids=str)
def test_fp8_on_any_mesh_is_near_one_device(recipe: Recipe, model: str, layout: Layout) -> None:
    """As near as roundings to 2 bits of mantissa let it; a gradient counted twice or a scale lost would be far off.

    What was seen of weights is the same to the bit, and of the first layer's input, which is computed alike.
    """
    got, want = passed(model, layout, recipe), passed(model, Layout(), recipe)
    assert got.loss == pytest.approx(want.loss, rel=2e-3)
    assert difference(got, want) < 0.15
    assert {name for name in got.grads if not got.grads[name].any()} == set()
    assert got.seen.keys() == want.seen.keys()
    for name, seen in got.seen.items():
        amax, other = seen[:, 0], want.seen[name][:, 0]
        if name.endswith("/w"):
            assert amax.tolist() == other.tolist(), name
        elif "/k/" not in name and "/v/" not in name:  # of shared kv heads a device sees a part of the cotangent
            assert amax == pytest.approx(other, rel=0.25), name
    assert got.seen["attention/q/x"][0, 0] == want.seen["attention/q/x"][0, 0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(pipeline=2, data=2, zero=1, num_microbatches=4, schedule="zero_bubble", chunks=1)),
        pytest.param(
            "deep", Layout(data=2, tensor=2, sequence=2, zero=3, num_microbatches=2, overlap=True), marks=slow
        ),
    ],
    ids=str,
)
def test_fp16_on_any_mesh_is_near_one_device(model: str, layout: Layout) -> None:
    """CASES 21: the loss scale goes in and comes out once, wherever a stage or a microbatch is worked on."""
    got, want = passed(model, layout, "fp16"), passed(model, Layout(), "fp16")
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert difference(got, want) < 5e-3


MESHES = [
    Layout(pipeline=2, data=2, zero=1, num_microbatches=2),
    *(
        pytest.param(layout, marks=slow)
        for layout in (
            Layout(pipeline=2, data=2, zero=0, num_microbatches=4, schedule="gpipe"),
            Layout(pipeline=2, data=4, zero=2, num_microbatches=2, schedule="interleaved", chunks=2),
            Layout(pipeline=2, data=2, zero=3, num_microbatches=2, schedule="zero_bubble", chunks=1),
            Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=2, schedule="zero_bubble", chunks=1),
            Layout(data=2, zero=1, num_microbatches=4, overlap=True),
            Layout(data=8, zero=3),  # a last layer by itself, as under overlap, XLA compiles otherwise
            Layout(data=2, tensor=2, zero=0, num_microbatches=2),
            Layout(data=2, tensor=2, sequence=2, zero=2, strategy="all_gather", overlap=True),
            Layout(pipeline=2, data=2, tensor=2, zero=3, num_microbatches=2, schedule="interleaved", chunks=2),
            Layout(pipeline=2, data=2, sequence=2, zero=1, num_microbatches=2, schedule="gpipe", strategy="ring"),
            Layout(pipeline=2, sequence=2, tensor=2, num_microbatches=2, strategy="ulysses"),
        )
    ),
]


@pytest.mark.parametrize("layout", MESHES, ids=str)
def test_amax_on_any_mesh_is_that_of_one_device(layout: Layout) -> None:
    """To the bit wherever the numbers are: a maximum has no order.

    They are in all layers over data and pipeline, under every schedule and ZeRO stage. Tensor and sequence add in
    another order what becomes a layer's output: to the bit are then the weights and the first product's input. All
    without remat: what it keeps is rounded where XLA would otherwise not.
    """
    amaxes = lambda layout: {name: seen[:, 0] for name, seen in passed("deep", layout, DELAYED).seen.items()}
    got, want = amaxes(layout), amaxes(Layout())
    assert got.keys() == want.keys()
    assert all((amax > 0).all() for amax in want.values())
    if layout.tensor == layout.sequence == 1 and not layout.overlap:
        assert {name for name in got if got[name].tobytes() != want[name].tobytes()} == set()
    weights = [name for name in got if name.endswith("/w")]
    assert {name for name in weights if got[name].tobytes() != want[name].tobytes()} == set()
    assert got["attention/q/x"][0] == want["attention/q/x"][0]
    near = 0.15 if layout.tensor == layout.sequence == 1 else 0.5  # of one microbatch alone it would be half of it
    assert {n for n in got if got[n] != pytest.approx(want[n], rel=near)} == set()


@pytest.mark.parametrize(
    ("recipe", "model", "loss", "grads"),
    [("fp16", "llama", 1e-4, 5e-3), (FP8, "llama", 2e-3, 0.2), (MX, "blocks", 2e-3, 0.2)],
)
def test_recipes_on_one_device_are_near_fp32(recipe: Recipe, model: str, loss: float, grads: float) -> None:
    exact, got = passed(model, Layout(), "fp32"), passed(model, Layout(), recipe)
    assert got.loss == pytest.approx(exact.loss, rel=loss)
    assert 0 < difference(got, exact) < grads


ENDS = [
    (FP8, "llama", (0, 2), Layout(pipeline=2, num_microbatches=2, layers=(2, 1))),
    *(
        pytest.param(*case, marks=slow)
        for case in (
            (FP8, "llama", (1, 1), Layout(data=2, tensor=2, zero=3, num_microbatches=2, overlap=True)),
            (FP8, "llama", (1, 1), Layout(data=4, zero=1, num_microbatches=2, overlap=True, remat="selective")),
            (FP8, "deep", (2, 1), Layout(data=2, zero=2, num_microbatches=2, overlap=True, remat="full")),
            (FP8, "deep", (2, 1), Layout(pipeline=2, num_microbatches=2, schedule="interleaved", chunks=2, zero=0)),
            (FP8, "deep", (1, 4), Layout(pipeline=2, data=2, zero=3, num_microbatches=4)),
            (FP8, "deep", (2, 1), Layout(pipeline=2, num_microbatches=4, schedule="zero_bubble", chunks=1)),
            (MX, "blocks", (1, 0), Layout(pipeline=2, data=2, zero=1, num_microbatches=2)),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "model", "ends", "layout"), ENDS, ids=str)
def test_first_and_last_layers_stay_in_bf16(recipe: Recipe, model: str, ends: tuple[int, int], layout: Layout) -> None:
    """On any mesh nothing is seen of them, and gradients are those of one device."""
    got, want = passed(model, layout, recipe, ends), passed(model, Layout(), recipe, ends)
    assert got.loss == pytest.approx(want.loss, rel=2e-3)
    assert difference(got, want) < 0.1
    assert {name for name in got.grads if not got.grads[name].any()} == set()
    num_layers = len(next(iter(got.seen.values())))
    for name, seen in got.seen.items():
        if not name.endswith("/w"):
            assert seen[:, 0].astype(bool).tolist() == [ends[0] <= i < num_layers - ends[1] for i in range(num_layers)]


@slow
def test_with_ends_in_bf16_gradients_are_nearer_to_it() -> None:
    bf16, ends, all_in_fp8 = (
        passed("llama", Layout(), r, e) for r, e in (("bf16", (0, 0)), (FP8, (1, 1)), (FP8, (0, 0)))
    )
    assert 0 < difference(ends, bf16) < difference(all_in_fp8, bf16)


def test_runs_have_every_layer_once() -> None:
    """In every chunk of every stage, in order; as many at the ends of the model as are asked for."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        stages, chunks = rng.integers(1, 5, 2)
        count = rng.integers(1, 4, (stages, chunks))
        order = count.T.reshape(-1)  # chunk after chunk, each over all stages
        number = (np.cumsum(order) - order).reshape(chunks, stages).T
        first, last = (int(n) for n in rng.integers(0, count.sum() // 2 + 1, 2))
        found = {}
        for span in spans_of(number, count, 3, (first, last)):
            for stage, chunk in np.ndindex(count.shape):
                for i in range(span.count[stage, chunk]):
                    place = (stage, span.begin[stage, chunk] + i)
                    assert place not in found
                    found[place] = (span.number[stage, chunk] + i, span.in_fp8)
        places = {(s, 3 * c + i): number[s, c] + i for s, c in np.ndindex(count.shape) for i in range(count[s, c])}
        inside = range(first, count.sum() - last)
        assert found == {place: (layer, layer in inside) for place, layer in places.items()}


# The state


def test_what_products_are_quantised_to() -> None:
    """Formats and margin as they are asked for."""
    of = lambda recipe, **fp8: fp8_of(PrecisionConfig(recipe, Fp8Config(**fp8)))
    assert of(DELAYED) == Fp8("delayed", E4M3, E5M2, 0)
    assert of(FP8, margin=2) == Fp8("current", E4M3, E5M2, 2)
    assert of(DELAYED, format="e4m3", margin=1) == Fp8("delayed", E4M3, E4M3, 1)
    assert of(MX) == Fp8("blocks", E4M3, E4M3)
    assert [of(recipe) for recipe in ("fp32", "bf16", "fp16")] == [None] * 3


def test_products_that_stay_in_bf16_are_not_quantised() -> None:
    """Nor is anything in evaluation."""
    p = program("fp8_delayed")
    some = Fp8Config(bf16_products=("q", "down"))
    p = dataclasses.replace(p, precision=dataclasses.replace(p.precision, fp8=some))
    assert p.fp8 is not None
    assert {f"{branch}/{name}" for branch, name, _ in p.fp8.tensors()} == {
        *("attention/k", "attention/v", "attention/out", "mlp/up", "mlp/gate")
    }
    text = jax.jit(p.passes).lower(p.abstract_state.params, p.abstract_state.scaling, p.abstract_batch, KEY).as_text()
    assert "f8E4M3FN" in text
    assert "f8E5M2" in text
    token_bytes = jax.ShapeDtypeStruct((LLAMA.vocab_size,), jnp.int32)
    evaluated = jax.jit(p.eval_step).lower(p.abstract_state.params, p.abstract_batch, token_bytes).as_text()
    assert "f8E" not in evaluated


def test_layers_in_bf16_keep_no_scales() -> None:
    """CASES 19: what is seen moves the others' alone; taken up where they are in FP8 there are none to go on with."""
    p = with_ends(program("fp8_delayed", Layout(pipeline=2, num_microbatches=2, layers=(2, 1))), 1, 0)
    assert p.fp8 is not None
    assert p.fp8.order == (0, 1, 2, -1)
    ones = jnp.ones((4, 3))
    seen: Any = {branch: {} for branch, _ in p.fp8.groups}
    for branch, name, kind in p.fp8.tensors():
        seen[branch].setdefault(name, {})[kind] = ones
    scaling = moved_on(p.precision, p.fp8, p.fresh_scaling(), seen, jnp.bool(True))
    for x in scaling["layers"]["mlp"]["up"].values():
        assert x["history"].any(1).tolist() == [False, True, True, False]
        assert x["scale"].tolist()[::3] == [1, 1]
    numbers = told(p.fp8, scaling, seen)["mlp/up/x"]
    assert jnp.isfinite(numbers).all(1).tolist() == [False, True, True, False]
    lies = jax.tree.map(lambda x: x.sharding, p.abstract_state.scaling)
    state = p.init(0).replace(scaling=jax.device_put(scaling, lies))
    check_seen(p, state, Path("saved"))
    with pytest.raises(ConfigError, match=r"saved has no scales of layers 0, which were in bf16.*recalibrate=true"):
        check_seen(with_ends(p, 0, 1), state, Path("saved"))


def test_scales_of_another_kind_are_no_scales() -> None:
    """CASES 19: histories of another length, or other products', are refused unless they are not needed."""
    p = program("fp8_delayed")
    with_ = lambda **fp8: dataclasses.replace(p, precision=PrecisionConfig("fp8_delayed", Fp8Config(**fp8)))
    stored = lambda program: by_name(program.abstract_checkpoint)
    assert wanted(p)(Path("saved"), stored(p)) == p.abstract_checkpoint
    for other in (with_(amax_history_length=4), with_(bf16_products=("down",))):
        with pytest.raises(ConfigError, match=r"saved has scales of other products, or histories of another length"):
            wanted(p)(Path("saved"), stored(other))
        for reader in (wanted(p, to_train=False), wanted(with_(recalibrate=True))):
            assert shapes(by_name(reader(Path("saved"), stored(other)).scaling)) == shapes(
                by_name(other.abstract_checkpoint.scaling)
            )


def program(recipe: Recipe, layout: Layout = Layout(data=2)) -> Program:  # noqa: B008
    p = equivalence.program(LLAMA, layout, recipe=recipe, ema_decay=0.9)
    return dataclasses.replace(p, optimizer=AdamW())


def copy_of(state: TrainState) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in named_leaves(state, None)}


def test_delayed_scaling_begins_measured_and_learns_once_a_step() -> None:
    """CASES 18: with scales of 1 most gradients would be lost; the calibration updates nothing else, and what there was
    of scales and histories is forgotten.
    """
    p = program("fp8_delayed", Layout(data=2, pipeline=2, num_microbatches=2, layers=(2, 1)))
    assert p.pipe is not None
    state, batch = p.init(0), placed(p, hard_batch(LLAMA))
    old = jax.tree.map(lambda x: jax.device_put(jnp.full(x.shape, 3.0), x.sharding), state.scaling)
    state = state.replace(scaling=old)
    before = copy_of(state)
    state = calibrated(p, state, batch)
    after = copy_of(state)
    assert {name for name in after if (after[name] != before[name]).any()} == {n for n in after if "scaling" in n}
    there = p.pipe.order >= 0
    for name, x in after.items():
        if name.endswith("history"):
            assert (x[there, 0] > 0).all(), name
            assert not x[there, 1:].any(), name
    _, fresh = p.train_step(p.init(0), batch)
    state, metrics = p.train_step(state, batch)
    lost = lambda metrics: max(np.asarray(x)[:, 2].max() for name, x in metrics["fp8"].items() if name.endswith("g"))
    assert lost(metrics) < 0.2 < 0.5 < lost(fresh)
    now = copy_of(state)
    for name, x in now.items():
        if name.endswith("history"):
            amax = np.asarray(metrics["fp8"][name.removeprefix("scaling/layers/").removesuffix("/history")])[:, 0]
            assert x[p.pipe.places][:, 0].tolist() == amax.tolist(), name
            assert x[there, 1].tolist() == after[name][there, 0].tolist()


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """CASES 18, 21: no weight, moment, average, count of steps or history moves, on any device."""
    p = program("fp8_delayed")
    state, batch = p.init(0), placed(p, hard_batch(LLAMA))
    bad = state.params["layers"]["attention"]["norm"]["gain"].at[1, 0].set(jnp.inf)
    state.params["layers"]["attention"]["norm"]["gain"] = jax.device_put(bad, bad.sharding)
    before = copy_of(state)
    state, metrics = p.train_step(state, batch)
    assert not np.isfinite(float(metrics["loss"]))
    after = copy_of(state)
    assert (int(metrics["skipped"]), int(after.pop("skipped")), int(before.pop("skipped"))) == (1, 1, 0)
    assert {name for name in after if after[name].tobytes() != before[name].tobytes()} == set()


def test_fp16_backs_off_and_goes_on() -> None:
    """CASES 21: at an absurd loss scale gradients overflow; it halves until they do not, and then steps are made."""
    p = dataclasses.replace(program("fp16"), schedule=Constant(1e-3))  # at 1 the weights themselves would overflow
    state, batch = p.init(0), placed(p, hard_batch(LLAMA))
    state.scaling["loss_scale"] = jax.device_put(jnp.float32(2**22), state.step.sharding)
    scales, steps, losses = [], [], []
    for _ in range(14):
        state, metrics = p.train_step(state, batch)
        scales.append(float(metrics["loss_scale"]))
        steps.append(int(state.step))
        losses.append(float(metrics["loss"]))
    assert scales[:3] == [2**22, 2**22, 2**21]  # the first overflow is borne
    assert 0 < steps[-1] == 14 - int(state.skipped) < 14
    assert np.isfinite(float(metrics["grad_norm"]))
    assert losses[-1] < losses[0]
    assert all(np.isfinite(leaf).all() for leaf in copy_of(state).values())


# What is refused, and said

FITS: dict[str, Any] = {
    "model": {"vocab_size": 512, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128},
    "mesh": {"data": 2, "tensor": 2},
    "precision": {"recipe": "fp8_delayed"},
    "train": {"global_batch_size": 8, "sequence_length": 32},
}


def problems(*changes: str) -> str:
    with pytest.raises(ConfigError) as error:
        recipes.check(recipes.from_dict(FITS, [f"--config.{c}" for c in changes]), 4)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.d_ff=144"], "model.d_ff 144 / mesh.tensor 2 = 72 is no multiple of 16"),
        (["model.d_model=72", "model.head_dim=16"], "model.d_model = 72 is no multiple of 16"),
        (["model.head_dim=24"], "model.num_kv_heads 2 x head_dim 24 / mesh.tensor 2 = 24 is no multiple of 16"),
        (["model.num_kv_heads=1", "model.head_dim=24"], "head_dim = 24, of a device's one kv head, is no multiple"),
        (["train.sequence_length=2"], "8 x 2 / (data 2 x sequence 1 x train.num_microbatches 1) = 8, is no multiple"),
        (["precision.fp8.amax_history_length=0"], "precision.fp8.amax_history_length = 0: must be at least 1"),
        (["precision.fp8.bf16_products=q,k,v,out,gate,up,down"], "nothing is left"),
        (["precision.fp8.bf16_layers.first=2", "precision.fp8.bf16_layers.last=2"], "2 + last 2 = 4 of model.num_la"),
        (["precision.fp8.bf16_layers.last=-1"], "neither may be below 0"),
        (["precision.recipe=fp16", "precision.fp16.backoff_factor=1"], "must be above 0 and below 1"),
        (["precision.recipe=mxfp8", "model.num_kv_heads=2"], "num_kv_heads 2 x head_dim 16 / mesh.tensor 2 = 16 is no"),
        (["precision.recipe=mxfp8", "train.sequence_length=8"], "x 2 halves under train.overlap) = 16, is no multiple"),
        (["precision.fp8.margin=17"], "precision.fp8.margin = 17: must be from 0 to 16"),
        (["precision.fp8.margin=-1"], "precision.fp8.margin = -1: must be from 0 to 16"),
        (["precision.recipe=fp16", "precision.fp16.initial=0"], "precision.fp16.initial = 0.0: must be from 1 to 2^24"),
        (["precision.recipe=fp16", "precision.fp16.initial=1e8"], "must be from 1 to 2^24"),
        (["precision.recipe=fp16", "precision.fp16.growth_interval=0"], "growth_interval = 0: must be at least 1"),
        (["precision.recipe=fp16", "precision.fp16.growth_factor=1"], "growth_factor = 1.0: must be above 1"),
        (["precision.recipe=fp16", "precision.fp16.hysteresis=0"], "hysteresis = 0: must be at least 1"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: list[str], words: str) -> None:
    assert words in problems(*changes)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
@pytest.mark.parametrize(
    "changes",
    [
        ("model.d_model=80",),
        ("model.d_ff=144",),
        ("model.d_ff=8",),
        ("model.head_dim=20",),
        ("model.head_dim=24", "model.num_kv_heads=1"),
        ("train.sequence_length=2",),
        ("train.sequence_length=36", "train.global_batch_size=2"),
    ],
)
def test_the_sizes_that_are_offered_work(recipe: str, changes: tuple[str, ...]) -> None:
    """Each setting is named once, with values of its own."""
    asked = (*changes, f"precision.recipe={recipe}", *["model.num_kv_heads=4"] * ("num_kv" not in changes[-1]))
    offers = re.findall(r"nearest that work: (\S+) = ([\d or]+)", problems(*asked))
    assert len({key for key, _ in offers}) == len(offers) > 0
    for values in itertools.product(*([f"{key}={n}" for n in numbers.split(" or ")] for key, numbers in offers)):
        recipes.check(recipes.from_dict(FITS, [f"--config.{c}" for c in (*asked, *values)]), 4)


def test_only_products_in_fp8_are_asked_for_sizes() -> None:
    """What is left in bf16 may have any; and is not told to be too small."""
    odd, mlp = ("model.d_ff=100", "mesh.tensor=1", "mesh.data=4"), "precision.fp8.bf16_products=up,gate,down"
    assert "model.d_ff = 100 is no multiple of 16" in problems(*odd)
    asked = recipes.from_dict(FITS, [f"--config.{c}" for c in (*odd, mlp)])
    recipes.check(asked, 4)
    (told,) = warnings(asked, {"tensor": 1})
    assert "model.d_model = 64" in told
    assert "model.d_ff" not in told


def test_what_is_out_of_range_is_told_once() -> None:
    assert "model.num_layers = 0: must be at least 1" in problems("model.num_layers=0")
    assert "no layer is left" not in problems("model.num_layers=0")


@pytest.mark.parametrize("kind", DEVICES)
def test_blocks_are_for_tensor_cores_that_know_them(kind: str) -> None:
    """CASES 20: refused where XLA would multiply in bf16, naming what has them."""
    asked = recipes.from_dict({**FITS, "model": {**FITS["model"], "num_kv_heads": 4}, "mesh": {"data": 1}})
    of = lambda recipe: dataclasses.replace(asked, precision=PrecisionConfig(recipe))
    cluster = clusters.parse(f"{kind}:1x1")
    check_layout(of("fp8_current"), cluster)
    if kind in ("b200", "gb200"):
        check_layout(of("mxfp8"), cluster)
    else:
        with pytest.raises(ConfigError, match=r"know no scales of blocks.*NVIDIA B200, NVIDIA GB200.*fp8_current"):
            check_layout(of("mxfp8"), cluster)
    assert len(on_device(of("mxfp8"), "MI300", "gfx942")) == 1


def test_blocks_keep_nothing() -> None:
    """CASES 18, 19: no scale of a step before, and none to lose with a checkpoint."""
    p = program("mxfp8")
    assert p.abstract_state.scaling is None
    assert [kind for _, _, kind in p.fp8.tensors() if kind == "w"] == []  # type: ignore[union-attr]


def test_what_changes_nothing_is_told() -> None:
    told = lambda *changes: "\n".join(
        warnings(recipes.from_dict(FITS, [f"--config.{c}" for c in changes]), {"tensor": 2})
    )
    assert "below about 1024 outputs" in told()
    assert "precision.fp8.algorithm = most_recent changes nothing" in told(
        "precision.recipe=fp8_current", "precision.fp8.algorithm=most_recent"
    )
    assert "precision.fp8.format = e4m3 changes nothing" in told("precision.recipe=mxfp8", "precision.fp8.format=e4m3")
    assert "precision.fp8.margin = 1 changes nothing" in told("precision.recipe=mxfp8", "precision.fp8.margin=1")
    assert "precision.fp8.bf16_layers" in told("precision.recipe=bf16", "precision.fp8.bf16_layers.first=1")
    assert "precision.fp16 changes nothing" in told("precision.fp16.initial=8")
    assert "precision.fp8.margin = 1 changes nothing" in told("precision.recipe=bf16", "precision.fp8.margin=1")
