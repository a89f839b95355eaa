"""What stands in the step before it is compiled: what is kept for the backward pass, and what the network carries."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from sharded_train import equivalence
from sharded_train.equivalence import MODELS, SMALL, Layout
from sharded_train.models import stack
from sharded_train.models.block import Remat
from sharded_train.models.decoder import DecoderConfig
from sharded_train.ops import loss
from sharded_train.sharding import ZeroConfig, plan_of
from sharded_train.step import Program


def live_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of all that stand inside of them, that have a result which something uses."""
    used = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for eqn in reversed(jaxpr.eqns):
        if not used.isdisjoint(eqn.outvars):
            used.update(v for v in eqn.invars if not hasattr(v, "val"))
            yield eqn
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                if hasattr(value, "eqns"):
                    yield from live_equations(getattr(value, "jaxpr", value))


def traced(p: Program) -> list[Any]:
    args = (p.abstract_state.params, p.abstract_batch, jax.random.key(0))
    return list(live_equations(jax.make_jaxpr(p.loss_and_grads)(*args).jaxpr))


# Gathered matrices have the factor 11 twice, activations at most once.
ELEVENS = DecoderConfig(vocab_size=88, d_model=44, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=22, d_ff=88)


def kept_by_a_layer(p: Program) -> list[Any]:
    """Shapes and dtypes of what the forward scan over layers stacks up for the backward one, of one layer."""
    backward, forward = (
        e for e in traced(p) if e.primitive.name == "scan" and e.params["length"] == p.model.num_layers
    )
    assert (forward.params["reverse"], backward.params["reverse"]) == (False, True)
    one, all_of_them = forward.params["jaxpr"].jaxpr.outvars, forward.outvars
    stacked = lambda v, many: many.aval.shape == (p.model.num_layers, *v.aval.shape)  # what is not is carried along
    return [v.aval for v, many in zip(one, all_of_them, strict=True) if stacked(v, many)]


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_layers_keep_no_gathered_weights_under_any_policy(recipe: Literal["fp32", "bf16"]) -> None:
    """ZeRO-3's memory: the gather is repeated in the backward pass, and each policy keeps less than the one before."""
    num_bytes = []
    policies: tuple[Remat, ...] = ("none", "selective", "full")
    for remat in policies:
        kept = kept_by_a_layer(equivalence.program(ELEVENS, Layout(4, 2, zero=3, remat=remat), recipe=recipe))
        assert [k for k in kept if k.size % 121 == 0] == []
        num_bytes.append(sum(k.size * k.dtype.itemsize for k in kept))
        if remat == "full":
            assert [k.shape for k in kept] == [(2, 8, 44)]  # its input alone
        if remat == "selective":  # that, and: after attention, q, k, v, gate and up, of this device's heads; and of
            attention = [(2, 16, 2, 22), (2, 2, 16)]  # attention its output and logsumexp
            mine = [(2, 8, 44), (2, 8, 44), (32, 44), (32, 22), (32, 22), *attention]
            assert sorted(k.shape for k in kept) == sorted([*mine, (32, 44), (32, 44)])
    assert num_bytes[0] > num_bytes[1] > num_bytes[2]


def test_keeping_all_that_the_pullback_holds_would_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail: the same look at passes that keep what plain autodiff would."""
    keep_all = lambda *args: [True] * len(jax.tree.leaves(stack._vjp(*args)[1]))
    monkeypatch.setattr(stack, "_depends_on_x", keep_all)
    kept = kept_by_a_layer(equivalence.program(ELEVENS, Layout(4, 2, zero=3)))
    assert [k for k in kept if k.size % 121 == 0]


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 16 * 97)
    sizes = {
        v.aval.size
        for e in traced(equivalence.program(dataclasses.replace(SMALL, vocab_size=97), Layout()))
        for v in e.outvars
    }
    assert 16 * 97 in sizes
    assert 8 * 16 * 97 not in sizes


def on_the_wire(stage: int, reduce_dtype: str) -> dict[str, set[str]]:
    """Dtypes of the arrays, by what is done with them over the 8 devices of data, under bf16."""
    p = equivalence.program(SMALL, Layout(data=8), recipe="bf16")
    zero: Any = ZeroConfig(stage, reduce_dtype)  # type: ignore[arg-type]
    p = dataclasses.replace(p, plan=plan_of(p.specs, p.plan.sizes, zero))
    found: dict[str, set[str]] = defaultdict(set)
    for eqn in traced(p):
        if eqn.primitive.name in ("all_gather", "reduce_scatter", "psum", "psum_invariant"):
            found[eqn.primitive.name] |= {str(v.aval.dtype) for v in eqn.invars if v.aval.shape}
    return {name: dtypes for name, dtypes in found.items() if dtypes}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_travel_in_bf16_and_gradients_in_the_dtype_asked_for(stage: int) -> None:
    for reduce_dtype in ("float32", "bfloat16"):
        found = on_the_wire(stage, reduce_dtype)
        if stage == 0:
            assert list(found.values()) == [{reduce_dtype}]
        else:
            assert found == {"all_gather": {"bfloat16"}, "reduce_scatter": {reduce_dtype}}


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_nothing_is_summed_over_tokens_in_bf16(model: str) -> None:
    """CASES 2, of gains, biases and tables of positions: a GPU adds up in the dtype that it is given."""
    program = equivalence.program(MODELS[model], Layout(data=2, num_microbatches=2), recipe="bf16")
    sums = [e for e in traced(program) if e.primitive.name in ("reduce_sum", "cumsum", "scatter-add")]
    narrow = [f"{e.source_info.name_stack}: {e.invars[0].aval}" for e in sums if e.invars[0].aval.dtype == jnp.bfloat16]
    assert len(sums) > 10
    assert narrow == []
