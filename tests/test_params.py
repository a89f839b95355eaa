"""Parameters: the same first values on every mesh, and placements that hold and say what they leave whole."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharded_train import equivalence, params
from sharded_train.equivalence import MODELS, Layout
from sharded_train.models.decoder import DecoderConfig
from sharded_train.params import ParamSpec, Tree, named_leaves, ones
from sharded_train.recipe import load
from sharded_train.sharding import MESH_AXIS, Placement, ZeroConfig, gather_shard, is_placement, place, plan_of

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))


# First values


@functools.cache
def first_weights(layout: Layout) -> dict[str, np.ndarray]:
    state = equivalence.program(MODELS["llama_gqa"], layout).init(0)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state.params, None)}


@pytest.mark.parametrize(
    "layout", [Layout(data=8, zero=3), Layout(4, 2, zero=2, group=2), Layout(2, 4, zero=3)], ids=str
)
def test_first_weights_are_bitwise_those_of_one_device(layout: Layout) -> None:
    """CASES 13."""
    got, want = first_weights(layout), first_weights(Layout())
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        assert leaf.dtype == np.float32
        assert np.array_equal(got[name], leaf), name


@functools.partial(jax.jit, static_argnums=0)
def initialize(config: DecoderConfig, seed: jax.Array) -> Tree:
    return params.initialize(config.param_specs(), jax.random.key(seed))


def initial(config: DecoderConfig = MODELS["llama"], seed: int = 0) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(initialize(config, jnp.uint32(seed)), None)}


def test_first_weights_have_the_spread_they_should() -> None:
    leaves = initial()
    for name, leaf in leaves.items():
        if name.endswith("gain"):
            assert (leaf == 1).all()
        else:
            std = 0.02 / math.sqrt(2 * 3) if name.endswith(("out", "down")) else 0.02
            assert leaf.std() == pytest.approx(std, rel=6 / math.sqrt(2 * leaf.size)), name
            assert abs(leaf.mean()) < 6 * std / math.sqrt(leaf.size), name


def test_no_two_matrices_or_layers_start_alike() -> None:
    matrices = [leaf for name, leaf in initial().items() if not name.endswith("gain")]
    per_layer = [part for leaf in matrices for part in (leaf if len(leaf) == 3 else [leaf])]
    first = [part.ravel()[:64] / part.std() for part in per_layer]
    for a, b in itertools.combinations(first, 2):
        assert abs((a * b).mean()) < 6 / math.sqrt(64)


def test_a_leaf_starts_alike_whatever_else_the_model_has() -> None:
    """Its first values are a function of the seed, its name and its layer: not of other leaves, and not of depth."""
    three = initial()
    other = initial(
        dataclasses.replace(MODELS["llama"], num_layers=2, tied_embedding=True, norm="layernorm", bias=True)
    )
    shared = three.keys() & other.keys()
    assert three.keys() - shared == {"head"}
    for name in shared:
        if name.endswith(("out", "down")):  # the end of a residual branch shrinks with depth
            assert other[name] == pytest.approx(three[name][:2] * math.sqrt(3 / 2), rel=1e-6)
        else:
            assert np.array_equal(other[name], three[name][: len(other[name])]), name
    again = initial(seed=1)
    assert not any(np.array_equal(again[name], leaf) for name, leaf in three.items() if not name.endswith("gain"))


# Placements

SIZES = [(1, 1), (8, 1), (4, 2), (1, 8), (3, 5), (64, 8), (2048, 16)]


def parts(spec: PartitionSpec, p: Placement, sizes: dict[str, int]) -> list[int]:
    """How many ways each dim is split."""
    named = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    assert len(named) == len(p.spec.shape)
    return [math.prod(sizes[axis] for axis in axes) for axes in named]


def placements(
    config: DecoderConfig, data: int, tensor: int, stage: Any
) -> tuple[dict[str, Placement], dict[str, int]]:
    sizes = {"pipeline": 1, "data": data, "sequence": 1, "tensor": tensor}
    plan = plan_of(config.param_specs(), sizes, ZeroConfig(stage))
    return dict(named_leaves(plan.placements, is_placement)), sizes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_leaf_is_split_or_says_why_not(path: Path) -> None:
    """CASES 10 and 13, on meshes that divide and on such as do not."""
    config = load(path).model
    for (data, tensor), stage in itertools.product(SIZES, range(4)):
        found, sizes = placements(config, data, tensor, stage)
        for name, p in found.items():
            stored, gathered = parts(p.stored, p, sizes), parts(p.gathered, p, sizes)
            whole = []
            for size, axis, by_all, by_tensor in zip(p.spec.shape, p.spec.axes, stored, gathered, strict=True):
                assert size % by_all == 0, (name, sizes)
                if axis == "layers":  # the scan walks over them
                    assert by_all == 1
                if MESH_AXIS.get(axis) == "tensor" and size % tensor:
                    whole.append("tensor")
                else:
                    assert by_tensor == (tensor if MESH_AXIS.get(axis) == "tensor" else 1)
            if stage and data > 1 and math.prod(stored) == math.prod(gathered):
                whole.append("data")
                inner = zip(p.spec.shape[p.spec.stacked :], gathered[p.spec.stacked :], strict=True)
                assert all(size // by_tensor % data for size, by_tensor in inner), (name, sizes)
            else:
                assert math.prod(stored) == math.prod(gathered) * (data if stage else 1)
            assert [reason.split(":")[0] for reason in p.reasons] == [f"whole over {axis}" for axis in whole]


def test_the_state_of_a_big_model_shrinks_with_every_device() -> None:
    """What was asked for is what the plan holds: under ZeRO all but a little is split over every device of the mesh."""
    config = load(next(path for path in CONFIGS if path.stem == "llama3_405b")).model

    def held(data: int, tensor: int, stage: int) -> float:
        found, sizes = placements(config, data, tensor, stage)
        return sum(p.spec.size / math.prod(parts(p.stored, p, sizes)) for p in found.values())

    assert held(1, 1, 0) == 405_853_388_800
    assert held(256, 8, 0) == pytest.approx(held(1, 1, 0) / 8, rel=1e-3)
    for stage in (1, 2, 3):
        assert held(256, 8, stage) == pytest.approx(held(1, 1, 0) / (256 * 8), rel=1e-2)


def test_zero_prefers_a_dim_that_is_whole_and_shares_one_when_it_must() -> None:
    sizes = {"pipeline": 1, "data": 4, "sequence": 1, "tensor": 2}
    stored = lambda shape, axes: tuple(place(ParamSpec(shape, axes, params.zeros), sizes, ZeroConfig(3)).stored)
    assert stored((8, 16, 8), ("layers", "embed", "mlp")) == (None, "data", "tensor")
    assert stored((8, 6, 8), ("layers", "embed", "mlp")) == (None, None, ("tensor", "data"))
    assert stored((8, 6, 10), ("layers", "embed", "mlp")) == (None, None, "tensor")
    assert stored((16, 8), ("vocab", "embed")) == ("tensor", "data")


def test_fewer_kv_heads_than_tensor_are_stored_whole_over_it() -> None:
    found, _ = placements(dataclasses.replace(MODELS["llama"], num_kv_heads=2), 2, 4, 1)
    assert found["layers/attention/k"].reasons == ("whole over tensor: kv_heads 2 is no multiple of tensor 4",)
    assert "tensor" not in found["layers/attention/k"].stored
    assert "tensor" in found["layers/attention/q"].stored


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 5, 8)])
def test_collecting_every_stored_shard_gives_the_leaf_back(shape: tuple[int, ...]) -> None:
    """Also of a dim that tensor and ZeRO share, and of one layer's slice of a stack."""
    mesh = equivalence.program(MODELS["llama"], Layout(2, 2)).mesh
    p = place(ParamSpec(shape, ("layers", "embed", "mlp"), params.zeros), mesh.shape, ZeroConfig(3))
    leaf = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def both(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gather_shard(shard, p, ("data", "tensor")), gather_shard(shard[1], p, ("data", "tensor"))

    out = PartitionSpec("data", None, "tensor"), PartitionSpec("data", "tensor")
    stack, layer = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=p.stored, out_specs=out))(leaf)
    assert np.array_equal(stack, np.concatenate([leaf, leaf]))  # once for each device of data
    assert np.array_equal(layer, np.concatenate([leaf[1], leaf[1]]))


def test_zero_splits_over_the_axes_that_a_leaf_allows() -> None:
    """32 is no multiple of data 2 x sequence 3, but of data 2; 33 of sequence 3; 35 of neither."""
    sizes = {"pipeline": 1, "data": 2, "sequence": 3, "tensor": 1}
    for size, axes, whole in ((32, ("data",), "sequence"), (33, ("sequence",), "data"), (35, (), "data x sequence")):
        found = place(ParamSpec((size,), ("embed",), ones), sizes, ZeroConfig(1))
        assert found.zero_axes == axes
        assert found.reasons == (f"whole over {whole}: no dim of ({size},) is a multiple of 6",)
    assert place(ParamSpec((36,), ("embed",), ones), sizes, ZeroConfig(1)).zero_axes == ("data", "sequence")
