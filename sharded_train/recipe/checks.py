"""What a recipe must satisfy beyond its types: ranges, and sizes that divide; each violation with its equation.

Every check names the keys, the operands and what would work. None stops at another's failure, so each guards itself
against numbers that are out of range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharded_train.errors import ConfigError
from sharded_train.mesh import AXES, resolve_sizes
from sharded_train.optimizer import WSD, Cosine, Linear, Lion
from sharded_train.recipe.ranges import RANGES

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def nearest_multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` next to a value that is none."""
    below = value // of * of
    return [n for n in (below, below + of) if n > 0]


def nearest(value: int, choices: Sequence[int]) -> list[int]:
    """The choices next to a value: the largest below it and the smallest above it."""
    below, above = [n for n in choices if n < value], [n for n in choices if n > value]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def axis_sizes(recipe: Recipe, num_devices: int | None) -> tuple[dict[str, int], list[str]]:
    """The sizes of the mesh's axes as far as they are known, and what is wrong with the mesh.

    Without a number of devices an axis of -1 is not known; when the sizes do not fit, those that were asked for count.
    """
    mesh = recipe.mesh
    asked = {axis: getattr(mesh, axis) for axis in AXES}
    known = {axis: size for axis, size in asked.items() if size > 0}
    problems = []
    try:
        number = math.prod(known.values()) if num_devices is None else num_devices
        sizes = resolve_sizes(mesh, number, functools.partial(fits, recipe))
        known = {axis: size for axis, size in sizes.items() if num_devices is not None or axis in known}
    except ConfigError as error:
        problems = error.problems
    return known, problems


def fits(recipe: Recipe, sizes: Mapping[str, int]) -> bool:
    """Whether the model splits over axes of these sizes; rows are told of by themselves."""
    stages = sizes["pipeline"] <= max(recipe.model.num_layers, 1)
    return stages and _tensor_fits(recipe, sizes["tensor"], sizes["sequence"])


def out_of_range(recipe: Recipe) -> list[str]:
    """Numbers that are wrong by themselves."""
    problems = [*recipe.data.problems(), *recipe.checkpoint.problems()]
    for words, (holds, keys) in RANGES.items():
        for key in keys.split():
            value = _look_up(recipe, key)
            if value is not None and not holds(value):
                problems.append(f"{key} = {value}: must be {words}")
    return problems


def indivisible(recipe: Recipe, sizes: Mapping[str, int], num_devices: int | None) -> list[str]:
    """Dims that do not split over the mesh's axes."""
    model, tensor = recipe.model, sizes.get("tensor", 1)
    ways = sizes.get("sequence", 1)
    problems = _batch(recipe, sizes, num_devices)
    fits = [t for t in _divisors(model.num_heads) if _tensor_fits(recipe, t, ways) and (num_devices or t) % t == 0]
    also = f", or mesh.tensor = {_or(nearest(tensor, fits))}" if nearest(tensor, fits) else ""
    mlp = "up, gate and down" if model.activation == "swiglu" else "up and down"
    for key, value, why in (
        ("model.num_heads", model.num_heads, "the heads dim of attention's q and out is split over tensor"),
        ("model.d_ff", model.d_ff, f"the mlp dim of {mlp} is split over tensor"),
    ):
        problems += _no_multiple(key, value, "mesh.tensor", tensor, why, also)
    problems += _sequence(recipe, ways, tensor, num_devices, also)
    if model.num_kv_heads is not None and not _kv_fits(model.kv_heads, tensor):
        kv = [n for n in _divisors(model.num_heads) if _kv_fits(n, tensor)]
        problems.append(
            f"model.num_kv_heads = {model.kv_heads} and mesh.tensor = {tensor}: neither divides the other, so the "
            "kv_heads dim of attention's k and v can be neither split over tensor nor stored on equally many devices; "
            f"nearest that work: model.num_kv_heads = {_or(nearest(model.kv_heads, kv))}{also}"
        )
    group = recipe.zero.group_size
    if "data" in sizes and group is not None and group >= 1 and sizes["data"] % group:
        problems.append(
            f"zero.group_size = {group} does not divide mesh.data = {sizes['data']}: groups of data ranks that share "
            "one copy of the state are equally large; nearest that work: zero.group_size = "
            f"{_or(nearest(group, _divisors(sizes['data'])))}"
        )
    return problems


