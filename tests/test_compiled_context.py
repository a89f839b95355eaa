"""Context parallelism in the program for GPUs: what hides behind what, and what is held."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import compat, launch
from sharded_train.ops import context, context_cost
from sharded_train.ops.saved import SAVED
from sharded_train.rehearse import clusters, computed, hlo, wires
from tests.test_context import with_gradients

pytestmark = pytest.mark.skipif(
    not launch.has_plugin(), reason="JAX's CUDA plugin is not installed: make setup-rehearse"
)
SEQ, HEADS, KV_HEADS, DIM = 16384, 4, 2, 64
OPTIONS: dict[str, str | bool] = {"xla_gpu_experimental_parallel_collective_overlap_limit": "8"}


def mesh_of(size: int) -> Mesh:
    devices = compat.compile_only_devices(clusters.parse("h100:1x8").target, 1, 8)
    return Mesh(np.array(devices).reshape(-1, size), ("data", "sequence"))


@functools.cache
def compiled(strategy: context_cost.Strategy, size: int, window: int | None = None) -> tuple[Any, Mesh]:
    """Output and gradients of one layer's attention, a row on each group of devices."""
    mesh, spec = mesh_of(size), P("data", "sequence")
    fn = functools.partial(context.context_attention, implementation="cudnn", strategy=strategy, windows=(window,))
    run = jax.shard_map(with_gradients(fn), mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 4)
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    rows = 8 // size
    args = [of((rows, SEQ, n, DIM), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return jax.jit(run).lower(*args, of((rows, SEQ), jnp.int32)).compile(compiler_options=OPTIONS), mesh


def test_every_hop_of_the_ring_hides_behind_a_product() -> None:
    """Of layers in a loop: behind one block of attention, and at last behind the product before attention."""
    mesh, rows, spec = mesh_of(4), 2, P("data", "sequence")
    keep = jax.checkpoint_policies.save_only_these_names(SAVED)

    def layers(x: jax.Array, w: jax.Array, segments: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q = checkpoint_name(x @ w[0], SAVED).reshape(*x.shape[:2], HEADS, DIM)
            k, v = (checkpoint_name(x @ w[i, :, : KV_HEADS * DIM], SAVED) for i in (1, 2))
            k, v = (a.reshape(*x.shape[:2], KV_HEADS, DIM) for a in (k, v))
            a = context.context_attention(q, k, v, segments, "cudnn", "ring")
            return x + a.reshape(x.shape) @ w[3], None

        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=keep, prevent_cse=False), x, w)
        return (y.astype(jnp.float32) ** 2).sum()

    def step(x: jax.Array, w: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_x, d_w = jax.grad(layers, (0, 1))(x, compat.vary(w, mesh.axis_names), segments)
        return d_x, jax.lax.psum(d_w, mesh.axis_names)

    run = jax.shard_map(step, mesh=mesh, in_specs=(spec, P(), spec), out_specs=(spec, P()))
    of = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    width = HEADS * DIM
    args = of((rows, SEQ, width), jnp.bfloat16, spec), of((3, 4, width, width), jnp.bfloat16, P())
    program = jax.jit(run).lower(*args, of((rows, SEQ), jnp.int32, spec)).compile(compiler_options=OPTIONS)
    found, unknown = wires.collectives(hlo.parse(program.as_text() or ""), wires.Places.of(mesh))
    assert not unknown
    hops = [one for one in found if one.op == "collective-permute"]
    # XLA may send K and V together with the gradients of the turn before.
    assert sum(one.times * len(one.members) for one in hops) == 3 * (3 + 3 + 3)
    assert all(one.spans for one in hops)
    assert sum(not any("attention" in name for name in one.spans) for one in hops) == 1


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_nothing_has_two_dims_of_a_row(strategy: context_cost.Strategy) -> None:
    """Nor a part of it by a part of it, which is what a mask of documents would be."""
    program, _ = compiled(strategy, 4)
    shapes = {shape.dims for shape in hlo.shapes_in(program.as_text())}
    parts = {SEQ, SEQ // 4, SEQ // 8}
    assert any(SEQ // 4 in dims for dims in shapes)
    assert not [dims for dims in shapes if sum(dim in parts for dim in dims) > 1]


@pytest.mark.parametrize("window", [1024, 6000])
def test_a_window_is_cudnn_s_and_only_its_keys_are_sent(window: int) -> None:
    """Of chunks of 2048 tokens: the chunk's own keys, a corner, and between them the keys that every query sees."""
    program, mesh = compiled("ring", 4, window)
    text, calls = program.as_text(), 2 if window < 2048 else 3
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == calls
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == calls
    assert text.count(f'"sliding_window_length": {window}') == (2 if window < 2048 else 0)
    found, unknown = wires.collectives(hlo.parse(text), wires.Places.of(mesh))
    assert not unknown
    sent = sum(one.wire_bytes * one.times for one in found if "s32" not in one.dtype)
    shape = context_cost.Shape(4, SEQ, HEADS, KV_HEADS, DIM, 2)
    forward, backward = context_cost.wire_bytes("ring", shape, window)
    # In a program by itself XLA keeps what the forward pass received, and sends in bf16 what was fp32 for no sum.
    assert 2 * forward <= sent <= forward + backward
    products = [product for each in computed.count(hlo.parse(text)) for product in each.work.products]
    shown = sum(product.flops - product.hidden for product in products)
    # Each query of every device with as many keys, at a row's beginning too: two products forward, five back.
    assert shown == 2 * (2 + 5) * DIM * HEADS * (SEQ // 4) * window


def test_memory_of_the_ring_falls_with_the_devices() -> None:
    held = [compiled("ring", size)[0].memory_analysis().temp_size_in_bytes for size in (4, 8)]
    assert held[1] / held[0] == pytest.approx(0.5, abs=0.1)
