"""The collectives that are measured, each with what it must come to.

Sizes and bandwidths follow nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): the size S is that of the larger of what
a device gives and gets, algorithm bandwidth is S / time, and bus bandwidth multiplies it by the part of S that crosses
a device's link, so that it can be compared with the link's own:

    all-reduce                                         2 (n - 1) / n
    all-gather, reduce-scatter, scatter, all-to-all    (n - 1) / n
    broadcast, reduce, permute                         1

XLA has no reduce to one device and no scatter from one: what runs in their place is named in `runs_as`, and their
numbers are those of that. On CPUs neither has it a broadcast.

Inputs are small whole numbers, `value(r, i)` for entry i of rank r, so that sums are exact in any order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train import compat

ITEMSIZE = 4  # fp32, as nccl-tests has by default
MODULUS, STEP = 13, 7
ROOT = 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """One collective over an axis of n devices.

    `run(x, axis)` takes and gives entries = S / 4 numbers, or 1 / n of them where it splits its input or output.
    `want(rank, i, n, part)` is entry i of the result on a rank, `part` being entries / n.
    """

    name: str
    run: Callable[[jax.Array, str], jax.Array]
    want: Callable[[jax.Array, jax.Array, int, int], jax.Array]
    bus: Callable[[int], float]
    splits_input: bool = False
    splits_output: bool = False
    use: str = ""  # where this project has it
    runs_as: str = ""


def value(rank: jax.Array | int, i: jax.Array) -> jax.Array:
    """Entry i of a rank's input, a whole number below MODULUS."""
    return (i + STEP * rank) % MODULUS


def _sum(n: int, i: jax.Array) -> jax.Array:
    return sum((value(rank, i) for rank in range(n)), jnp.zeros_like(i))


def _rank(axis: str) -> jax.Array:
    return lax.axis_index(axis)


def _broadcast(x: jax.Array, axis: str) -> jax.Array:
    """XLA's collective-broadcast, where there is one."""
    summed = lambda x: lax.psum(jnp.where(_rank(axis) == ROOT, x, 0), axis)
    return lax.platform_dependent(  # type: ignore[no-any-return]
        x, cpu=lambda x: compat.vary(summed(x), [axis]), default=lambda x: lax.pbroadcast(x, (axis,), ROOT)
    )


def _exchange(x: jax.Array, axis: str) -> jax.Array:
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def _scatter(x: jax.Array, axis: str) -> jax.Array:
    return lax.dynamic_slice_in_dim(_exchange(x, axis), ROOT, len(x) // lax.axis_size(axis))


def _permute(x: jax.Array, axis: str) -> jax.Array:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


_OTHERS = lambda n: (n - 1) / n
_ALL = lambda n: 1.0

OPERATIONS = {
    each.name: each
    for each in (
        Operation(
            "broadcast", _broadcast, lambda r, i, n, part: value(ROOT, i), _ALL,
            use="initial parameters, configuration", runs_as="an all-reduce on CPUs",
        ),
        Operation(
            "reduce", lax.psum, lambda r, i, n, part: _sum(n, i), _ALL,
            use="statistics on one rank", runs_as="an all-reduce",
        ),
        Operation(
            "all-reduce", lax.psum, lambda r, i, n, part: _sum(n, i), lambda n: 2 * (n - 1) / n,
            use="plain data parallelism (ZeRO 0), the gradients' norm",
        ),
        Operation(
            "scatter", _scatter, lambda r, i, n, part: value(ROOT, r * part + i), _OTHERS, splits_output=True,
            use="placing inputs", runs_as="an all-to-all",
        ),
        Operation(
            "all-gather", functools.partial(lax.all_gather, tiled=True),
            lambda r, i, n, part: value(i // part, i % part), _OTHERS, splits_input=True,
            use="parameters under ZeRO, activations of tensor parallelism",
        ),
        Operation(
            "reduce-scatter", functools.partial(lax.psum_scatter, tiled=True),
            lambda r, i, n, part: _sum(n, r * part + i), _OTHERS, splits_output=True,
            use="gradients under ZeRO, activations of tensor parallelism",
        ),
        Operation(
            "all-to-all", _exchange, lambda r, i, n, part: value(i // part, r * part + i % part), _OTHERS,
            use="heads for tokens in attention (ulysses)",
        ),
        Operation(
            "permute", _permute, lambda r, i, n, part: value((r - 1) % n, i), _ALL,
            use="stages of a pipeline, keys and values of ring attention",
        ),
    )
}  # fmt: skip


def programs(
    operation: Operation, mesh: Mesh, axis: str, entries: int
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Three jitted functions: the input on every device, the collective, and how many entries of its result are wrong.

    All groups of the axis work at once, as they do in training. `entries` is a multiple of the axis' size.
    """
    n, spec = mesh.shape[axis], P(mesh.axis_names)
    assert entries % n == 0, (entries, n)
    part = entries // n
    given, got = (part if split else entries for split in (operation.splits_input, operation.splits_output))

    def start() -> jax.Array:
        made = value(_rank(axis), jnp.arange(given)).astype(jnp.float32)
        return compat.vary(made, mesh.axis_names)

    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope(operation.name):
            return compat.vary(operation.run(x, axis), mesh.axis_names)

    def wrong(y: jax.Array) -> jax.Array:
        want = operation.want(_rank(axis), jnp.arange(got), n, part).astype(jnp.float32)
        return lax.psum(compat.vary(jnp.sum(y != want), mesh.axis_names), mesh.axis_names)

    shards = functools.partial(jax.shard_map, mesh=mesh)
    return (
        jax.jit(shards(start, in_specs=(), out_specs=spec)),
        jax.jit(shards(run, in_specs=spec, out_specs=spec)),
        jax.jit(shards(wrong, in_specs=spec, out_specs=P())),
    )