def _batch(recipe: Recipe, sizes: Mapping[str, int], num_devices: int | None) -> list[str]:
    """Rows that do not split over data and microbatches: other rows, microbatches or, of the same devices, axes."""
    mesh, rows, m = recipe.mesh, recipe.train.global_batch_size, recipe.train.num_microbatches
    data, tensor = sizes.get("data", 1), sizes.get("tensor", 1)
    by = f"mesh.data {data} x train.num_microbatches {m}" if "data" in sizes else "train.num_microbatches"
    if min(rows, m, data, tensor) < 1:
        return []
    offers = [f"train.num_microbatches = {_or(nearest(m, _divisors(rows // data)))}"] if rows % data == 0 else []
    if "data" in sizes and math.prod(sizes.values()) == num_devices:
        all_ranks, ways = data * tensor, sizes.get("sequence", 1)
        fits = [t for t in _divisors(all_ranks) if rows % (all_ranks // t * m) == 0 and _tensor_fits(recipe, t, ways)]
        for t in nearest(tensor, fits):
            changed = {"data": all_ranks // t, "tensor": t}
            offers.append(" with ".join(f"mesh.{a} = {n}" for a, n in changed.items() if getattr(mesh, a) != -1))
    why = "every device works through its rows in equal parts"
    return _no_multiple("train.global_batch_size", rows, by, data * m, why, "".join(f", or {o}" for o in offers))


def _sequence(recipe: Recipe, ways: int, tensor: int, num_devices: int | None, also: str) -> list[str]:
    """Rows that do not split over the sequence axis, and over tensor between the blocks."""
    length, heads, context = recipe.train.sequence_length, recipe.model.num_heads, recipe.attention.context
    if ways < 1 or tensor < 1:
        return []
    unit = row_unit(ways, tensor)
    if ways == 1:
        why = "activations between blocks are split over tensor"
        return _no_multiple("train.sequence_length", length, "mesh.tensor", unit, why, also)
    by = " x ".join(["2"] * (tensor % 2) + [f"mesh.sequence {ways}"] + [f"mesh.tensor {tensor}"] * (tensor > 1))
    why = "each device has two chunks of a row, one from either end, so that causal attention is equal work for all"
    why += "; between blocks they are split over tensor" if tensor > 1 else ""
    devices = num_devices or 1 << 31  # where their number is not known, it is taken for a power of two
    works = lambda s: length % row_unit(s, tensor) == 0 == devices % (s * tensor)
    fits = [s for s in _divisors(length) if works(s) and (context != "ulysses" or heads % (s * tensor) == 0)]
    also = f", or mesh.sequence = {_or(nearest(ways, fits))}" if nearest(ways, fits) else ""
    problems = _no_multiple("train.sequence_length", length, by, unit, why, also)
    if context == "ulysses" and heads >= 1 and heads % tensor == 0 and heads // tensor % ways:
        fits = _divisors(heads // tensor)
        problems.append(
            f"attention.context = ulysses: model.num_heads {heads} / mesh.tensor {tensor} = {heads // tensor} heads do "
            f"not split over mesh.sequence = {ways}; nearest that work: mesh.sequence = {_or(nearest(ways, fits))}, or "
            "attention.context = ring"
        )
    return problems


def contradictions(recipe: Recipe) -> list[str]:
    """Settings that cannot go together on any mesh."""
    problems = [*_shape(recipe), *_positions(recipe), *_schedule(recipe), *_moments(recipe), *_steps(recipe)]
    if recipe.model.attention == "cudnn" and recipe.precision.recipe == "fp32":
        problems.append(
            "model.attention = cudnn with precision.recipe = fp32: cuDNN's attention takes 16-bit numbers "
            "only; use attention = auto or precision.recipe = bf16"
        )
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append(
            f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor} must be below high_freq_factor = "
            f"{scaling.high_freq_factor}"
        )
    return problems


def _shape(recipe: Recipe) -> list[str]:
    """The attention's heads within the model."""
    model, problems = recipe.model, []
    if model.head_dim is None and model.num_heads >= 1:
        also = f", model.num_heads = {_or(nearest(model.num_heads, _divisors(model.d_model)))}, or set head_dim"
        why = "without model.head_dim the heads share d_model equally"
        problems += _no_multiple("model.d_model", model.d_model, "model.num_heads", model.num_heads, why, also)
    if model.num_kv_heads is not None:
        also = f", or model.num_kv_heads = {_or(nearest(model.kv_heads, _divisors(model.num_heads)))}"
        why = "each kv head serves equally many heads"
        problems += _no_multiple("model.num_heads", model.num_heads, "model.num_kv_heads", model.kv_heads, why, also)
    return problems


def _positions(recipe: Recipe) -> list[str]:
    model, length, problems = recipe.model, recipe.train.sequence_length, []
    if model.positions == "learned":
        if model.max_positions is None:
            problems.append(
                f"model.positions = learned needs model.max_positions, at least {length} (train.sequence_length)"
            )
        elif model.max_positions < length:
            problems.append(
                f"model.max_positions = {model.max_positions} < train.sequence_length = {length}: learned "
                f"positions need a row for each; set max_positions to {length} or more, or sequence_length to at most "
                f"{model.max_positions}"
            )
        if model.rope_scaling is not None:
            problems.append(
                "model.rope_scaling is set, but model.positions = learned has no rotary frequencies to "
                "stretch; set positions = rope, or rope_scaling = none"
            )
    elif (head_dim := _head_dim(recipe)) % 2:
        origin = "" if model.head_dim else " (d_model / num_heads)"
        problems.append(
            f"model.head_dim = {head_dim}{origin} is odd: rope turns pairs of numbers; nearest that work: "
            f"model.head_dim = {_or(nearest_multiples(head_dim, 2))}"
        )
    return problems


def _head_dim(recipe: Recipe) -> int:
    """0 where it cannot be told."""
    model = recipe.model
    if model.head_dim is not None:
        return max(model.head_dim, 0)
    return 0 if model.num_heads < 1 or model.d_model % model.num_heads else model.dim_per_head


def _schedule(recipe: Recipe) -> list[str]:
    """The warm-up, which must end before the rate falls."""
    schedule, num_steps = recipe.schedule, recipe.train.num_steps
    key, limit, least = "train.num_steps", num_steps, 1
    if isinstance(schedule, WSD):
        limit, least = schedule.decay_begins(num_steps), 0
        key = f"train.num_steps x (1 - schedule.decay_fraction) = {num_steps} x (1 - {schedule.decay_fraction})"
    elif isinstance(schedule, Linear | Cosine) and schedule.decay_steps is not None:
        key, limit = "schedule.decay_steps", schedule.decay_steps
    if not schedule.warmup_steps > limit >= least:
        return []  # a limit that is out of range is told of elsewhere
    return [
        f"schedule.warmup_steps = {schedule.warmup_steps} > {key} = {limit}: the learning rate would never come to its "
        f"peak; set schedule.warmup_steps to at most {limit}"
    ]


def _moments(recipe: Recipe) -> list[str]:
    """Averages in bf16, which do not move when each step changes them by less than half of their last bit."""
    optimizer = recipe.optimizer
    if optimizer.moments_dtype != "bfloat16":
        return []
    names = ("b2",) if isinstance(optimizer, Lion) else ("b1", "b2", "momentum")  # Lion's b1 averages nothing
    return [
        f"optimizer.{name} = {value} with optimizer.moments_dtype = bfloat16: 1 - {value} = {1 - value:.2g} is below "
        f"2^-8 = 0.0039, half of bf16's last bit, so that the average would never fall; use {name} = 0.996 or less, or "
        "moments_dtype = float32"
        for name in names
        if 1 - 2**-8 < (value := getattr(optimizer, name, 0.0)) < 1
    ]


def _steps(recipe: Recipe) -> list[str]:
    train, problems = recipe.train, []
    if train.stop_at is not None and not 1 <= train.stop_at <= max(train.num_steps, 1):
        problems.append(f"train.stop_at = {train.stop_at}: must be from 1 to train.num_steps = {train.num_steps}")
    if recipe.log.profile_steps is not None:
        first, last = recipe.log.profile_steps
        if not 0 <= first < last:
            problems.append(f"log.profile_steps = ({first}, {last}): [first, last) must have 0 <= first < last")
    return problems


def _no_multiple(key: str, value: int, by: str, divisor: int, why: str, also: str = "") -> list[str]:
    """The problem that a size does not divide, or nothing; sizes below 1 are told of elsewhere."""
    if value < 1 or divisor < 1 or value % divisor == 0:
        return []
    return [
        f"{key} = {value} is no multiple of {by} = {divisor} ({value} = {value // divisor} x {divisor} + "
        f"{value % divisor}): {why}; nearest that work: {key} = {_or(nearest_multiples(value, divisor))}{also}"
    ]


def row_unit(ways: int, tensor: int) -> int:
    """What a row's length must be a multiple of: of two chunks a sequence rank, split over tensor as one."""
    return tensor if ways == 1 else ways * math.lcm(2, tensor)


def _tensor_fits(recipe: Recipe, tensor: int, ways: int) -> bool:
    model, unit = recipe.model, row_unit(max(ways, 1), tensor)
    whole = model.num_heads % tensor == 0 == model.d_ff % tensor and recipe.train.sequence_length % unit == 0
    return whole and _kv_fits(model.kv_heads, tensor)


def _kv_fits(kv_heads: int, tensor: int) -> bool:
    """Split over tensor, or each head stored whole on tensor / kv_heads devices."""
    return kv_heads < 1 or kv_heads % tensor == 0 or tensor % kv_heads == 0


def _divisors(value: int) -> list[int]:
    if not 1 <= value < 2**31:
        return []  # out of range, which is told of elsewhere
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _look_up(settings: Any, key: str) -> Any:
    """The value under a dotted key; None where a group is absent or of another type."""
    for name in key.split("."):
        settings = getattr(settings, name, None)
    return settings
