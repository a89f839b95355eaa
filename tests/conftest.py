"""Eight virtual CPU devices, JAX as strict as it can be made, and what tests of whole runs share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported. Tests compile far more than they compute: LLVM's optimiser would double their time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # a busy machine is no deadlock
).strip()
os.environ.setdefault("PJRT_NPROC", "10")  # see `launch.start`
os.environ["JAX_PLATFORMS"] = "cpu"

from sharded_train import launch

with launch.quiet_plugin():
    import jax
    import numpy as np
    import pytest
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_debug_key_reuse", False)
    jax.devices()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["mesh", "shard", "gather", "stage", "step", "tick", "scatter", "reduce", "norm", "loss"]
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, 200)) + "\n")
    return folder


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every start of a run compiles: here the same program a second time from JAX's cache."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def no_cache_left() -> Iterator[None]:
    """A run keeps what it compiles in its workdir, and JAX goes on to use it: for the programs of other tests too, of
    which those for a GPU that is not there cannot be read back.
    """
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
