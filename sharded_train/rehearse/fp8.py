"""Which products really run in FP8, of those that the recipe asks for: read from the compiled program.

`ops.fp8` multiplies in a scope of its own name, which the compiler keeps; what it made of a product there is seen by
the type of its factors. XLA leaves a product in bf16, without a word, on a device that has no FP8, or for a form or a
size that cuBLAS does not take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharded_train.rehearse import hlo
from sharded_train.rehearse.computed import Counted, count
from sharded_train.rehearse.scopes import names_of, words_of

SCOPE = "fp8"


def describe(counted: Sequence[Counted]) -> dict[str, Any] | None:
    """Products in the program's text, and those that fell back, alike ones together; None if none is asked for."""
    asked = in_fp8 = 0
    missing: dict[tuple[str, str, str], int] = {}
    for each in counted:
        for product in each.work.products:
            if SCOPE not in names_of(product.scope):
                continue
            asked += 1
            if product.dtype.startswith("f8"):
                in_fp8 += 1
            else:
                key = (words_of(product.scope), " · ".join(map(str, product.factors)), product.kind)
                missing[key] = missing.get(key, 0) + 1
    rows = [
        {"part": part, "shapes": shapes, "kind": kind, "products": n} for (part, shapes, kind), n in missing.items()
    ]
    return {"asked": asked, "in_fp8": in_fp8, "missing": rows} if asked else None


def of_text(text: str) -> dict[str, Any] | None:
    """The same from the text of a compiled program."""
    return describe(count(hlo.parse(text)))


def words(section: Mapping[str, Any] | None) -> str:
    """The count in a sentence; what fell back is named."""
    if section is None:
        return ""
    asked, in_fp8 = section["asked"], section["in_fp8"]
    if asked == in_fp8:
        return f"FP8: all {asked} of the products that are asked for run in FP8"
    where = "; ".join(
        f"{row['products']} of {row['part']} ({row['shapes']}) as {row['kind']}" for row in section["missing"]
    )
    return f"FP8 SHORTFALL: only {in_fp8} of the {asked} products that are asked for run in FP8: {where}"


def falls_short(section: Mapping[str, Any] | None) -> bool:
    return section is not None and section["in_fp8"] < section["asked"]
