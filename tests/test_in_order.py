"""On CPUs every collective waits for the one before it: read from the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharded_train import in_order as module
from sharded_train.equivalence import MODELS, Layout, hard_batch, program
from sharded_train.in_order import in_order
from sharded_train.rehearse import hlo

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"}


def unordered(text: str) -> list[str]:
    """Collectives, and what holds some, that may begin before an instruction that holds some has ended."""
    program = hlo.parse(text)

    def communicates(instruction: hlo.Instruction) -> bool:
        inside = (i for called in program.called(instruction) for i in called)
        return instruction.opcode in COLLECTIVES or any(map(communicates, inside))

    found = []
    for computation in program.computations.values():
        before: dict[str, set[str]] = {}  # of each instruction, those that it waits for
        holders: list[str] = []
        for i in computation:
            before[i.name] = set().union(*(before[name] for name in i.operands))
            if not communicates(i):
                continue
            found += [f"{i.name} may begin before {name} has ended" for name in holders if name not in before[i.name]]
            if i.opcode not in COLLECTIVES:
                holders.append(i.name)
                before[i.name].add(i.name)
    return found


LAYOUTS = {
    "layers": ("llama", Layout(data=4, tensor=2, zero=3, num_microbatches=2, remat="full")),
    "overlap": ("llama", Layout(data=2, tensor=2, zero=0, num_microbatches=2, overlap=True)),
    "pipeline": ("deep", Layout(pipeline=4, tensor=2, num_microbatches=8, remat="selective")),
    "ring": ("llama", Layout(sequence=4, tensor=2, strategy="ring", remat="selective")),
}


def compiled(name: str) -> str:
    model, layout = LAYOUTS[name]
    made = program(MODELS[model], layout)
    rows = hard_batch(made.model, 0)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=made.batch_sharding), rows)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(made.loss_and_grads).lower(made.abstract_state.params, batch, key).compile().as_text() or ""


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_have_one_order(name: str) -> None:
    assert unordered(compiled(name)) == []


def test_without_it_they_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_train.step.in_order", lambda fn: fn)
    assert unordered(compiled("overlap"))


def ways(x: jax.Array) -> tuple[jax.Array, ...]:
    """Collectives of every kind, in everything that can hold some."""
    moved = lax.all_to_all(lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), "data", 0, 0, tiled=True)
    _, scanned = lax.scan(lambda c, row: (c + lax.psum(row, "data"), lax.pmax(row, "data")), jnp.zeros(3), x)
    looped = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, lax.psum(s[1], "data")), (0, jnp.ones(3)))[1]
    chosen = lax.cond(x[0, 0] > 0, lambda a: lax.psum(a, "data"), lambda a: 2 * lax.psum(a, "data"), x)
    saved = jax.grad(lambda a: jax.checkpoint(lambda b: lax.psum(jnp.sin(b), "data"))(a).sum())(x)
    bools = lax.all_gather(x > 0, "data").all(0)
    halves = lax.psum_scatter(x.astype(jnp.bfloat16), "data", scatter_dimension=0, tiled=True)
    return moved, scanned, looped, chosen, saved, bools, halves


def test_results_and_types_stay_as_they_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.random.normal(jax.random.key(0), (16, 3)).at[5, 1].set(jnp.nan).at[9, 2].set(jnp.inf)
    out_specs = (P("data"), P(), P(), P(), P("data"), P("data"), P("data"))
    run = lambda fn: jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=out_specs))(x)
    for got, wanted in zip(run(in_order(ways)), run(ways), strict=True):
        assert got.dtype == wanted.dtype
        assert jnp.array_equal(got, wanted, equal_nan=True)


def test_what_it_cannot_go_through_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSIDE", {})
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    fn = lambda x: lax.scan(lambda c, row: (c, lax.psum(row, "data")), 0, x)[1]
    with pytest.raises(NotImplementedError, match=r"collectives inside of scan: in_order.py must learn"):
        jax.jit(jax.shard_map(in_order(fn), mesh=mesh, in_specs=P("data"), out_specs=P()))(jnp.ones((4, 3)))
