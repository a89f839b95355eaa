"""What the precision recipe asks of a model and a mesh, and what it brings: problems and warnings in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from sharded_train.devices import DEVICES
from sharded_train.precision import Bf16Layers, Fp8Config, LossScaleConfig
from sharded_train.precision.blocks import BLOCK
from sharded_train.recipe.checks import nearest_multiples, row_unit

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe

UNIT = 16  # cuBLAS's FP8 products take dims that are multiples of it
BLOCK_SCALED = 10.0  # the compute capability from which on tensor cores take a scale for each block
WORTH = 1024  # outputs of a product: below about so many, quantising its input takes longer than FP8 saves on an H100
MOST_MARGIN = 16


def problems(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """What keeps a recipe from running; `sizes` are the axes' sizes as far as they are known."""
    fp8, fp16 = recipe.precision.fp8, recipe.precision.fp16
    found = [
        f"{name} = {value}: must be {words}"
        for name, value, holds, words in (
            ("precision.fp8.amax_history_length", fp8.amax_history_length, fp8.amax_history_length >= 1, "at least 1"),
            (
                "precision.fp8.margin",
                fp8.margin,
                0 <= fp8.margin <= MOST_MARGIN,
                f"from 0 to {MOST_MARGIN}: e4m3 spans 17 powers of two, of which a margin takes one each",
            ),
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
    elif first + last >= recipe.model.num_layers >= 1:
        yield (
            f"{words} of model.num_layers {recipe.model.num_layers}: no layer is left for precision.recipe = "
            f"{recipe.precision.recipe}; keep fewer, or use recipe = bf16"
        )
    yield from _no_multiples(recipe, sizes)


def _no_multiples(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[str]:
    blocks, said = recipe.precision.recipe == "mxfp8", set()
    unit, reason = (BLOCK, "its blocks are of 32 numbers") if blocks else (UNIT, "cuBLAS takes no other sizes")
    for dim in dims(recipe, sizes):
        if dim.key in said or dim.size % unit == 0 or not _in_fp8(recipe, (*dim.outputs, *dim.inputs)):
            continue
        said.add(dim.key)  # what a kv head asks for contains what the others do
        works = nearest_multiples(
            dim.value, math.lcm(dim.whole, unit * dim.ways // math.gcd(unit * dim.ways, dim.times))
        )
        yield (
            f"{dim.equation} is no multiple of {unit}, as precision.recipe = {recipe.precision.recipe} needs every dim "
            f"of a product to be on a device ({reason}); nearest that work: {dim.key} = {' or '.join(map(str, works))}"
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


class Dim(NamedTuple):
    """A dim of a layer's products on one device: of `size` = `value` x `times` / `ways`."""

    key: str  # of the setting that it follows from, whose value is
    value: int
    times: int
    ways: int
    equation: str
    outputs: tuple[str, ...] = ()  # products whose outputs it is
    inputs: tuple[str, ...] = ()  # those that sum over it
    whole: int = 1  # what the value must be a multiple of anyway

    @property
    def size(self) -> int:
        return self.value * self.times // self.ways


def dims(recipe: Recipe, sizes: Mapping[str, int]) -> list[Dim]:
    """Those that are known, and divide."""
    model, train, tensor = recipe.model, recipe.train, sizes.get("tensor", 1)
    if min(model.num_heads, model.kv_heads, model.d_model, tensor, train.num_microbatches) < 1:
        return []
    over = f" / mesh.tensor {tensor}" if tensor > 1 else ""
    head, kv_heads, ups = model.dim_per_head, model.kv_heads, tuple(n for n in _names(recipe) if n in ("gate", "up"))
    heads = lambda n, name: f"model.{name} {n} x head_dim {head}{over} = {n * head // tensor}"
    if kv_heads % tensor:
        kv = Dim("model.head_dim", head, 1, 1, f"model.head_dim = {head}, of a device's one kv head,", ("k", "v"))
    else:
        kv = Dim("model.head_dim", head, kv_heads, tensor, heads(kv_heads, "num_kv_heads"), ("k", "v"))
    found = [
        Dim("model.d_model", model.d_model, 1, 1, f"model.d_model = {model.d_model}", ("out", "down"), _names(recipe)),
        kv,
        Dim("model.head_dim", head, model.num_heads, tensor, heads(model.num_heads, "num_heads"), ("q",), ("out",)),
        Dim("model.d_ff", model.d_ff, 1, tensor, _over("model.d_ff", model.d_ff, tensor), ups, ("down",), tensor),
    ]
    if all(axis in sizes for axis in ("data", "sequence")):
        found.append(_tokens(recipe, sizes, tensor))
    return [dim for dim in found if dim.size > 0 and dim.value * dim.times % dim.ways == 0]


def _over(key: str, value: int, tensor: int) -> str:
    return f"{key} {value} / mesh.tensor {tensor} = {value // tensor}" if tensor > 1 else f"{key} = {value}"


def _tokens(recipe: Recipe, sizes: Mapping[str, int], tensor: int) -> Dim:
    """Of a device at once: weights' gradients sum over them."""
    train, data, sequence = recipe.train, sizes["data"], sizes["sequence"]
    rows, length, parts = train.global_batch_size, train.sequence_length, data * sequence * train.num_microbatches
    by = f"data {data} x sequence {sequence} x train.num_microbatches {train.num_microbatches}"
    if recipe.precision.recipe == "mxfp8" and tensor > 1 and train.overlap is not False:
        ways = data * train.num_microbatches
        if rows % ways == 0 and rows // ways % 2 == 0:
            parts, by = 2 * parts, f"{by} x 2 halves under train.overlap"
    equation = f"tokens of a device at once, {rows} x {length} / ({by}) = {rows * length // parts},"
    key, unit = "train.sequence_length", row_unit(sequence, tensor)
    return Dim(key, length, rows, parts, equation, inputs=_names(recipe), whole=unit)


def _names(recipe: Recipe) -> tuple[str, ...]:
    gate = ("gate",) if recipe.model.activation == "swiglu" else ()
    return ("q", "k", "v", "out", *gate, "up", "down")


def _in_fp8(recipe: Recipe, products: tuple[str, ...]) -> bool:
    """Whether any of them is."""
    return bool(set(products) - set(recipe.precision.fp8.bf16_products))


def warnings(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """What changes nothing, or costs more than it brings."""
    return [*_without_effect(recipe), *_too_small(recipe, sizes)]


def _without_effect(recipe: Recipe) -> Iterator[str]:
    precision = recipe.precision
    kind, fp8 = f"precision.recipe is {precision.recipe}", precision.fp8
    without = {
        "fp8_delayed": (),
        "fp8_current": ("amax_history_length", "algorithm", "recalibrate"),
        "mxfp8": ("amax_history_length", "algorithm", "margin", "recalibrate", "format"),
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
    small = [
        dim.equation.rstrip(",") for dim in dims(recipe, sizes) if dim.size < WORTH and _in_fp8(recipe, dim.outputs)
    ]
    if recipe.precision.is_fp8 and small:
        yield (
            f"precision.recipe = {recipe.precision.recipe} with small products ({'; '.join(small)}): below about "
            f"{WORTH} outputs, quantising an input takes longer than its product in FP8 saves; bf16 is likely to be "
            "faster, or bf16 for those products (precision.fp8.bf16_products)"
        )
