"""The compiler options for GPUs: which there are, that XLA knows them, and who goes before."""

from __future__ import annotations

import jax
import pytest

from sharded_train import equivalence, gpu_flags
from sharded_train.equivalence import ROWS, SEQ, SMALL, Layout
from sharded_train.errors import ConfigError

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def test_only_gpus_get_options() -> None:
    assert gpu_flags.options("cpu", {}) is None
    assert gpu_flags.options("gpu", {}) == gpu_flags.OPTIONS
    assert gpu_flags.options("gpu", {}, gathers=2**25) == {**gpu_flags.OPTIONS, gpu_flags.GATHERS: str(2**25)}


def test_what_the_environment_says_goes_before() -> None:
    wanted = gpu_flags.options("gpu", {"XLA_FLAGS": f"--xla_dump_to=/d --{LIMIT}=2"})
    assert wanted == {name: value for name, value in gpu_flags.OPTIONS.items() if name != LIMIT}
    every = " ".join(f"--{name}=1" for name in gpu_flags.OPTIONS)
    assert gpu_flags.options("gpu", {"XLA_FLAGS": every}) is None


def test_the_installed_jaxlib_takes_every_option() -> None:
    gpu_flags.check("gpu")


def test_an_option_that_jaxlib_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_flags.OPTIONS, "xla_gpu_no_such_option", "7")
    monkeypatch.setitem(gpu_flags.OPTIONS, LIMIT, "many")
    with pytest.raises(ConfigError) as raised:
        gpu_flags.check("gpu")
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        f"{LIMIT}=many",
        "xla_gpu_no_such_option=7",
    ]
    assert all(f"jaxlib {jax.lib.__version__}" in problem for problem in raised.value.problems)
    gpu_flags.check("cpu")


def test_training_and_evaluation_are_compiled_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    program = equivalence.program(SMALL, Layout(data=2))
    monkeypatch.setattr(gpu_flags, "options", lambda *_, **__: {"xla_no_such_option": True})
    batch = jax.tree.map(lambda _: jax.ShapeDtypeStruct((ROWS, SEQ), "int32"), equivalence.hard_batch(SMALL))
    state, token_bytes = program.abstract_state, jax.ShapeDtypeStruct((SMALL.vocab_size,), "int32")
    for lowered in (program.train_step.lower(state, batch), program.eval_step.lower(state.params, batch, token_bytes)):
        with pytest.raises(Exception, match="xla_no_such_option"):
            lowered.compile()
