"""Eight virtual CPU devices, and JAX as strict as it can be made."""

from __future__ import annotations

import os

# Before jax is imported. Tests compile far more than they compute: LLVM's optimiser would double their time. XLA's CPU
# back end may run independent collectives in another order on each virtual device, which then wait for each other for
# ever; with the plain scheduler all have the program's order.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # a busy machine is no deadlock
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_debug_key_reuse", False)
