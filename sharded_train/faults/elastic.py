"""A resume on another number of data ranks: the global batch and the samples stay, accumulation adapts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sharded_train import recipe as recipes
from sharded_train.errors import ConfigError
from sharded_train.recipe import Recipe
from sharded_train.recipe import checks as recipe_checks
from sharded_train.sharding import REPLICA


def adapted(recipe: Recipe, record: Mapping[str, Any], num_devices: int) -> tuple[Recipe, str | None]:
    """The recipe with as many microbatches as fit, and a line about it if that are others than it asks for.

    On as many data ranks as the checkpoint's run had, nothing changes. On others, no device works on more rows at once
    than in that run (`record`):

        train.global_batch_size / (data ranks x train.num_microbatches) <= there

    by the least number of microbatches that is not below what the recipe asks for, or the nearest below it.
    """
    there = _there(record)
    data = recipe_checks.axis_sizes(recipe, num_devices)[0].get("data", 0)
    rows, asked = recipe.train.global_batch_size, recipe.train.num_microbatches
    if there is None or data < 1 or there[0] == data or rows % data:
        return recipe, None  # a batch that does not divide is refused with all else
    most = there[1]
    fits = [m for m in range(1, rows // data + 1) if rows // data % m == 0 and rows // data // m <= most]
    in_order = sorted(fits, key=lambda m: (m < asked, abs(m - asked)))
    for microbatches in in_order:
        changed = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, num_microbatches=microbatches))
        if _works(changed, num_devices):
            return changed, None if microbatches == asked else _words(there[0], data, rows, asked, microbatches, most)
    return recipe, None


def _there(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """The data ranks of the checkpoint's run, and the rows that a device worked on at once."""
    try:
        train, mesh = record["config"]["train"], record["mesh"]
        data = mesh["data"] * mesh.get(REPLICA, 1)
        return data, train["global_batch_size"] // (data * train["num_microbatches"])
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def _works(recipe: Recipe, num_devices: int) -> bool:
    try:
        recipes.check(recipe, num_devices)
    except ConfigError:
        return False
    return True


def _words(before: int, data: int, rows: int, asked: int, microbatches: int, most: int) -> str:
    at_once = rows // data // microbatches
    return (
        f"{data} data ranks where the checkpoint's run had {before}: train.num_microbatches = {microbatches} in place "
        f"of {asked}, so that a device works on {at_once} rows at once, not on more than {most} as before; the batch "
        f"of {rows} rows and its samples stay (faults.elastic = false leaves it as asked)"
    )
