"""Every mesh is the same run: any layout's loss and gradients against one device's."""

from __future__ import annotations

import functools

import pytest

from sharded_train import equivalence
from sharded_train.equivalence import MODELS, TOLERANCE, Layout, Measurement, measure, program


@functools.cache
def one_device(model: str) -> Measurement:
    return measure(program(MODELS[model], Layout()))


CASES = [
    # ZeRO stages on data x tensor, with everything else varied along
    ("llama", Layout(data=4, tensor=2, zero=0)),
    ("llama", Layout(data=4, tensor=2, zero=1, num_microbatches=2)),
    ("llama", Layout(data=4, tensor=2, zero=2, num_microbatches=2, remat="selective")),
    ("llama", Layout(data=4, tensor=2, zero=3, num_microbatches=2, remat="full")),
    ("llama", Layout(data=8, zero=3)),
    ("llama", Layout(tensor=4, remat="selective")),
    ("llama", Layout(num_microbatches=8, remat="full")),
    ("llama_gqa", Layout(data=2, tensor=4, zero=3, num_microbatches=4)),
    ("llama_gqa", Layout(data=2, tensor=2, zero=2, num_microbatches=2)),
    ("llama_gqa", Layout(data=4, zero=1)),
    ("llama_gqa", Layout(data=2, tensor=4, zero=1, remat="full")),
    ("gpt2", Layout(data=4, tensor=2, zero=3, remat="selective")),
    ("gpt2", Layout(data=2, tensor=4, zero=1, num_microbatches=4)),
    ("gpt2", Layout(data=2, tensor=2, zero=0, num_microbatches=2, remat="full")),
    ("gpt2", Layout(data=8, zero=2)),
    # communication hidden behind products: weights a layer ahead, rows in halves
    ("llama", Layout(data=2, tensor=2, zero=0, num_microbatches=2, overlap=True)),
    ("llama_gqa", Layout(data=2, tensor=2, zero=1, num_microbatches=4, remat="selective", overlap=True)),
    ("llama", Layout(data=4, tensor=2, zero=1, overlap=True)),
    ("gpt2", Layout(data=2, tensor=2, zero=2, num_microbatches=2, remat="full", overlap=True)),
    ("shallow", Layout(data=2, tensor=2, zero=3, num_microbatches=2, overlap=True)),
    ("gpt2", Layout(data=2, tensor=4, zero=3, num_microbatches=2, remat="selective", overlap=True)),
    # pipelines: schedules, uneven layers (the head weighs as much as many), tied tables, any number of microbatches
    ("llama", Layout(pipeline=2, num_microbatches=2, schedule="gpipe", layers=(2, 1))),
    ("llama", Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4)),
    ("deep", Layout(pipeline=4, tensor=2, num_microbatches=8, remat="selective")),
    ("deep", Layout(pipeline=2, num_microbatches=4, schedule="interleaved", chunks=3, remat="full")),
    ("deep", Layout(pipeline=4, data=2, zero=2, num_microbatches=2)),
    ("deep", Layout(pipeline=2, data=2, tensor=2, zero=3, num_microbatches=4, schedule="interleaved", chunks=2)),
    ("deep", Layout(pipeline=2, data=2, zero=1, group=1, num_microbatches=1, remat="full")),
    ("gpt2", Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="gpipe", overlap=True)),
    ("deep", Layout(pipeline=2, num_microbatches=4, schedule="zero_bubble", chunks=1, remat="full")),
    ("deep", Layout(pipeline=2, data=2, tensor=2, zero=1, num_microbatches=4, schedule="zero_bubble", chunks=2)),
    ("gpt2", Layout(pipeline=2, tensor=4, num_microbatches=2, schedule="zero_bubble", chunks=1, remat="selective")),
    ("llama_gqa", Layout(pipeline=2, data=1, tensor=4, num_microbatches=2, schedule="zero_bubble", chunks=1)),
    ("llama", Layout(pipeline=2, data=2, zero=3, num_microbatches=4, schedule="zero_bubble", chunks=1)),
    # rows split over devices: every strategy, with all other axes
    ("llama_gqa", Layout(sequence=2, strategy="ring")),
    ("llama", Layout(sequence=4, tensor=2, strategy="ring", remat="selective")),
    ("gpt2", Layout(sequence=2, tensor=2, data=2, strategy="ring")),
    ("llama", Layout(sequence=2, data=2, tensor=2, zero=3, num_microbatches=2, strategy="ring", overlap=True)),
    ("llama_gqa", Layout(sequence=8, zero=1, strategy="all_gather", remat="full")),
    ("deep", Layout(sequence=2, pipeline=2, tensor=2, num_microbatches=4, strategy="all_gather")),
    ("llama", Layout(sequence=4, pipeline=2, num_microbatches=2, strategy="ring", schedule="gpipe")),
    ("llama", Layout(sequence=2, data=2, tensor=2, zero=2, num_microbatches=2, strategy="ulysses")),
    ("deep", Layout(sequence=2, pipeline=2, data=2, zero=1, num_microbatches=2, strategy="ulysses", chunks=1)),
    # windows of several kinds: whole rows and split ones, uneven stages, each layer with its own
    ("windows", Layout(data=2, tensor=2, zero=3, num_microbatches=2, remat="selective", overlap=True)),
    ("windows", Layout(sequence=2, data=2, tensor=2, zero=1, strategy="ring", overlap=True)),
    ("windows", Layout(sequence=4, pipeline=2, num_microbatches=2, strategy="ring", layers=(3, 2))),
    ("windows", Layout(sequence=8, strategy="all_gather", remat="full")),
    (
        "windows",
        Layout(sequence=2, pipeline=2, tensor=2, num_microbatches=2, strategy="ulysses", schedule="zero_bubble"),
    ),
    # groups of ZeRO smaller than data
    ("llama", Layout(data=4, tensor=2, zero=3, group=2, num_microbatches=2)),
    ("gpt2", Layout(data=8, zero=1, group=4, num_microbatches=1, remat="full")),
]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda x: str(x))
def test_gradients_equal_one_device(model: str, layout: Layout) -> None:
    errors = equivalence.errors(measure(program(MODELS[model], layout)), one_device(model))
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}
