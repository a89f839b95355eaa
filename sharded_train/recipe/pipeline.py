"""What a recipe's pipeline must satisfy, what of it changes nothing, and what costs more than it brings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharded_train import params
from sharded_train.errors import ConfigError
from sharded_train.mesh import AXES
from sharded_train.models import Model
from sharded_train.pipeline import Pipeline, PipelineConfig, pipeline_of
from sharded_train.recipe import attention as recipe_attention
from sharded_train.recipe import checks as recipe_checks
from sharded_train.recipe.ranges import MOST_LAYERS
from sharded_train.schedule_report.remarks import remarks
from sharded_train.schedules.build import default_chunks, make
from sharded_train.schedules.simulate import neighbours
from sharded_train.schedules.split import split
from sharded_train.sharding import is_placement, plan_of
from sharded_train.tables import bytes_in_words

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe

BF16, FP32 = 2, 4  # bytes


def problems(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """What the schedule or the split of the layers refuses, before anything is built."""
    chosen, p, num_layers = recipe.pipeline, sizes.get("pipeline", 1), recipe.model.num_layers
    found, chunks = [], _chunks(chosen)
    if p <= 1 or not all(1 <= n <= MOST_LAYERS for n in (num_layers, chunks)):
        return []  # out of range, which is told of elsewhere
    asked = f"mesh.pipeline = {p}, pipeline.schedule = {chosen.schedule}, pipeline.num_chunks = {chunks}"
    for refuses in (
        lambda: make(chosen.schedule, 2, 1, chunks),  # what it refuses is so for any number of stages
        lambda: split(num_layers, p, chunks, head=_head_load(recipe), layers=chosen.layers),
    ):
        try:
            refuses()
        except ConfigError as error:
            found += [f"{asked}: {problem}" for problem in error.problems]
    return found


def warnings(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """Of a checked recipe, one sentence for each; `sizes` are the axes' sizes as far as they are known."""
    if sizes.get("pipeline") == 1:
        return _without_effect(recipe.pipeline)
    if "pipeline" not in sizes:
        return []
    pipe = pipe_of(recipe, sizes["pipeline"])
    found = [f"pipeline: {words}" for words in remarks(pipe.schedule, pipe.costs, one_chunk_of(recipe, pipe).costs)]
    if pipe.schedule.weights is not None:
        found.append(
            f"pipeline: {pipe.schedule.name} keeps inputs and cotangents of every product until their weights' turn; "
            "in every program compiled so far that took more time than the bubble it fills (docs/measurements.md): see "
            "with 'sharded-train rehearse --compare' whether it does here"
        )
    return [*found, *_layers(recipe, pipe), *_empty(recipe, pipe), *_zero(recipe, pipe, sizes)]


def pipe_of(recipe: Recipe, num_stages: int) -> Pipeline:
    """The pipeline that a checked recipe's program has."""
    train = recipe.train
    full = train.remat == "full"
    return _pipe(recipe.model, recipe.pipeline, num_stages, train.num_microbatches, train.sequence_length, full)


@functools.lru_cache(maxsize=8)
def _pipe(model: Model, config: PipelineConfig, p: int, m: int, sequence_length: int, remat: bool) -> Pipeline:
    return pipeline_of(
        config, model.param_specs(), p, m, sequence_length=sequence_length, remat=remat, windows=model.windows
    )


def one_chunk_of(recipe: Recipe, pipe: Pipeline) -> Pipeline:
    """What another schedule is compared with: 1F1B with the layers split so that it is fastest."""
    if pipe.schedule.name == "1f1b":
        return pipe
    return pipe_of(dataclasses.replace(recipe, pipeline=PipelineConfig()), pipe.num_stages)


def _head_load(recipe: Recipe) -> float:
    """What head and loss cost, in layers, as the program's split counts them: so what is offered is what it takes.

    0 without layers of one's own, where nothing is offered, and where the model itself is told of elsewhere.
    """
    told = (recipe_checks.out_of_range, recipe_checks.contradictions, recipe_attention.problems)
    if recipe.pipeline.layers is None or any(problems(recipe) for problems in told):
        return 0.0
    model, train = (
        dataclasses.replace(recipe.model, num_layers=1),
        dataclasses.replace(recipe.train, num_microbatches=1),
    )
    alone = dataclasses.replace(recipe, model=model, train=train, pipeline=PipelineConfig())
    return float(pipe_of(alone, 1).split.loads.sum()) - 1


