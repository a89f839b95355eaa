"""`show` and the panel of `train` for a pipeline: bubble, what is in flight, and where the parameters lie."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from sharded_train import report
from sharded_train.mesh import build_mesh, layout, stand_ins
from sharded_train.mesh_picture import draw_mesh
from sharded_train.params import named_leaves
from sharded_train.recipe import Recipe, from_dict, program_on
from sharded_train.recipe import pipeline as recipe_pipeline
from sharded_train.schedule_report import picture as schedule_picture
from sharded_train.schedules.costs import Costs
from sharded_train.schedules.simulate import in_flight, neighbours
from sharded_train.show import bytes_held, describe
from sharded_train.show import pipeline as show_pipeline
from sharded_train.tables import print_facts

SMALL = {
    "model": {"vocab_size": 64, "d_model": 32, "num_layers": 7, "num_heads": 4, "d_ff": 64},
    "mesh": {"pipeline": 2, "tensor": 2},
    "train": {"global_batch_size": 16, "sequence_length": 16, "num_microbatches": 4},
}


def recipe(*overrides: str) -> Recipe:
    return from_dict(SMALL, [f"--config.{override}" for override in overrides])


def pipeline_of(*overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = describe(recipe(*overrides), stand_ins("2x4"))["pipeline"]
    return found


def text_of(asked: Recipe) -> str:
    out, devices = io.StringIO(), stand_ins("2x4")
    picture = draw_mesh(layout(asked.mesh, devices), asked.mesh.order)
    print_facts(describe(asked, devices), picture, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_no_pipeline_no_section() -> None:
    assert pipeline_of("mesh.pipeline=1") is None
    assert "Pipeline" not in text_of(recipe("mesh.pipeline=1"))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_numbers_are_those_of_the_programs_own_table(schedule: str) -> None:
    asked = recipe(f"pipeline.schedule={schedule}")
    facts = describe(asked, jax.devices())["pipeline"]
    pipe = program_on(asked, build_mesh(asked.mesh)).pipe
    assert pipe is not None
    assert facts["bubble"] == neighbours(pipe.schedule, pipe.costs).bubble
    assert facts["in_flight"] == (in_flight(pipe.schedule)[0] / pipe.num_chunks).tolist()
    assert facts["layers"] == pipe.split.layers.tolist()
    assert sum(map(sum, facts["layers"])) == 7
    assert [sum(n) + more for n, more in zip(facts["layers"], facts["padding"], strict=True)] == [
        pipe.num_chunks * pipe.chunk_layers
    ] * 2
    # 4 rows of 8 data ranks' parts: 16 rows / (data 2 x 4 microbatches), 16 tokens / tensor 2
    assert facts["bytes_per_send"] == 2 * 8 * 32 * asked.precision.compute_dtype.itemsize


def test_gpipe_holds_all_microbatches_and_1f1b_the_stages() -> None:
    many = ["train.num_microbatches=8"]
    assert max(pipeline_of("pipeline.schedule=gpipe", *many)["in_flight"]) == 8
    assert pipeline_of(*many)["in_flight"] == [3, 1]


def test_costs_are_in_layers() -> None:
    facts = pipeline_of("pipeline.layers=4,3", "train.remat=full")
    costs = Costs(*(np.asarray(facts["costs"][kind]) for kind in ("forward", "backward", "weights", "together")))
    assert costs.forward[0, 0] == 4
    assert costs.together[0, 0] == 3 * 4
    assert costs.forward[1, 0] > 3  # the head


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_over_a_pipeline_are_those_really_held(stage: int) -> None:
    asked = recipe(f"zero.stage={stage}")
    facts = describe(asked, jax.devices())
    program = program_on(asked, build_mesh(asked.mesh))
    state = program.init(0)
    by_name = dict(named_leaves(state.params, None))
    for p in facts["parameters"]:
        array = by_name[p["name"]]
        assert tuple(p["shape"]) == array.shape
        assert p["bytes"]["master_weights"] == bytes_held(array) == array.addressable_shards[0].data.nbytes
    first = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == first]
    assert facts["state_bytes_total"] == sum(s.data.nbytes for s in shards)
    outside = [p for p in facts["parameters"] if p["axes"][0] != "layers"]
    assert facts["pipeline"]["outside"]["names"] == [p["name"] for p in outside]
    assert {"embedding", "head"} <= set(facts["pipeline"]["outside"]["names"])


def test_bytes_of_the_step_over_a_pipeline_by_hand() -> None:
    """Two stages of four places; a layer's weights one at a time under ZeRO 3; sums outside the layers whole."""
    layer, outside = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 64 * 32 + 32
    here = [*("mesh.tensor=1", "precision.recipe=bf16"), *("train.num_microbatches=1", "pipeline.layers=4,3")]
    for stage, gathered, sums in (
        (1, 4 * layer + outside, 4 * layer + outside),
        (3, layer + outside, layer + outside),  # 4 layers' sums, each a quarter
    ):
        facts = describe(recipe(f"zero.stage={stage}", *here), stand_ins("2x4"))["step_bytes"]
        assert facts["gathered_weights"] == 2 * gathered
        assert facts["gradient_sums"] == 4 * sums


