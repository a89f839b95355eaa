"""The decoder-only transformer: GPT-2, Llama-3 and what lies between."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretch of the rotary frequencies to longer contexts (Llama 3.1 reference code)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Defaults are a small Llama; `configs/` holds published ones."""

    vocab_size: int = 4096
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: d_model / num_heads
    d_ff: int = 704
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rope", "learned"] = "rope"
    max_positions: int | None = None  # rows of the table of learned positions; the longest context to generate
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embedding: bool = False
    bias: bool = False
    dropout: float = 0.0  # of the embedding and of both residual branches
    init_std: float = 0.02
    attention: Literal["auto", "xla", "cudnn"] = "auto"
