"""Out of memory, said so that one knows what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from sharded_train import recipe as recipes
from sharded_train.config import to_dict
from sharded_train.errors import ConfigError
from sharded_train.exits import Failure
from sharded_train.mesh import layout, stand_ins
from sharded_train.recipe import Recipe
from sharded_train.recipe.checks import axis_sizes
from sharded_train.tables import bytes_in_words

LARGEST = 5  # arrays named
LONG = 8192  # tokens of a row from which on it is worth splitting
MASTERS, MOMENTS = "master weights", "moments"
WEIGHTS, GRADIENTS, ACTIVATIONS = "gathered weights", "gradients", "activations and temporaries"


class OutOfMemory(Failure):
    """A step does not fit on the devices; the message has the arrays and what would shrink them."""


def check(compiled: jax.stages.Compiled, device: jax.Device, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Raise OutOfMemory if the compiled step needs more than the device has, where the device says what it has."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    need = needed(compiled)
    if limit is not None and need is not None and need > limit:
        words = f"the step needs {bytes_in_words(need)} on each device, which has {bytes_in_words(limit)}"
        raise OutOfMemory(explain(words, recipe, facts))


def peak(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """Bytes at most in use so far, and those there are, of the fullest device; None where they do not say, as CPUs."""
    stats = [device.memory_stats() or {} for device in devices]
    found = [
        (s["peak_bytes_in_use"], s["bytes_limit"]) for s in stats if {"peak_bytes_in_use", "bytes_limit"} <= s.keys()
    ]
    return max(found, default=None)


def needed(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of a device that a compiled function takes: arguments, results beside them, temporaries."""
    memory = compiled.memory_analysis()
    return None if memory is None else total(memory)


def total(memory: Any) -> int:
    """The same from a `CompiledMemoryStats` of XLA."""
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return int(arguments + results - memory.alias_size_in_bytes + memory.temp_size_in_bytes)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def explain(what: str, recipe: Recipe, facts: Mapping[str, Any]) -> str:
    """The largest of what each device holds, by name, and the settings that would shrink it.

    `facts` are those of `show.describe`.
    """
    kinds = {**facts["state_bytes"], **facts["step_bytes"]}
    lines = [f"out of memory: {what}. Known before the activations, on each device:"]
    lines += [f"  {bytes_in_words(n):>10}  {kind.replace('_', ' ')}" for kind, n in _largest(kinds)]
    lines.append("The largest parameters, with all that is made of them:")
    parameters = {p["name"]: sum(p["bytes"].values()) for p in facts["parameters"]}
    lines += [f"  {bytes_in_words(n):>10}  {name}" for name, n in _largest(parameters)]
    lines.append("What would shrink it:")
    hosts, devices = facts["mesh"]["num_hosts"], facts["mesh"]["num_devices"]
    lines += [f"  {advice}" for advice in remedies(recipe, stand_ins(f"{hosts}x{devices // hosts}"), {})]
    return "\n".join(lines)


