"""From logical axes to mesh axes, and ZeRO as the plan of where each weight is gathered."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 1 shards optimizer state, 2 gradients, 3 parameters."""

    stage: Literal[0, 1, 2, 3] = 1
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
