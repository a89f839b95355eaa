"""Which attention a program has on its devices: what computes it, and how it works over the sequence axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from sharded_train.links import Link
from sharded_train.local import AttentionConfig
from sharded_train.models import Model
from sharded_train.models.block import Attend
from sharded_train.ops import attention as ops
from sharded_train.ops.context import context_attention
from sharded_train.ops.context_cost import Shape, Strategy, cheapest


@dataclasses.dataclass(frozen=True)
class Attending:
    """The choices, from settings and from where the devices stand."""

    model: Model
    config: AttentionConfig
    sequence_length: int
    dtype: jnp.dtype
    sizes: Mapping[str, int]  # of the mesh's axes
    platform: str
    link: Link  # of the sequence axis

    @property
    def implementation(self) -> Literal["xla", "cudnn"]:
        return ops.choose(self.model.attention, self.platform, self.model.dim_per_head, self.dtype)

    @property
    def max_documents(self) -> int | None:
        """How many documents a row may hold; None: any number."""
        return self.config.max_documents if self.implementation == "cudnn" else None

    @functools.cached_property
    def context(self) -> tuple[Strategy, str]:
        """The strategy over the sequence axis, and why: what is asked for, or else what is cheapest over its link."""
        if self.config.context != "auto":
            return self.config.context, "attention.context asks for it"
        model, tensor = self.model, self.sizes["tensor"]
        heads, kv_heads = model.num_heads // tensor, max(1, model.kv_heads // tensor)
        of = (self.sequence_length, heads, kv_heads, model.dim_per_head, self.dtype.itemsize)
        return cheapest(Shape(self.sizes["sequence"], *of), model.windows, self.link)

    def warnings(self) -> list[str]:
        """Windows that cost more than they hide: half a row or more, where rows are split by ring or all_gather."""
        wide = [w for w in dict.fromkeys(self.model.windows) if w is not None and 2 * w >= self.sequence_length]
        if not wide or self.sizes["sequence"] == 1 or self.context[0] == "ulysses":
            return []
        return [
            f"model.attention_windows: a window of {', '.join(map(str, wide))} keys is half of train.sequence_length = "
            f"{self.sequence_length} or more, which costs more than all keys over mesh.sequence = "
            f"{self.sizes['sequence']}: by {self.context[0]} a layer computes seq x window pairs with a window, "
            "seq x seq / 2 without; use 0 (all keys), or attention.context = ulysses, where windows cost what they show"
        ]

    @property
    def attend(self) -> Attend:
        known: dict[str, Any] = {
            "implementation": self.implementation,
            "windows": self.model.windows,
            "max_documents": self.config.max_documents,
        }
        by: Any = functools.partial(ops.attention, **known)
        if self.sizes["sequence"] > 1:
            by = functools.partial(context_attention, strategy=self.context[0], **known)
        return lambda q, k, v, segments, layer: by(q, k, v, segments, layer=layer)
