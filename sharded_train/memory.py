"""Out of memory, said so that one knows what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from sharded_train.recipe import Recipe
from sharded_train.show_tables import bytes_in_words

LARGEST = 5  # arrays named


class OutOfMemory(RuntimeError):
    """A step does not fit on the devices; the message has the arrays and what would shrink them."""


def check(compiled: jax.stages.Compiled, device: jax.Device, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Raise OutOfMemory if the compiled step needs more than the device has, where the device says what it has."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    need = needed(compiled)
    if limit is not None and need is not None and need > limit:
        words = f"the step needs {bytes_in_words(need)} on each device, which has {bytes_in_words(limit)}"
        raise OutOfMemory(explain(words, recipe, facts))


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
    lines += [f"  {advice}" for advice in remedies(recipe, facts["mesh"]["sizes"], facts["mesh"]["num_devices"])]
    return "\n".join(lines)


def _largest(bytes_of: Mapping[str, int]) -> list[tuple[str, int]]:
    found = sorted(((name, n) for name, n in bytes_of.items() if n), key=lambda item: -item[1])
    return found[:LARGEST]


def remedies(recipe: Recipe, sizes: Mapping[str, int], num_devices: int) -> Iterator[str]:
    """Settings that are not at their smallest yet, those that cost least speed first."""
    train, stage, data = recipe.train, recipe.zero.stage, sizes["data"]
    rows = train.global_batch_size // (data * train.num_microbatches)
    if stage < 3 and data > 1:
        kind = {0: "optimizer state", 1: "gradients", 2: "weights"}[stage]
        yield f"config.zero.stage={stage + 1}: also splits {kind} over data {data}"
    if recipe.precision.recipe == "fp32":
        yield "config.precision.recipe=bf16: halves weights to multiply with, their gradients and activations"
    if rows > 1:
        more = next(m for m in range(2, rows + 1) if rows % m == 0) * train.num_microbatches
        yield f"config.train.num_microbatches={more}: fewer rows at once than the {rows} of each device now"
    if train.remat != "full":
        policy = "selective" if train.remat == "none" else "full"
        yield f"config.train.remat={policy}: keeps less of the activations, recomputes them in the backward pass"
    if num_devices > sizes["tensor"]:
        yield f"config.mesh.tensor={2 * sizes['tensor']}: splits weights and activations of a layer over more devices"
    yield f"config.train.sequence_length: activations and attention shrink with it (now {train.sequence_length})"
