"""The workdir keeps what was compiled, unless another place is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sharded_train import workdir

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    workdir.keep_compiled(tmp_path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3))).compile()
    assert list((tmp_path / workdir.COMPILED).rglob("*-cache"))


def test_a_place_that_is_set_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    workdir.keep_compiled(tmp_path)
    assert getattr(jax.config, SETTINGS[0]) == str(tmp_path / "mine")
