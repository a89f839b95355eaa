"""Eight virtual CPU devices, and JAX as strict as it can be made."""

from __future__ import annotations

import os

# Before jax is imported. Tests compile far more than they compute: LLVM's optimiser would double their time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # a busy machine is no deadlock
).strip()
os.environ.setdefault("PJRT_NPROC", "10")  # see `launch.start`
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_debug_key_reuse", False)