def _chunks(config: PipelineConfig) -> int:
    return default_chunks(config.schedule) if config.num_chunks is None else config.num_chunks


def _without_effect(config: PipelineConfig) -> list[str]:
    return [
        f"pipeline.{field.name} = {value} changes nothing: mesh.pipeline is 1"
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    ]


def _layers(recipe: Recipe, pipe: Pipeline) -> list[str]:
    """Whether layers of one's own are slower than those that would be chosen."""
    if recipe.pipeline.layers is None:
        return []
    own = dataclasses.replace(recipe.pipeline, layers=None)
    best = pipe_of(dataclasses.replace(recipe, pipeline=own), pipe.num_stages)
    slower = neighbours(pipe.schedule, pipe.costs).time / neighbours(best.schedule, best.costs).time - 1
    if slower < 0.01:
        return []
    layers = ",".join(map(str, best.split.layers.T.ravel()))
    return [
        f"pipeline.layers = {','.join(map(str, recipe.pipeline.layers))} makes the step {slower:.0%} slower than "
        f"{layers}, which is taken without it"
    ]


def _empty(recipe: Recipe, pipe: Pipeline) -> list[str]:
    """Stages that were left without layers, and the most stages of which none is, with the same devices."""
    p, layers = pipe.num_stages, pipe.split.layers.sum(1)
    if recipe.pipeline.layers is not None or layers.all():
        return []
    loads = ", ".join(f"{load:.3g}" for load in pipe.split.loads.sum(1))
    said = (
        f"mesh.pipeline = {p} leaves stages without layers: they have {', '.join(map(str, layers))}, which with head "
        f"and loss is the work of {loads} layers"
    )
    for fewer in (q for q in range(p - 1, 0, -1) if p % q == 0):
        other = pipe_of(recipe, fewer)
        has, time = other.split.layers.sum(1), neighbours(other.schedule, other.costs).time
        if has.all():
            saved = 1 - fewer * time / (p * neighbours(pipe.schedule, pipe.costs).time)
            needs = f"need {abs(saved):.0%} {'less' if saved > 0 else 'more'} time"
            listed = ", ".join(map(str, has))
            return [f"{said}; with mesh.pipeline = {fewer} they have {listed}, and the same devices {needs}"]
    return [said]


def _zero(recipe: Recipe, pipe: Pipeline, sizes: Mapping[str, int]) -> list[str]:
    """ZeRO 2 and 3, whose layers' weights or gradients cross data once for each microbatch."""
    zero, m, data = recipe.zero, recipe.train.num_microbatches, sizes.get("data", 1)
    ranks = (zero.group_size or data) * sizes.get("sequence", 1)
    if zero.stage < 2 or m == 1 or ranks == 1 or len(sizes) < len(AXES):
        return []
    weight, gradient = recipe.precision.compute_dtype.itemsize, BF16 if zero.reduce_dtype == "bfloat16" else FP32
    layers = _layer_parameters(recipe, pipe, sizes) * (ranks - 1) / ranks
    once, each = layers * (weight + gradient), layers * gradient
    sent = m * (each + 2 * layers * weight) if zero.stage == 3 else layers * weight + m * each
    saved = layers * FP32 + (layers * weight if zero.stage == 3 else 0)
    if sent - once <= saved:
        return []
    axes = " and ".join(axis for axis in ("data", "sequence") if sizes.get(axis, 1) > 1)
    return [
        f"zero.stage = {zero.stage} over mesh.pipeline = {pipe.num_stages} with {m} microbatches: each device moves "
        f"{bytes_in_words(round(sent))} of its layers' weights and gradients over {axes} a step, zero.stage = 1 "
        f"{bytes_in_words(round(once))}; it saves {bytes_in_words(round(saved))} of memory"
    ]


def _layer_parameters(recipe: Recipe, pipe: Pipeline, sizes: Mapping[str, int]) -> float:
    """Of the stage with most layers, on one tensor rank."""
    plan = plan_of(recipe.model.param_specs(), {**sizes, "pipeline": 1}, recipe.zero)
    stacked = [p for _, p in params.named_leaves(plan.placements, is_placement) if p.spec.stacked]
    one = sum(math.prod(plan.local_shape(p.spec.shape, p.gathered)[1:]) for p in stacked)
    return float(one * pipe.split.layers.sum(1).max())
