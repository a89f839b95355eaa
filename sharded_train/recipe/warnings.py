"""What a recipe asks for that changes nothing on the given devices: allowed, and said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharded_train.mesh import AXES
from sharded_train.optimizer import SGD, Adafactor, Muon

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def without_effect(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    """One sentence for each; `sizes` are the axes' sizes as far as they are known."""
    return [*_mesh(recipe, sizes), *_model(recipe, sizes), *_optimizer(recipe), *_steps(recipe)]


def _mesh(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    mesh, zero, warnings = recipe.mesh, recipe.zero, []
    alone = sizes.get("data") == 1 and sizes.get("sequence") == 1
    if alone and zero.stage > 0 and sizes.get("pipeline") == 1:
        warnings.append(f"zero.stage = {zero.stage} shards nothing: mesh.data and mesh.sequence are 1")
    if alone and zero.stage > 1 and sizes.get("pipeline", 1) > 1:
        warnings.append(
            f"zero.stage = {zero.stage} shards no more than 1 does: mesh.data and mesh.sequence are 1, and pipeline "
            "splits only the state of what belongs to no stage"
        )
    if alone and zero.reduce_dtype != "float32" and sizes.get("pipeline") == 1:
        warnings.append(f"zero.reduce_dtype = {zero.reduce_dtype} changes nothing: nothing is reduced over one device")
    if zero.group_size == 1 and zero.stage > 0 and sizes.get("data", 1) > 1 and sizes.get("sequence") == 1:
        warnings.append(
            f"zero.stage = {zero.stage} shards nothing over data: zero.group_size = 1 gives every data rank a copy"
        )
    if zero.group_size is not None and (zero.stage == 0 or zero.group_size == sizes.get("data")):
        why = "zero.stage is 0" if zero.stage == 0 else f"it is mesh.data = {zero.group_size}, all of one group already"
        warnings.append(f"zero.group_size = {zero.group_size} changes nothing: {why}")
    if sizes.get("tensor") == 1 and mesh.allow_tensor_across_hosts:
        warnings.append("mesh.allow_tensor_across_hosts changes nothing: mesh.tensor is 1")
    if sizes.get("sequence") == 1 and recipe.attention.context != "auto":
        warnings.append(f"attention.context = {recipe.attention.context} changes nothing: mesh.sequence is 1")
    split = [axis for axis in AXES if sizes.get(axis) != 1]
    if mesh.order != AXES and len(split) < 2:
        warnings.append("mesh.order changes nothing: at most one axis is larger than 1")
    return warnings


def _model(recipe: Recipe, sizes: Mapping[str, int]) -> list[str]:
    model, tensor, warnings = recipe.model, sizes.get("tensor", 1), []
    if model.vocab_size % tensor:
        tables, verb = ("embedding", "is") if model.tied_embedding else ("embedding and head", "are")
        padded = -(-model.vocab_size // tensor) * tensor
        warnings.append(
            f"model.vocab_size = {model.vocab_size} is no multiple of mesh.tensor = {tensor}: {tables} {verb} "
            f"stored whole over tensor and padded to {padded} inside the step"
        )
    if model.positions == "learned" and model.rope_theta != type(model)().rope_theta:
        warnings.append("model.rope_theta changes nothing: model.positions is learned")
    return warnings


def _optimizer(recipe: Recipe) -> list[str]:
    optimizer, warnings = recipe.optimizer, []
    if isinstance(optimizer, SGD | Muon) and optimizer.nesterov and optimizer.momentum == 0:
        warnings.append("optimizer.nesterov changes nothing: optimizer.momentum is 0")
    if isinstance(optimizer, SGD | Adafactor) and optimizer.moments_dtype != "float32" and optimizer.momentum == 0:
        warnings.append(f"optimizer.moments_dtype = {optimizer.moments_dtype} changes nothing: optimizer.momentum is 0")
    if isinstance(optimizer, Adafactor) and not optimizer.relative and optimizer.min_scale != Adafactor().min_scale:
        warnings.append("optimizer.min_scale changes nothing: optimizer.relative is false")
    return warnings


def _steps(recipe: Recipe) -> list[str]:
    train, profile, warnings = recipe.train, recipe.log.profile_steps, []
    last = train.num_steps if train.stop_at is None else train.stop_at
    for key in ("evaluate", "checkpoint"):
        every = getattr(recipe, key).every
        if every > last:
            warnings.append(f"{key}.every = {every} is beyond this run's last step {last}: at its end only")
    if profile is not None and profile[0] >= last:
        warnings.append(f"log.profile_steps = {profile} begins after this run's last step {last - 1}: no profile")
    return warnings
