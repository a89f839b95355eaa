"""Collectives one after another, for XLA's CPU back end.

That back end starts an instruction as soon as its operands are there, on a pool of threads, and tells collectives apart
by no more than their kind and group. A loop that holds collectives counts as started, and lets the collectives after it
begin, while its own are still to come. Two devices may then meet in different collectives: they wait for each other for
ever, or exchange the wrong arrays without a word. Here every collective is made to need the result of the one before,
in the program's order, so that there is one order on all devices. (A GPU has one anyhow: NCCL's stream.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from sharded_train import compat

REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"}
COLLECTIVES = REDUCTIONS | {"ppermute", "all_gather", "all_gather_invariant", "all_to_all"}
CALLS = {"jit", "closed_call", "eval_jaxpr", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}

Step = tuple[jax.Array, list[Any]]  # the token of the last collective so far, and results


def in_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, called inside the manual `jax.shard_map`, with its collectives in the order in which it calls them."""

    def ordered(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        _, results = _run(jaxpr, jnp.int32(0), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _run(closed: core.ClosedJaxpr, token: jax.Array, args: Sequence[Any]) -> Step:
    """The outputs of a jaxpr whose collectives come after what made `token`."""
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else known[v]
    for eqn in _live(jaxpr):
        with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
            token, results = _one(eqn, token, [read(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return token, [read(v) for v in jaxpr.outvars]


def _live(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Without what nobody uses, which would no longer be dead code once a token depends on it."""
    used = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        # To name an axis is an effect too; others, such as a print, stay.
        lasting = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        if lasting or not used.isdisjoint(eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, core.Literal))
            live.append(eqn)
    return live[::-1]


def _one(eqn: core.JaxprEqn, token: jax.Array, args: list[Any]) -> Step:
    """One equation, after what made `token` if it communicates."""
    name = eqn.primitive.name
    if name in COLLECTIVES:
        results = _bind(eqn, [_after.bind(x, token) for x in args])
        return _token.bind(results[0]), results
    if not any(map(_communicates, core.jaxprs_in_params(eqn.params))):
        return token, _bind(eqn, args)
    if name in CALLS:
        return _run(_called(eqn), token, args)
    if name in INSIDE:
        return INSIDE[name](eqn.params, token, args)
    raise NotImplementedError(f"collectives inside of {name}: in_order.py must learn to go through it")


def _bind(eqn: core.JaxprEqn, args: list[Any]) -> list[Any]:
    made = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return made if eqn.primitive.multiple_results else [made]


def _communicates(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in COLLECTIVES or any(map(_communicates, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _called(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    jaxpr = next(value for value in eqn.params.values() if hasattr(value, "eqns"))
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


# ---- what holds other jaxprs ----------------------------------------------------------------------------------------


def _scan(params: dict[str, Any], token: jax.Array, args: list[Any]) -> Step:
    """The token is carried from turn to turn."""
    num_consts, num_carry = compat.scan_counts(params)
    consts, carry, stacked = args[:num_consts], args[num_consts:][:num_carry], args[num_consts + num_carry :]

    def turn(carry: Any, slices: Any) -> Any:
        token, results = _run(params["jaxpr"], carry[0], [*consts, *carry[1], *slices])
        return (token, results[:num_carry]), results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (token, carry), stacked = lax.scan(turn, (token, carry), stacked, **options)
    return token, [*carry, *stacked]


def _while(params: dict[str, Any], token: jax.Array, args: list[Any]) -> Step:
    """The token is carried from turn to turn; the condition does not communicate."""
    of_cond, of_body = args[: params["cond_nconsts"]], args[params["cond_nconsts"] :][: params["body_nconsts"]]
    carry = args[params["cond_nconsts"] + params["body_nconsts"] :]
    assert not _communicates(params["cond_jaxpr"].jaxpr)
    condition = lambda carry: _run(params["cond_jaxpr"], carry[0], [*of_cond, *carry[1]])[1][0]
    body = lambda carry: _run(params["body_jaxpr"], carry[0], [*of_body, *carry[1]])
    return lax.while_loop(condition, body, (token, carry))  # type: ignore[no-any-return]


def _cond(params: dict[str, Any], token: jax.Array, args: list[Any]) -> Step:
    """Each branch from the same token; of branches that are chosen by platform, the CPU's alone."""
    index, operands = args[0], args[1:]
    platforms = params.get("branches_platforms")
    if platforms is not None:
        mine = next(i for i, names in enumerate(platforms) if names is None or "cpu" in names)
        return _run(params["branches"][mine], token, operands)
    branch = lambda closed: lambda token, *operands: _run(closed, token, operands)
    return lax.switch(index, [branch(closed) for closed in params["branches"]], token, *operands)  # type: ignore[no-any-return]


INSIDE: dict[str, Callable[[dict[str, Any], jax.Array, list[Any]], Step]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}

# ---- a number that is known when an array is there -------------------------------------------------------------------
# As primitives, so that neither gives its result more varying axes than the array has.

_token = core.Primitive("token_of")  # x -> an int32 that is always 0, which XLA cannot know
_token.def_abstract_eval(lambda x: jax.core.ShapedArray((), jnp.int32))
_after = core.Primitive("after")  # (x, token) -> x
_after.def_abstract_eval(lambda x, token: x)


def _lower_token(ctx: mlir.LoweringRuleContext, x: ir.Value) -> list[ir.Value]:
    aval: Any = ctx.avals_in[0]
    start, one = mlir.dense_int_array([0] * aval.ndim), mlir.dense_int_array([1] * aval.ndim)
    first = stablehlo.reshape(_scalar(x.type.element_type), stablehlo.slice(x, start, one, one))
    if aval.dtype == np.bool_:
        bits, first = 8, stablehlo.convert(_scalar(ir.IntegerType.get_signless(8)), first)
    else:
        bits = 8 * aval.dtype.itemsize
        first = stablehlo.bitcast_convert(_scalar(ir.IntegerType.get_signless(bits)), first)
    successor = stablehlo.add(first, mlir.ir_constant(np.dtype(f"int{bits}").type(1)))
    return [stablehlo.convert(_scalar(ir.IntegerType.get_signless(32)), _equal(first, successor))]


def _lower_after(ctx: mlir.LoweringRuleContext, x: ir.Value, token: ir.Value) -> list[ir.Value]:
    aval: Any = ctx.avals_in[0]
    zero = mlir.ir_constant(np.zeros((), aval.dtype))
    zeros = stablehlo.broadcast_in_dim(x.type, zero, mlir.dense_int_array([]))
    return [stablehlo.select(_equal(token, mlir.ir_constant(np.int32(0))), x, zeros)]


def _equal(a: ir.Value, b: ir.Value) -> ir.Value:
    return stablehlo.compare(a, b, stablehlo.ComparisonDirectionAttr.get("EQ"))


def _scalar(element: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get([], element)


mlir.register_lowering(_token, _lower_token)
mlir.register_lowering(_after, _lower_after)
