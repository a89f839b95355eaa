"""Makes the saved programs beside this file: `python tests/hlo/make.py [NAME ...]`, with jax's CUDA plugin.

Tiny functions compiled for two H100 hosts of four GPUs, mesh data 2 x sequence 2 x tensor 2 (so that data lies between
hosts, the others within one). Each file is NAME-JAXVERSION.txt; paths of the machine are taken out, and of XLA's
`backend_config` and `metadata` what nobody reads.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_train import compat, gpu_flags
from sharded_train.in_place import in_place_if
from sharded_train.rehearse import clusters

CLUSTER = clusters.parse("h100:2x4")
HERE = Path(__file__).parent
NOISE = r'"(?:operation_queue_id|force_earliest_schedule|reification_cost|device_type|native_emitter_backend_config)":'


def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two gathers that XLA combines, a scatter, a sum over two axes, a permutation, an all-to-all."""
    y = lax.all_gather(x, "data", axis=0, tiled=True) @ lax.all_gather(w, "data", axis=0, tiled=True)
    z = lax.psum_scatter(y, "tensor", scatter_dimension=0, tiled=True)
    total = lax.psum(jnp.sum(z * z), ("data", "tensor"))
    sent = lax.ppermute(z, "sequence", [(0, 1), (1, 0)])
    return lax.all_to_all(sent, "tensor", 0, 1, tiled=True) * total


def loops(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Three microbatches of five layers that gather their weights, then a branch and a loop of unknown length."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ lax.all_gather(w, "data", axis=0, tiled=True)), None

    def microbatch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("layers"):
            return total + lax.scan(layer, x, weights)[0], None

    vary = lambda x: compat.vary(x, ("data", "sequence"))
    total = lax.scan(microbatch, vary(jnp.zeros(x.shape[1:])), vary(x))[0]
    halve = lambda t: vary(lax.psum(t, "sequence") / 4)
    total = lax.cond(total[0, 0] > 0, halve, lambda t: t + lax.psum(t * 3, "sequence"), total)
    grow = lambda t: vary(lax.pmax(t, "sequence")) * 1.5
    return lax.while_loop(lambda t: jnp.sum(lax.psum(t, "sequence")) < 10, grow, total)


def sometimes(x: jax.Array, weights: jax.Array, there: jax.Array) -> jax.Array:
    """Three ticks, each of which works on x with two layers that gather their weights, or passes them over."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ lax.all_gather(w, "data", axis=0, tiled=True)), None

    def work(x: jax.Array) -> jax.Array:
        with jax.named_scope("layers"):
            return lax.scan(layer, x, weights)[0]

    tick = lambda x, there: (in_place_if(there, work, x), None)
    return lax.scan(tick, compat.vary(x, ("data",)), there)[0]


def overlap(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """A gather of the second weight beside the product with the first, and a scatter with nothing beside it."""
    first = x @ a
    second = first @ lax.all_gather(b, "data", axis=0, tiled=True)
    return lax.psum_scatter(second, "tensor", scatter_dimension=0, tiled=True)


def products(x: jax.Array, w: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Products in FP8, in fp32, in e5m2, which cuBLAS lacks; attention with both masks; one computed again."""
    fp8, fp32 = jnp.float8_e4m3fn, jnp.float32
    in_fp8 = lax.dot(x.astype(fp8), w.astype(fp8), preferred_element_type=fp32) * 0.5
    exact = lax.dot(x.astype(fp32), w.astype(fp32), precision="highest")

    narrow = lambda operand: operand.astype(jnp.float8_e5m2)
    fallen = lax.map(lambda rows: lax.dot(narrow(rows), narrow(w), preferred_element_type=fp32), x.reshape(2, 64, 512))
    attend = functools.partial(jax.nn.dot_product_attention, key=k, value=v, implementation="cudnn")
    causal = jax.grad(lambda q: jnp.sum(attend(q, is_causal=True).astype(fp32) ** 2))(q)
    seen = attend(q, mask=jnp.tril(jnp.full((1, 1, 256, 256), x[0, 0] > 0)))
    again = jax.grad(jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ w).astype(fp32))))(w)
    return [in_fp8, exact, fallen, causal, seen, again]


def compile_text(mesh: Mesh, function: Callable[..., Any], out: P, *inputs: tuple[tuple[int, ...], Any, P]) -> str:
    """The optimised program of `function`, manual over the mesh."""
    local = jax.shard_map(function, mesh=mesh, in_specs=tuple(spec for *_, spec in inputs), out_specs=out)
    avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in inputs]
    with compat.cudnn_assumed():
        text = jax.jit(local).lower(*avals).compile(compiler_options=gpu_flags.options("gpu")).as_text()
    assert text is not None
    return text


def clean(text: str) -> str:
    """Without paths and without what only fills the page."""
    text = re.sub(rf'{NOISE}(?:"[^"]*"|\[\]|\{{[^}}]*\}}|false|true),?', "", text).replace("},}", "}}")
    text = re.sub(r' scheduling_name="[^"]*"| end_line=\d+ column=\d+ end_column=\d+|, backend_config=\{\}', "", text)
    return re.sub(r'"[^"\n]*/([\w.\-]+\.py)"', r'"\1"', text)


BF16, FP32 = jnp.bfloat16, jnp.float32
# Function, the layout of its results, and (shape, dtype, layout) of its arguments.
PROGRAMS: dict[str, tuple[Any, ...]] = {
    "mixed": (
        mixed,
        P(("tensor", "data"), "sequence"),
        ((256, 512), BF16, P("data")),
        ((512, 512), BF16, P("data", "tensor")),
    ),
    "loops": (
        loops,
        P("data", "sequence"),
        ((3, 64, 128), FP32, P(None, None, "sequence")),
        ((5, 64, 64), BF16, P(None, "data")),
    ),
    "sometimes": (
        sometimes,
        P("data"),
        ((64, 64), BF16, P("data")),
        ((2, 64, 64), BF16, P(None, "data")),
        ((3,), jnp.bool_, P()),
    ),
    "overlap": (
        overlap,
        P(("data", "tensor"), "sequence"),
        ((8192, 4096), BF16, P(("data", "sequence"))),
        ((4096, 4096), BF16, P(None, "tensor")),
        ((2048, 4096), BF16, P("data", "tensor")),
    ),
    "products": (
        products,
        P(),
        ((128, 512), BF16, P()),
        ((512, 256), BF16, P()),
        *[((2, 256, heads, 64), BF16, P()) for heads in (4, 2, 2)],
    ),
}


def main() -> None:
    devices = compat.compile_only_devices(CLUSTER.target, CLUSTER.num_hosts, CLUSTER.devices_per_host)
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("data", "sequence", "tensor"))
    for name in sys.argv[1:] or PROGRAMS:
        text = compile_text(mesh, *PROGRAMS[name])
        (HERE / f"{name}-{jax.__version__}.txt").write_text(clean(text))
        print(name, len(text), "->", len(clean(text)), "bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
