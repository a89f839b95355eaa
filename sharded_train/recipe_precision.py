"""What the precision recipe asks of a model and a mesh, and what it brings: problems and warnings in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sharded_train.devices import DEVICES
from sharded_train.precision import Bf16Layers, Fp8Config, LossScaleConfig
from sharded_train.precision.blocks import BLOCK

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe

UNIT = 16  # cuBLAS's FP8 products take dims that are multiples of it
BLOCK_SCALED = 10.0  # the compute capability from which on tensor cores take a scale for each block
WORTH = 1024  # outputs of a product: below about so many, quantising its input takes longer than FP8 saves on an H100


def problems(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """What keeps a recipe from running; `sizes` are the axes' sizes as far as they are known."""
    fp8, fp16 = recipe.precision.fp8, recipe.precision.fp16
    found = [
        f"{name} = {value}: must be {words}"
        for name, value, holds, words in (
            ("precision.fp8.amax_history_length", fp8.amax_history_length, fp8.amax_history_length >= 1, "at least 1"),
            ("precision.fp8.margin", fp8.margin, 0 <= fp8.margin <= 64, "from 0 to 64"),
            ("log.precision_every", recipe.log.precision_every, recipe.log.precision_every >= 0, "at least 0"),
            ("precision.fp16.initial", fp16.initial, 1 <= fp16.initial <= 2**24, "from 1 to 2^24"),
            ("precision.fp16.growth_interval", fp16.growth_interval, fp16.growth_interval >= 1, "at least 1"),
            ("precision.fp16.growth_factor", fp16.growth_factor, fp16.growth_factor > 1, "above 1"),
            ("precision.fp16.backoff_factor", fp16.backoff_factor, 0 < fp16.backoff_factor < 1, "above 0 and below 1"),
            ("precision.fp16.hysteresis", fp16.hysteresis, fp16.hysteresis >= 1, "at least 1"),
        )
        if not holds
    ]
    return [*found, *_fp8(recipe, sizes)] if recipe.precision.is_fp8 else found


