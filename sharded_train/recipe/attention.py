"""What a recipe's attention must satisfy, each violation with its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def problems(recipe: Recipe) -> list[str]:
    """Windows that are none, and what no kernel does."""
    model, length = recipe.model, recipe.train.sequence_length
    said, found = f"model.attention_windows = {model.attention_windows}", []
    if model.attention_dropout > 0:
        found.append(
            f"model.attention_dropout = {model.attention_dropout}: cuDNN takes the seed of its dropout from the "
            "compiled program, so that every step and layer would drop alike and every mesh otherwise, and plain "
            "XLA has none; use 0, and model.dropout, which is of the residual branches and the same on every mesh"
        )
    if not model.attention_windows:
        return [*found, f"{said}: wanted at least one number, 0 for a layer that sees all keys"]
    if len(model.attention_windows) > model.num_layers >= 1:
        found.append(
            f"{said}: {len(model.attention_windows)} numbers for model.num_layers = {model.num_layers}, each layer "
            f"having one; give at most {model.num_layers}"
        )
    for window in dict.fromkeys(model.attention_windows):
        if window < 0:
            found.append(f"{said}: a window of {window} keys; must be at least 0, which is all keys")
        elif window >= length >= 1:
            longest = f"{length - 1}, the longest that hides anything, or " if length > 1 else ""
            found.append(
                f"{said}: a window of {window} keys in rows of train.sequence_length = {length} hides nothing, "
                f"every query seeing all keys before it; nearest that work: {longest}0, which is full attention"
            )
    return found
