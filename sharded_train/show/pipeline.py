"""`show` of a pipeline: its schedule, which stage has which layers, what waits where, and what lies on every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from sharded_train.pipeline import Pipeline
from sharded_train.recipe.pipeline import one_chunk_of
from sharded_train.schedule_report import picture as schedule_picture
from sharded_train.schedules.build import make
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import neighbours
from sharded_train.schedules.table import Schedule
from sharded_train.step import Program
from sharded_train.verbs import schedule as schedule_verb

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def describe(recipe: Recipe, program: Program, parameters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `verbs.schedule.describe` tells of the schedule, and of the layers. Bytes are those of one device.

    Times are in units of one layer's forward of a microbatch. `layers [stage][chunk]` are numbers of layers, `loads`
    the same with the head's work in it; `padding [stage]` is how many more a stage has room for, which hold zeros.
    `kept_bytes` are those of what zero_bubble leaves for the backwards of the weights, in all slots: input and
    cotangent of every product. `outside` are the parameters that belong to no stage: ZeRO splits their state over the
    stages too, and the step has them whole on every stage.
    """
    pipe, sizes = program.pipe, program.plan.sizes
    assert pipe is not None
    rows = recipe.train.global_batch_size // (sizes["data"] * sizes.get("replica", 1)) // pipe.schedule.num_microbatches
    seq = recipe.train.sequence_length // (sizes["tensor"] * sizes["sequence"])
    one = rows * seq * recipe.model.d_model * recipe.precision.compute_dtype.itemsize
    facts = schedule_verb.describe(pipe.schedule, pipe.costs, one, one_chunk_of(recipe, pipe).costs)
    del facts["remarks"]  # are among the recipe's warnings
    outside = [p for p in parameters if p["axes"][0] != "layers"]
    total = lambda *kinds: sum(p["bytes"].get(kind, 0) for p in outside for kind in kinds)
    return {
        **facts,
        "kept_bytes": _kept_bytes(recipe, pipe, sizes, rows),
        "layers": pipe.split.layers.tolist(),
        "padding": (pipe.num_chunks * pipe.chunk_layers - pipe.split.layers.sum(1)).tolist(),
        "loads": pipe.split.loads.tolist(),
        "outside": {
            "names": [p["name"] for p in outside],
            "state_bytes": total("master_weights", "moments", "averaged_weights"),
            "step_bytes": total("gathered_weights", "gradient_sums"),
        },
    }


def _kept_bytes(recipe: Recipe, pipe: Pipeline, sizes: Mapping[str, int], rows: int) -> int:
    """Inputs (one where products share it) and cotangents of a chunk's layers, in all slots and the one for nobody."""
    if pipe.schedule.weights is None:
        return 0
    model, tensor = recipe.model, sizes["tensor"]
    heads, kv = (n * model.dim_per_head // tensor for n in (model.num_heads, model.kv_heads))
    kv = 0 if tensor > 1 and model.kv_heads % tensor else kv  # weights that devices share have their gradient at once
    up = 2 if model.activation == "swiglu" else 1
    attention = model.d_model + heads + 2 * kv + heads + model.d_model
    mlp = model.d_model + up * model.d_ff // tensor + model.d_ff // tensor + model.d_model
    tokens = rows * recipe.train.sequence_length // sizes["sequence"]
    slots = (pipe.slots.num_kept + 1) * pipe.chunk_layers
    return slots * tokens * (attention + mlp) * recipe.precision.compute_dtype.itemsize


def picture(facts: Mapping[str, Any], width: int) -> list[Text]:
    """The schedule over simulated time in so many characters, and what its letters mean."""
    schedule, costs = _made(facts)
    legend = Text(schedule_picture.legend(schedule), style="dim")
    return [schedule_picture.draw(schedule, costs, neighbours(schedule, costs), width), legend]


def image(facts: Mapping[str, Any]) -> str:
    """The same as SVG."""
    schedule, costs = _made(facts)
    return schedule_picture.svg(schedule, costs, neighbours(schedule, costs), schedule_verb.title(facts))


def _made(facts: Mapping[str, Any]) -> tuple[Schedule, Costs]:
    """What `describe` described."""
    kinds = ("forward", "backward", "weights", "together")
    costs = Costs(*(np.asarray(facts["costs"][kind]) for kind in kinds))
    stages, microbatches, chunks = (facts[f"num_{what}"] for what in ("stages", "microbatches", "chunks"))
    return make(facts["schedule"], stages, microbatches, chunks, costs), costs
