"""Replicas are compared bit for bit: any flipped bit is named by leaf, device and process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flipping import flipped
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.faults.replicas import Replicas

MESH_SHAPE, AXES = (4, 2), ("data", "tensor")
SPECS = {
    "whole": P(),
    "over_tensor": P(None, "tensor"),
    "over_both": P("data", "tensor"),
    "flat": P(("data", "tensor")),
    "half": P("data"),
    "count": P(),
}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), AXES)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "whole": rng.standard_normal((5, 3)).astype(np.float32),
        "over_tensor": rng.standard_normal((3, 4)).astype(np.float32),
        "over_both": rng.standard_normal((8, 4)).astype(np.float32),
        "flat": rng.standard_normal(16).astype(np.float32),
        "half": rng.standard_normal((4, 6)).astype(jnp.bfloat16),
        "count": np.array(7, np.int32),
    }


@pytest.fixture(scope="module")
def state(mesh: Mesh) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in arrays().items()}


@pytest.fixture(scope="module")
def replicas(mesh: Mesh, state: dict[str, jax.Array]) -> Replicas:
    return Replicas(mesh, state)


def test_alike_nothing_is_told(replicas: Replicas, state: dict[str, jax.Array]) -> None:
    assert replicas.differences(state) == []


@pytest.mark.parametrize(
    ("name", "place", "element", "bit", "others"),
    [
        ("whole", 5, 14, 0, 7),
        ("whole", 0, 0, 31, 7),
        ("over_tensor", 3, 4, 22, 3),
        ("count", 7, 0, 3, 7),
    ],
)
def test_one_flipped_bit_is_named(
    replicas: Replicas, state: dict[str, jax.Array], name: str, place: int, element: int, bit: int, others: int
) -> None:
    (told,) = replicas.differences({**state, name: flipped(state[name], [place], element, bit)})
    device = jax.devices()[place]
    assert told == f"{name}: {device} of process 0 differs from the {others} others that hold the same part"


def test_of_two_neither_is_in_the_majority(replicas: Replicas, state: dict[str, jax.Array]) -> None:
    (told,) = replicas.differences({**state, "half": flipped(state["half"], [6], 1, 9)})
    a, b = jax.devices()[6:8]
    assert told == f"half: {a} of process 0 and {b} of process 0 differ, and none is in the majority"


def test_what_nobody_else_holds_cannot_differ(mesh: Mesh, state: dict[str, jax.Array]) -> None:
    alone = {name: state[name] for name in ("over_both", "flat")}
    assert Replicas(mesh, alone).differences(alone) == []


def test_many_differences_are_cut_short(mesh: Mesh, state: dict[str, jax.Array]) -> None:
    many = {f"leaf{i}": state["whole"] for i in range(14)}
    replicas = Replicas(mesh, many)
    told = replicas.differences({name: flipped(x, [1, 2], 0, 5) for name, x in many.items()})
    assert len(told) == 11
    assert told[-1] == "and 4 more"
    assert "of process 0 and " in told[0]
