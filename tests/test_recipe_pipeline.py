"""Pipelines in a recipe: what is refused, with what works instead; what is allowed and said."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from sharded_train.errors import ConfigError
from sharded_train.mesh import stand_ins
from sharded_train.recipe import Recipe, check, from_dict, program_on, warnings_of
from sharded_train.recipe import pipeline as recipe_pipeline
from sharded_train.schedules.simulate import neighbours
from sharded_train.show import describe


def changed(*overrides: str) -> Recipe:
    """12 layers over 4 stages, 8 microbatches, changed by "key=text"."""
    start = ["mesh.pipeline=4", "model.num_layers=12", "train.num_microbatches=8", "train.global_batch_size=64"]
    return from_dict({}, [f"--config.{override}" for override in [*start, *overrides]])


def problems(recipe: Recipe, num_devices: int | None = 8) -> list[str]:
    try:
        check(recipe, num_devices)
    except ConfigError as error:
        return error.problems
    return []


REFUSED = [
    (
        ["pipeline.num_chunks=2"],
        ["mesh.pipeline = 4, pipeline.schedule = 1f1b, pipeline.num_chunks = 2", "has 1 chunk a stage", "interleaved"],
    ),
    (["pipeline.schedule=gpipe", "pipeline.num_chunks=3"], ["gpipe has 1 chunk a stage, not 3", "at 1"]),
    (
        ["pipeline.schedule=interleaved", "pipeline.num_chunks=1"],
        ["interleaved with 1 chunk a stage is 1f1b", "2 chunks or more"],
    ),
    (
        ["pipeline.schedule=interleaved", "pipeline.num_chunks=4"],
        ["4 stages × 4 chunks = 16 chunks, but the model has 12 layers", "at most 3 chunks a stage"],
    ),
    (["model.num_layers=3"], ["4 stages × 1 chunk = 4 chunks", "3 layers", "at most 3 stages"]),
    (["pipeline.layers=3,3,3"], ["layers (3, 3, 3) are 3 numbers", "4 stages × 1 chunk = 4", "(4, 3, 3, 2) works"]),
    (["pipeline.layers=3,3,3,4"], ["sum to 13, but the model has 12", "(4, 3, 3, 2) works"]),
    (["pipeline.layers=6,0,3,3"], ["every chunk but the first and the last needs at least 1"]),
    (["pipeline.num_chunks=0"], ["pipeline.num_chunks = 0: must be at least 1"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
@pytest.mark.parametrize("num_devices", [8, None])
def test_what_does_not_fit_is_refused_with_what_works(
    overrides: list[str], words: list[str], num_devices: int | None
) -> None:
    (problem,) = problems(changed(*overrides), num_devices)
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_the_layers_that_are_offered_work() -> None:
    for layers in ("3,3,3", "3,3,3,4", "12,0,0,0", "13,1,-1,-1"):
        (problem,) = problems(changed(f"pipeline.layers={layers}"))
        (offered,) = re.findall(r"\(([\d, ]+)\) works", problem)
        assert problems(changed(f"pipeline.layers={offered.replace(' ', '')}")) == []


@pytest.mark.parametrize("change", ["model.positions=learned", "model.attention_windows=()"])
def test_layers_of_a_model_that_is_refused_are_no_fault_of_theirs(change: str) -> None:
    (problem,) = problems(changed("pipeline.layers=3,3,3,3", change))
    assert problem.startswith(change.partition("=")[0])


@pytest.mark.parametrize(("num_layers", "stages"), [(4, 2), (4, 4), (6, 4), (30, 8)])
def test_the_layers_that_are_offered_are_those_that_would_be_chosen(num_layers: int, stages: int) -> None:
    shape = [f"model.num_layers={num_layers}", f"mesh.pipeline={stages}"]
    (problem,) = problems(changed(*shape, "pipeline.layers=2,1"))
    chosen = recipe_pipeline.pipe_of(changed(*shape), stages).split.layers.T.ravel()
    assert problem.endswith(f"({', '.join(map(str, chosen))}) works")


def test_a_stage_without_layers_is_said_with_what_would_be_better() -> None:
    small = ["model.num_layers=5", "mesh.pipeline=4"]
    (warning,) = warnings_of(changed(*small), 8)
    assert "mesh.pipeline = 4 leaves stages without layers: they have 2, 2, 1, 0" in warning
    assert "work of 2, 2, 1, 1.21 layers" in warning
    four, two = (recipe_pipeline.pipe_of(changed("model.num_layers=5"), stages) for stages in (4, 2))
    times = [pipe.num_stages * neighbours(pipe.schedule, pipe.costs).time for pipe in (four, two)]
    less = f"{1 - times[1] / times[0]:.0%} less time"
    assert f"with mesh.pipeline = 2 they have 3, 2, and the same devices need {less}" in warning
    assert warnings_of(changed("model.num_layers=4", "mesh.pipeline=2"), 8) == []
    assert not any("without layers" in words for words in warnings_of(changed(*small, "pipeline.layers=2,2,1,0"), 8))
    (warning,) = warnings_of(changed("model.num_layers=4", "mesh.pipeline=3"), None)
    assert "with mesh.pipeline = 1 they have 4" in warning


def test_what_is_wrong_with_a_pipeline_is_told_at_once_with_the_rest() -> None:
    found = problems(changed("pipeline.num_chunks=3", "pipeline.layers=1,2", "model.dropout=2", "mesh.tensor=3"))
    for words in ("has 1 chunk", "are 2 numbers", "model.dropout", "mesh"):
        assert any(words in problem for problem in found), words


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_layers=30"],
        ["pipeline.schedule=interleaved", "pipeline.num_chunks=3"],
        ["pipeline.layers=4,4,4,0"],
        ["train.num_microbatches=1"],
        ["train.num_microbatches=3", "train.global_batch_size=66"],
        ["pipeline.schedule=gpipe"],
    ],
)
def test_what_is_allowed(overrides: list[str]) -> None:
    assert problems(changed(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.num_microbatches=2"], ["2 microbatches on 4 stages", "bubble is", "1f1b with 16 microbatches has"]),
        (["pipeline.schedule=gpipe", "pipeline.layers=3,3,3,3", "model.vocab_size=8"], ["gpipe holds 8 microbatches"]),
        (["pipeline.layers=2,2,2,6"], ["pipeline.layers = 2,2,2,6 makes the step", "% slower than"]),
        (["zero.stage=3"], ["zero.stage = 3", "8 microbatches", "over data a step", "zero.stage = 1", "it saves"]),
        (["zero.stage=2"], ["zero.stage = 2", "8 microbatches", "it saves"]),
        (["mesh.pipeline=1", "pipeline.schedule=gpipe"], ["pipeline.schedule = gpipe changes nothing: mesh.pipeline"]),
        (["mesh.pipeline=1", "pipeline.num_chunks=2"], ["pipeline.num_chunks = 2 changes nothing"]),
        (["mesh.pipeline=1", "pipeline.layers=12"], ["pipeline.layers = (12,) changes nothing"]),
    ],
)
def test_what_costs_more_than_it_brings_is_said(overrides: list[str], words: list[str]) -> None:
    recipe = changed(*overrides)
    assert problems(recipe) == []
    (warning,) = warnings_of(recipe, 8)
    for word in words:
        assert word in warning


def test_a_schedule_that_is_slower_than_1f1b_says_so() -> None:
    """GPipe's ticks pair no forward with a backward: with a head that is dear its stages wait for each other twice."""
    dear = ["pipeline.layers=3,3,3,3", "model.vocab_size=65536", "pipeline.schedule=gpipe"]
    assert any("gpipe takes" in warning and "slower" in warning for warning in warnings_of(changed(*dear), 8))