def _largest(bytes_of: Mapping[str, int]) -> list[tuple[str, int]]:
    found = sorted(((name, n) for name, n in bytes_of.items() if n), key=lambda item: -item[1])
    return found[:LARGEST]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Settings that shrink what a device holds: their values, why, and about which share of each kind of bytes goes."""

    changes: Mapping[str, Any]
    why: str
    frees: Mapping[str, float]
    last_resort: bool = False

    @property
    def words(self) -> str:
        return f"{' '.join(f'config.{key}={value}' for key, value in self.changes.items())}: {self.why}"


def remedies(recipe: Recipe, devices: Sequence[Any], held: Mapping[str, int]) -> list[str]:
    """Settings that would shrink what a device holds and are not refused on `devices`, as sentences.

    `held` are bytes by kind, as a rehearsal tells them: what frees most of them comes first and what frees less than
    1 % of them is left out. Where nothing is known of them, what costs least speed comes first.
    """
    sizes, _ = axis_sizes(recipe, len(devices))
    total = sum(held.values())

    def freed(remedy: Remedy) -> float:
        return sum(share * held.get(kind, 0) for kind, share in remedy.frees.items())

    worth = [each for each in _remedies(recipe, sizes) if freed(each) >= 0.01 * total]
    ordered = sorted(worth, key=lambda each: (each.last_resort, -freed(each)))
    return [each.words for each in ordered if _accepted(each, recipe, devices)]


def _accepted(remedy: Remedy, recipe: Recipe, devices: Sequence[Any]) -> bool:
    """Whether the changed recipe may run on these devices."""
    try:
        changed = recipes.from_dict(
            to_dict(recipe), [f"--config.{key}={value}" for key, value in remedy.changes.items()]
        )
        recipes.check(changed, len(devices))
        layout(changed.mesh, devices)
    except ConfigError:
        return False
    return True


def _remedies(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[Remedy]:
    """Settings that are not at their smallest yet, those that cost least speed first."""
    train, length = recipe.train, recipe.train.sequence_length
    microbatches = train.num_microbatches
    rows = train.global_batch_size // (sizes["data"] * microbatches)
    yield from _more_zero(recipe, sizes)
    if recipe.precision.recipe == "fp32":
        halves = {WEIGHTS: 0.5, GRADIENTS: 0.5, ACTIVATIONS: 0.5}
        why = "halves weights to multiply with, their gradients and activations"
        yield Remedy({"precision.recipe": "bf16"}, why, halves)
    if train.remat != "full":
        policy, share = ("selective", 0.5) if train.remat == "none" else ("full", 0.7)
        why = "keeps less of the activations, recomputes them in the backward pass"
        yield Remedy({"train.remat": policy}, why, {ACTIVATIONS: share})
    in_flight = sizes["pipeline"] > 1 and recipe.pipeline.schedule == "gpipe"  # which keeps those of all microbatches
    if rows > 1 and not in_flight:
        times = next(n for n in range(2, rows + 1) if rows % n == 0)
        why = f"fewer rows at once than the {rows} of each device now"
        yield Remedy({"train.num_microbatches": times * microbatches}, why, {ACTIVATIONS: 1 - 1 / times})
    elif sizes["data"] % 2 == 0 and length >= LONG:
        why = f"splits each row of {length:,} tokens over more devices, data having fewer"
        yield Remedy(_twice("sequence", recipe, sizes), why, {ACTIVATIONS: 0.5})
    if sizes["data"] % 2 == 0:
        why = "splits weights and activations of a layer over more devices, data having fewer"
        state = {} if recipe.zero.stage else {MASTERS: 0.5, MOMENTS: 0.5}
        halves = {WEIGHTS: 0.5, GRADIENTS: 0.5, ACTIVATIONS: 0.4}
        yield Remedy(_twice("tensor", recipe, sizes), why, {**state, **halves})
    why = f"shorter rows than the {length:,} tokens of now, which changes what is learnt"
    yield Remedy({"train.sequence_length": length // 2}, why, {ACTIVATIONS: 0.5}, last_resort=True)


def _more_zero(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[Remedy]:
    """The next stage of ZeRO; over a pipeline none beyond 1, for what it then sends for every microbatch."""
    stage, data = recipe.zero.stage, sizes["data"]
    if data == 1 or stage == 3 or (sizes["pipeline"] > 1 and stage >= 1):
        return
    kind, kinds = [
        ("optimizer state", (MASTERS, MOMENTS)),
        ("gradients", (GRADIENTS,)),
        ("weights", (WEIGHTS,)),
    ][stage]
    share = 1 - 1 / (recipe.zero.group_size or data)
    yield Remedy({"zero.stage": stage + 1}, f"also splits {kind} over data {data}", dict.fromkeys(kinds, share))


def _twice(axis: str, recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, int]:
    """An axis twice as long and data half: each device has as many rows at once in twice the microbatches."""
    data = {} if recipe.mesh.data == -1 else {"mesh.data": sizes["data"] // 2}
    return {f"mesh.{axis}": 2 * sizes[axis], **data, "train.num_microbatches": 2 * recipe.train.num_microbatches}
