"""The options that the step is compiled with on GPUs: the same for training there and for rehearsing without one.

`XLA_FLAGS` goes before: an option that it sets is left to it. XLA's own defaults stand for everything else. What guides
still list is not set where it brings nothing with jax 0.10.2 and 0.12: the latency-hiding scheduler is on by itself;
optimisation level O1 and pipelined collectives come to no more overlap than what is below, and with tensor parallelism
recompute attention and double the temporaries. docs/measurements.md has how much of the bytes each brings to span a
matrix product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from sharded_train.errors import ConfigError

GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
SMALL = 2**20  # bytes: what a collective's latency weighs more than its transfer in

OPTIONS: dict[str, str | bool] = {
    # Collectives in flight at once, by default one: the next cannot start before the one before it is done, so that
    # most have no matrix product to hide behind. A layer's gathers and its reduce-scatters are about so many.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "8",
    # Only small collectives are joined. By default all reductions of a layer become one, which starts when the layer's
    # last product has ended, and the two halves of a batch wait for each other.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(SMALL),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(SMALL),
    GATHERS: str(SMALL),
    # Matrix products by cuBLAS alone. Otherwise XLA times Triton's kernels against cuBLAS's on the device and takes the
    # faster; a rehearsal cannot time anything, so it would be of another program.
    "xla_gpu_enable_triton_gemm": False,
}


def options(
    platform: str, environ: Mapping[str, str] = os.environ, *, gathers: int = SMALL
) -> dict[str, str | bool] | None:
    """`compiler_options` for `jax.jit` on devices of this platform; None where there are none to give.

    `gathers` is up to how many bytes all-gathers are joined.
    """
    if platform not in ("gpu", "cuda"):
        return None
    said = {flag.lstrip("-").partition("=")[0] for flag in environ.get("XLA_FLAGS", "").split()}
    wanted = {**OPTIONS, GATHERS: str(max(gathers, SMALL))}
    return {name: value for name, value in wanted.items() if name not in said} or None


def check(platform: str) -> None:
    """Raise ConfigError if the installed jaxlib does not know the options, before anything large is compiled."""
    wanted = options(platform)
    if wanted is None:
        return
    problems = [
        f"{name}={value}: jaxlib {jax.lib.__version__} does not take this compiler option ({reason}); install a "
        "version that pyproject.toml allows, or take the option out of sharded_train/gpu_flags.py"
        for name, value in wanted.items()
        if (reason := _refusal({name: value}))
    ]
    if problems:
        raise ConfigError(problems)


def _refusal(one: dict[str, str | bool]) -> str | None:
    """What XLA says against an option, asked with an empty program on the device at hand: every back end knows all."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=one)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None
