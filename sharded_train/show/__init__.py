"""`show`: what a recipe means before it runs, on the devices here or on a cluster that is not there.

Nothing is compiled and no array is made: bytes follow from specs and axis sizes. State is what stays between steps.
What is listed for the step comes on top of it; activations and the compiler's own buffers come on top of both.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from json import dumps
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sharded_train import params
from sharded_train.attending import Attending
from sharded_train.errors import ConfigError
from sharded_train.flops import CONVENTION, flops_of
from sharded_train.links import hosts_of, links
from sharded_train.mesh import layout, stand_ins
from sharded_train.mesh_picture import draw_mesh
from sharded_train.recipe import Recipe, check, program_on, warnings_of
from sharded_train.recipe.checks import fits
from sharded_train.sharding import Placement, dims_of, is_placement
from sharded_train.show.pipeline import describe as describe_pipeline
from sharded_train.step import Program
from sharded_train.tables import print_facts

FP32 = 4  # bytes


def show(recipe: Recipe, *, cluster: str | None = None, json: bool = False) -> int:
    """Print the facts of a recipe as tables or as JSON; `cluster` as of `stand_ins`, None the devices here."""
    devices = jax.devices() if cluster is None else stand_ins(cluster)
    try:
        facts = describe(recipe, devices)
    except ConfigError as error:
        here = [] if cluster else ["those are the devices here; --cluster=HOSTSxDEVICES shows it on others"]
        raise ConfigError([*error.problems, *here]) from error
    if json:
        print(dumps(facts, indent=2))
    else:
        print_facts(facts, draw_mesh(layout(recipe.mesh, devices), recipe.mesh.order))
    return 0


def describe(recipe: Recipe, devices: Sequence[Any]) -> dict[str, Any]:
    """The facts of a recipe in values that JSON can hold. All bytes are those of one device; all devices are alike.

    Raises ConfigError with everything that is wrong with the recipe on these devices.
    """
    check(recipe, len(devices))
    array, names = layout(recipe.mesh, devices, functools.partial(fits, recipe)), recipe.mesh.order
    mesh = cast(Mesh, AbstractMesh(array.shape, names))  # the program is asked for shapes only
    program = program_on(recipe, mesh)
    parameters = _parameters(program)
    totals = {kind: sum(p["bytes"][kind] for p in parameters) for kind in parameters[0]["bytes"]}
    state = {kind: totals[kind] for kind in ("master_weights", "moments", "averaged_weights") if kind in totals}
    held = sum(bytes_held(leaf) for leaf in jax.tree.leaves(program.abstract_state))
    if recipe.precision.recipe == "fp8_delayed":
        state["scales"] = sum(bytes_held(leaf) for leaf in jax.tree.leaves(program.abstract_state.scaling))
    flops = flops_of(program)
    attending = program.attending_on(array.flat[0].platform, links(array, names)["sequence"])
    return {
        "mesh": mesh_facts(array, names),
        "zero_stage": recipe.zero.stage,
        "compute_dtype": recipe.precision.compute_dtype.name,
        "recipe": recipe.precision.recipe,
        "num_microbatches": recipe.train.num_microbatches,
        "num_parameters": params.count(program.specs),
        "num_layers": recipe.model.num_layers,
        "pipeline": None if program.pipe is None else describe_pipeline(recipe, program, parameters),
        "attention": _attention(attending),
        "context": _context(attending),
        "parameters": parameters,
        "state_bytes": {**state, "counters": held - sum(state.values())},
        "state_bytes_total": held,
        "step_bytes": {kind: n for kind, n in totals.items() if kind not in state},
        "tokens_per_step": flops.num_tokens,
        "flops_per_step": {**flops.by_kind},
        "flops_per_step_total": flops.total,
        "flops_per_token": flops.per_token,
        "flops_convention": CONVENTION,
        "warnings": [*warnings_of(recipe, len(devices)), *attending.warnings()],
    }


def _attention(attending: Attending) -> dict[str, Any]:
    """What computes attention, and in how many layers a query sees how many keys (None: all)."""
    layers = Counter(attending.model.layer_windows)
    return {"by": attending.implementation, "layers": [[window, n] for window, n in layers.items()]}


def _context(attending: Attending) -> dict[str, str] | None:
    """How attention works over the sequence axis; None where every device has whole rows."""
    if attending.sizes["sequence"] == 1:
        return None
    strategy, why = attending.context
    return {"strategy": strategy, "why": why}


def bytes_held(leaf: Any) -> int:
    """Bytes that each device holds of an array, or of the shape of one, with a sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def mesh_facts(array: Any, names: Sequence[str]) -> dict[str, Any]:
    """Sizes of the axes of a mesh of devices, and what each rides on."""
    platform = array.flat[0].platform
    return {
        "sizes": dict(zip(names, array.shape, strict=True)),
        "num_devices": array.size,
        "num_hosts": len(set(hosts_of(array).flat)),
        "links": {
            axis: {"kind": link.kind, "hosts": link.hosts, "per_host": link.per_host, "words": link.words(platform)}
            for axis, link in links(array, names).items()
        },
    }