def test_the_section_says_it_in_words() -> None:
    text = text_of(recipe("pipeline.schedule=interleaved"))
    facts = pipeline_of("pipeline.schedule=interleaved")
    assert max(map(len, text.splitlines())) <= 100
    section = text[text.index("\nPipeline\n") : text.index("Bytes on each device")]
    for words in ("interleaved, 2 stages × 2 chunks", f"{facts['bubble']:.1%}", "in flight", "of 4 microbatches"):
        assert words in section, words
    assert "embedding" in section
    assert json.loads(json.dumps(facts)) == facts


def test_the_panel_of_a_run_has_the_bubble_and_what_is_in_flight() -> None:
    facts = pipeline_of("train.num_microbatches=8")
    rows = dict(report.pipeline_rows(facts))
    assert "1f1b, 2 stages of 3 to 4 layers" in rows["pipeline"]
    assert "3 of 8 microbatches in flight at most" in rows["pipeline"]
    assert f"{facts['bubble']:.1%}" in rows["bubble"]
    assert list(report.pipeline_rows(None)) == []


def test_many_stages_are_listed_from_both_ends() -> None:
    wide = dataclasses.replace(recipe(), model=dataclasses.replace(recipe().model, num_layers=64))
    wide = dataclasses.replace(wide, mesh=dataclasses.replace(wide.mesh, pipeline=32, tensor=1))
    facts, out = describe(wide, stand_ins("32x1")), io.StringIO()
    print_facts(facts, "", Console(file=out, width=100, highlight=False))
    section = out.getvalue().partition("\nPipeline\n")[2].partition("Bytes on each device")[0]
    assert "\n7 " in section
    assert "\n8 " not in section
    assert "\n31" in section
    assert "…" in section


@pytest.mark.parametrize("changes", [[], ["model.num_kv_heads=2"], ["model.num_kv_heads=1", "model.activation=gelu"]])
def test_bytes_kept_for_weights_are_those_of_the_executors_buffers(changes: list[str]) -> None:
    asked = recipe("pipeline.schedule=zero_bubble", "train.num_microbatches=8", *changes)
    facts = describe(asked, jax.devices())["pipeline"]
    program = program_on(asked, build_mesh(asked.mesh))
    assert program.pipe is not None
    params, batch = program.abstract_state.params, program.abstract_batch
    jaxpr = jax.make_jaxpr(program.loss_and_grads)(params, batch, jax.random.key(0))
    carried = [var.aval for var in ticks_of(jaxpr.jaxpr, program.pipe.schedule.num_ticks)]
    buffers = (program.pipe.slots.num_kept + 1, program.pipe.chunk_layers, 16)  # tokens
    assert program.pipe.slots.num_kept != program.pipe.slots.num_inputs
    found = [a for a in carried if a.shape[:3] == buffers]
    assert facts["kept_bytes"] == sum(a.size * a.dtype.itemsize for a in found) > 0
    assert pipeline_of()["kept_bytes"] == 0


def ticks_of(jaxpr: Any, num_ticks: int) -> list[Any]:
    """What the loop over ticks carries."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == num_ticks:
            first = eqn.params["num_consts"]
            return list(eqn.invars[first : first + eqn.params["num_carry"]])
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and (found := ticks_of(inner, num_ticks)):
                return found
    return []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_picture_is_of_the_programs_own_table(schedule: str) -> None:
    asked = recipe(f"pipeline.schedule={schedule}", "train.num_microbatches=8")
    facts = json.loads(json.dumps(describe(asked, stand_ins("2x4"))["pipeline"]))
    pipe = recipe_pipeline.pipe_of(asked, 2)
    own = schedule_picture.draw(pipe.schedule, pipe.costs, neighbours(pipe.schedule, pipe.costs), 100)
    drawn, legend = show_pipeline.picture(facts, 100)
    assert drawn.plain == own.plain
    assert "idle" in legend.plain
    assert show_pipeline.image(facts).count("<title>") == pipe.schedule.num_items * 2 * (
        3 if schedule == "zero_bubble" else 2
    )