def test_a_usual_pipeline_has_no_warnings() -> None:
    for overrides in ([], ["pipeline.schedule=interleaved"], ["mesh.tensor=2", "zero.stage=0"]):
        assert warnings_of(changed(*overrides), 8) == []
        assert warnings_of(changed(*overrides), None) == []


def test_bytes_that_zero_moves_are_those_of_its_formulae() -> None:
    """12 layers of one size on 4 stages: 3 each (tied embeddings and a small vocabulary leave the ends alone)."""
    small = ["model.vocab_size=8", "mesh.data=4", "precision.recipe=bf16", "zero.stage=3"]
    recipe = changed(*small)
    pipe = recipe_pipeline.pipe_of(recipe, 4)
    assert pipe.split.layers.ravel().tolist() == [3, 3, 3, 3]
    d, ff = recipe.model.d_model, recipe.model.d_ff
    psi = 3 * (4 * d * d + 3 * d * ff + 2 * d)
    (warning,) = warnings_of(recipe, 16)
    sent, once, saved = (float(number) for number in re.findall(r"([\d.]+) MiB", warning))
    part = psi * 3 / 4 / 2**20
    assert sent == pytest.approx(8 * (2 * 2 + 4) * part, rel=0.01)
    assert once == pytest.approx((2 + 4) * part, rel=0.01)
    assert saved == pytest.approx((2 + 4) * part, rel=0.01)


def test_the_checks_see_the_pipeline_that_the_program_has() -> None:
    recipe = changed("model.num_layers=30", "pipeline.schedule=interleaved", "train.remat=full")
    mesh = describe(recipe, stand_ins("1x8"))["mesh"]["sizes"]
    assert mesh["pipeline"] == 4
    program = program_on(recipe, jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh)))  # type: ignore[arg-type]
    seen = recipe_pipeline.pipe_of(recipe, 4)
    assert program.pipe is not None
    assert (program.pipe.schedule.forward == seen.schedule.forward).all()
    assert (program.pipe.split.layers == seen.split.layers).all()
    assert dataclasses.astuple(program.pipe.costs)[0].tolist() == dataclasses.astuple(seen.costs)[0].tolist()