def _parameters(program: Program) -> list[dict[str, Any]]:
    """One entry for each parameter, those of all layers being one."""
    moments = _moments(program)
    averages = params.named_leaves(program.abstract_state.ema, None)
    averaged = {name: {"averaged_weights": bytes_held(leaf)} for name, leaf in averages}
    return [
        {
            "name": name,
            "shape": list(placement.spec.shape),
            "axes": list(placement.spec.axes),
            "stored": dims_of(placement.stored, len(placement.spec.shape)),
            "gathered": dims_of(placement.gathered, len(placement.spec.shape)),
            "bytes": {**_bytes(name, placement, program), "moments": moments[name], **averaged.get(name, {})},
            "left_whole": list(placement.reasons),
        }
        for name, placement in params.named_leaves(program.plan.placements, is_placement)
    ]


def _bytes(name: str, placement: Placement, program: Program) -> dict[str, int]:
    """Bytes of one parameter on a device: its master, and what the step makes of it.

    Under ZeRO-3 the weights of one layer at a time are gathered, and have a gradient, beside those outside the layers.
    Gradients are summed whole under ZeRO 0 and 1 when there are several microbatches, else in their shards; over a
    pipeline also of one microbatch, and those outside the layers under every stage of ZeRO.
    """
    stage, compute = program.plan.zero.stage, program.precision.compute_dtype.itemsize
    stored = _local_size(placement, placement.stored, program)
    whole = program.plan.local_shape(placement.spec.shape, placement.gathered)
    gathered = math.prod(whole)
    at_once = math.prod(whole[1:]) if stage == 3 and placement.spec.stacked else gathered
    is_master = placement.zero_dim is None and compute == FP32  # used as it is stored, without a copy
    whole_sums = stage <= 1 and program.train.num_microbatches > 1
    if program.pipe is not None:
        whole_sums = stage <= 1 or not placement.spec.stacked
    return {
        "master_weights": FP32 * stored,
        "gathered_weights": 0 if is_master else (compute * at_once - _spared(name, at_once, program)),
        "weight_gradients": compute * at_once,
        "gradient_sums": FP32 * (gathered if whole_sums else stored),
    }


def _spared(name: str, at_once: int, program: Program) -> int:
    """Bytes that a parameter is less when it is gathered, in FP8 rather than bf16; none of what is to be in blocks."""
    fp8 = program.fp8
    if fp8 is None or fp8.how.scaling == "blocks":
        return 0
    if name not in {f"layers/{branch}/{weight}" for branch, weight, _ in fp8.entries()}:
        return 0
    in_bf16, num_layers = sum(fp8.bf16_ends), program.model.num_layers
    if program.plan.zero.stage == 3:  # a layer at a time, the largest of which is one in bf16
        return 0 if in_bf16 else at_once
    return at_once * (num_layers - in_bf16) // num_layers


def _local_size(placement: Placement, spec: PartitionSpec, program: Program) -> int:
    """Number of entries on a device under `spec`."""
    return math.prod(program.plan.local_shape(placement.spec.shape, spec))


def _moments(program: Program) -> dict[str, int]:
    """Bytes on a device of all the optimizer's arrays that belong to a parameter, by its name."""
    named = params.named_leaves(program.specs)
    structure: Any = jax.tree.structure(program.abstract_state.params)
    by_parameter = structure.flatten_up_to(program.abstract_state.opt_state)
    return {name: sum(map(bytes_held, slots.values())) for (name, _), slots in zip(named, by_parameter, strict=True)}