def _fp8(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[str]:
    if set(recipe.precision.fp8.bf16_products) >= set(_names(recipe)):
        names = ", ".join(_names(recipe))
        yield (
            f"precision.fp8.bf16_products names all of a layer's products ({names}): nothing is left for "
            f"precision.recipe = {recipe.precision.recipe}; leave some out, or use recipe = bf16"
        )
    first, last = recipe.precision.fp8.bf16_layers.first, recipe.precision.fp8.bf16_layers.last
    words = f"precision.fp8.bf16_layers.first {first} + last {last} = {first + last}"
    if min(first, last) < 0:
        yield f"{words}: neither may be below 0"
    elif first + last >= recipe.model.num_layers:
        yield (
            f"{words} of model.num_layers {recipe.model.num_layers}: no layer is left for precision.recipe = "
            f"{recipe.precision.recipe}; keep fewer, or use recipe = bf16"
        )
    blocks = recipe.precision.recipe == "mxfp8"
    unit, reason = (BLOCK, "blocks of 32") if blocks else (UNIT, "FP8, and cuBLAS takes no other sizes")
    for equation, size in dims(recipe, sizes).items():
        if size > 0 and size % unit:
            yield (
                f"{equation} = {size} is no multiple of {unit}: precision.recipe = {recipe.precision.recipe} works in "
                f"{reason} on a device; nearest that work: "
                f"{' or '.join(str(n) for n in (size // unit * unit, size // unit * unit + unit) if n)}"
            )


def on_device(recipe: Recipe, name: str, capability: str) -> list[str]:
    """What keeps a recipe from running on GPUs of a compute capability, such as "9.0"."""
    if recipe.precision.recipe != "mxfp8" or _number(capability) >= BLOCK_SCALED:
        return []
    having = ", ".join(device.name for device in DEVICES.values() if _number(device.compute_capability) >= BLOCK_SCALED)
    return [
        f"precision.recipe = mxfp8 on {name}, of compute capability {capability}: its tensor cores know no scales of "
        f"blocks, which begin with {BLOCK_SCALED} ({having}); take precision.recipe = fp8_current, or bf16"
    ]


def _number(capability: str) -> float:
    """0 for what is no number, as AMD's are."""
    return float(capability) if capability.replace(".", "", 1).isdigit() else 0.0


def dims(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, int]:
    """The dims of the layers' products on one device, by the equation that makes them; 0 where it does not divide."""
    model, train, tensor = recipe.model, recipe.train, sizes.get("tensor", 1)
    if min(model.num_heads, model.kv_heads, model.d_model, tensor, train.num_microbatches) < 1:
        return {}
    over = f" / mesh.tensor {tensor}" if tensor > 1 else ""
    split = lambda n: n // tensor if n % tensor == 0 else 0
    head, kv_heads = model.dim_per_head, model.kv_heads
    found = {
        f"model.d_model {model.d_model}": model.d_model,
        f"model.num_heads {model.num_heads} x head_dim {head}{over}": split(model.num_heads * head),
        f"model.d_ff {model.d_ff}{over}": split(model.d_ff),
    }
    if kv_heads % tensor == 0:
        found[f"model.num_kv_heads {kv_heads} x head_dim {head}{over}"] = split(kv_heads * head)
    else:
        found[f"head_dim {head} of the one kv head of a device"] = head
    if all(axis in sizes for axis in ("data", "sequence")):
        tokens, ways = train.global_batch_size * train.sequence_length, sizes["data"] * sizes["sequence"]
        parts = ways * train.num_microbatches
        by = f"data {sizes['data']} x sequence {sizes['sequence']} x train.num_microbatches {train.num_microbatches}"
        if recipe.precision.recipe == "mxfp8" and tensor > 1 and train.overlap is not False:
            rows, ways = train.global_batch_size, sizes["data"] * train.num_microbatches
            if rows % ways == 0 and rows // ways % 2 == 0:
                parts, by = 2 * parts, f"{by} x 2 halves under train.overlap"
        equation = f"tokens of a device at once, {train.global_batch_size} x {train.sequence_length} / ({by})"
        found[equation] = tokens // parts if tokens % parts == 0 else 0
    return found


def _names(recipe: Recipe) -> tuple[str, ...]:
    gate = ("gate",) if recipe.model.activation == "swiglu" else ()
    return ("q", "k", "v", "out", *gate, "up", "down")


def warnings(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """What changes nothing, or costs more than it brings."""
    return [*_without_effect(recipe), *_too_small(recipe, sizes)]


def _without_effect(recipe: Recipe) -> Iterator[str]:
    precision = recipe.precision
    kind, fp8 = f"precision.recipe is {precision.recipe}", precision.fp8
    without = {
        "fp8_delayed": (),
        "fp8_current": ("amax_history_length", "algorithm", "recalibrate"),
        "mxfp8": ("amax_history_length", "algorithm", "recalibrate", "format"),
    }
    for field in dataclasses.fields(Fp8Config):
        value = getattr(fp8, field.name)
        unused = not precision.is_fp8 or field.name in without[precision.recipe]
        if unused and value != getattr(Fp8Config(), field.name):
            words = f"first {value.first}, last {value.last}" if isinstance(value, Bf16Layers) else value
            yield f"precision.fp8.{field.name} = {words} changes nothing: {kind}"
    if precision.recipe != "fp16" and precision.fp16 != LossScaleConfig():
        yield f"precision.fp16 changes nothing: {kind}"
    for name in fp8.bf16_products if precision.is_fp8 else ():
        if name not in _names(recipe):
            yield f"precision.fp8.bf16_products: this model has no product {name}"


def _too_small(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[str]:
    small = {words: n for words, n in dims(recipe, sizes).items() if words.startswith("model.") and 0 < n < WORTH}
    if recipe.precision.is_fp8 and small:
        words = "; ".join(f"{words} = {n}" for words, n in small.items())
        yield (
            f"precision.recipe = {recipe.precision.recipe} with small products ({words}): below about {WORTH} outputs, "
            "quantising an input takes longer than its product in FP8 saves; bf16 is likely to be faster"
        )
