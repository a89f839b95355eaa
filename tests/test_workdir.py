"""The workdir keeps what was compiled, unless another place is set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from sharded_train import workdir
from sharded_train.errors import ConfigError
from sharded_train.recipe import Recipe

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from sharded_train import workdir
from sharded_train.errors import ConfigError
from sharded_train.recipe import Recipe
workdir.keep_compiled(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3))).compile()
"""


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    """In a process of its own: what JAX was told of its cache before would count here."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, env=env)
    assert list((tmp_path / workdir.COMPILED).rglob("*-cache"))


def test_a_place_that_is_set_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    workdir.keep_compiled(tmp_path)
    assert getattr(jax.config, SETTINGS[0]) == str(tmp_path / "mine")


def test_what_a_killed_start_has_compiled_is_no_obstacle(tmp_path: Path) -> None:
    """Before process 0 has written config.json another process may have compiled something."""
    (tmp_path / workdir.COMPILED).mkdir()
    (tmp_path / workdir.DATA).mkdir()
    workdir.check(tmp_path, Recipe())
    (tmp_path / workdir.CHECKPOINTS).mkdir()
    with pytest.raises(ConfigError, match=r"holds checkpoints but no config\.json"):
        workdir.check(tmp_path, Recipe())
