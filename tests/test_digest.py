"""Digests: the same wherever the shards lie, and changed by whatever may happen to memory and disks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train.checkpoint import digest

KINDS = (np.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.int32, np.bool_, np.uint16)
SHAPES = ((), (16,), (8, 6), (4, 8, 2), (4, 9000), (0, 4))
SPECS = (P(), P("data"), P("data", "tensor"), P(None, ("tensor", "data")), P("tensor"), P())


def numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.asarray(np.random.default_rng(0).standard_normal(shape) * 5).astype(dtype)


def test_devices_and_the_host_agree_and_parts_add_up() -> None:
    values = {f"{np.dtype(kind).name}{shape}": numbers(shape, kind) for kind in KINDS for shape in SHAPES}
    expected = {name: digest.on_host(x) for name, x in values.items()}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    specs = dict(zip(SHAPES, SPECS, strict=True))
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[x.shape])) for name, x in values.items()}
    assert digest.as_digests(placed, digest.on_devices(placed)) == expected
    for name, x in placed.items():
        found: digest.Digest = (0, 0)
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                start = [bounds.start or 0 for bounds in shard.index]
                found = digest.added(found, digest.on_host(np.asarray(shard.data), start))
        assert found == expected[name], name


@pytest.mark.parametrize("kind", KINDS[:5])
def test_any_flipped_bit_changes_the_first_sum_for_certain(kind: Any) -> None:
    values = numbers((40, 30), kind)
    before = digest.on_host(values)
    bits = 1 if np.dtype(kind) == np.bool_ else 8 * values.itemsize
    for bit in range(bits):
        for place in (0, 1, 29, 30, 777, 1199):
            words = values.copy()
            words.view(f"u{values.itemsize}").reshape(-1)[place] ^= 1 << bit
            assert digest.on_host(words)[0] != before[0]


def test_what_a_weighted_sum_would_miss() -> None:
    """Two signs, a page of zeros or of another page, rows and elements exchanged, far apart too."""
    values = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    before = digest.on_host(values)
    changed = []
    for a, b in (((0, 0), (0, 1)), ((0, 0), (63, 4095)), ((5, 2**11), (9, 2**11))):
        two = values.copy()
        two[a], two[b] = -two[a], -two[b]
        exchanged = values.copy()
        exchanged[a], exchanged[b] = values[b], values[a]
        changed += [two, exchanged]
    for page in range(0, values.size, 1024):
        zeroed = values.copy()
        zeroed.reshape(-1)[page : page + 1024] = 0
        changed.append(zeroed)
    for shift in (1, 2, 32):
        changed.append(np.roll(values, shift, 0))
    changed += [np.roll(values, 1024, 1), np.concatenate([values[:32], values[:32]]), -values]
    digests = {digest.on_host(x) for x in changed}
    assert len(digests) == len(changed)
    assert before not in digests


def test_places_do_not_begin_again_after_32_bits() -> None:
    """Of a leaf with more than 2^32 elements: layers that lie a multiple of 2^32 elements apart are told apart."""
    layer = np.random.default_rng(0).standard_normal((1, 8, 16)).astype(np.float32)
    starts = [(0, 0, 0), (64, 0, 0), (2**32 - 1, 0, 0), (0, 2**26, 0), (0, 0, 2**32 - 16), (0, 0, 2**33)]
    found = [digest.on_host(layer, start) for start in starts]
    assert len(set(found[:5])) == 5
