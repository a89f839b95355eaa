"""The real train step, compiled for a cluster that is not there.

The CUDA plugin of jax's own version compiles for GPUs on a machine without one. The program is the one that training
would run there: the same recipe, mesh, layout and compiler options. Only what XLA would time on the device (which of
cuBLAS's algorithms) stays open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from sharded_train import compat, gpu_flags
from sharded_train.errors import ConfigError
from sharded_train.mesh import StandIn, layout
from sharded_train.recipe import Recipe, check, program_on
from sharded_train.recipe.checks import fits
from sharded_train.recipe.precision import on_device
from sharded_train.rehearse import buffers
from sharded_train.rehearse.buffers import Temporaries
from sharded_train.rehearse.clusters import Cluster
from sharded_train.rehearse.quiet import quiet_compiler
from sharded_train.step import Program

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
INSTALL = "pip install 'sharded-train[rehearse]'"
INSTALL_IN_CLONE = "make setup-rehearse"


class CompilerFailure(RuntimeError):
    """The compiler gave up; the message names the file that holds what it said and the program it was given."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step compiled for a cluster, and what it was compiled from."""

    recipe: Recipe
    cluster: Cluster
    program: Program
    text: str  # the optimised HLO, scheduled
    memory: Any  # jaxlib's CompiledMemoryStats
    temporaries: Temporaries | None  # None where XLA does not tell
    options: dict[str, str | bool]
    seconds: dict[str, float]  # per phase


def compile_for(recipe: Recipe, cluster: Cluster, progress: Callable[[str], Any] = lambda words: None) -> Compiled:
    """Compile the train step of a recipe for a cluster.

    `progress` is told each phase before it begins.

    Raises:
        ConfigError: the recipe does not fit the cluster, the plugin is missing, or jaxlib takes other options; all of
            it before anything is traced.
        CompilerFailure: with the file in which message and program are kept.
    """
    check_layout(recipe, cluster)
    check_compiler()
    phases = Phases(progress)
    with phases("devices", f"making {cluster.words}"):
        program = program_on(recipe, _mesh(recipe, cluster))
    with phases("trace", "tracing the train step"), compat.cudnn_assumed():
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    options = program.compiler_options or {}
    text, stats, temporaries = compile_lowered(lowered, cluster, options, phases)
    return Compiled(recipe, cluster, program, text, stats, temporaries, options, phases.seconds)


def compile_lowered(
    lowered: jax.stages.Lowered, cluster: Cluster, options: dict[str, str | bool], phases: Phases
) -> tuple[str, Any, Temporaries | None]:
    """The optimised HLO of a program lowered for a cluster, CompiledMemoryStats, and its temporaries, if XLA tells.

    Raises CompilerFailure.
    """
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder:
        with phases("compile", f"compiling it for {cluster.words}"), quiet_compiler():
            compiled = _compile(lowered, cluster, {**options, **buffers.options(Path(folder))})
        with phases("text", "reading the compiled program"):
            text, temporaries = compiled.as_text(), buffers.read(Path(folder))
    assert text is not None
    return text, compiled.memory_analysis(), temporaries


class Phases:
    """Tells `progress` of each phase before it begins, and keeps how long each took, in seconds."""

    def __init__(self, progress: Callable[[str], Any]) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, words: str) -> Iterator[None]:
        self._progress(words)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def check_compiler() -> None:
    """Raise ConfigError where the plugin is missing or of another version, or jaxlib refuses our options."""
    check_plugin()
    gpu_flags.check("gpu")


def check_layout(recipe: Recipe, cluster: Cluster) -> None:
    """Raise ConfigError with everything that keeps the recipe off the cluster, without making any device of it."""
    check(recipe, cluster.num_devices)
    if problems := on_device(recipe, cluster.device.name, cluster.device.compute_capability):
        raise ConfigError(problems)
    layout(recipe.mesh, stand_ins(cluster), functools.partial(fits, recipe))


def stand_ins(cluster: Cluster) -> list[StandIn]:
    """What the cluster's devices would say of themselves."""
    hosts = range(cluster.num_hosts)
    return [StandIn(0, host, host) for host in hosts for _ in range(cluster.devices_per_host)]


def check_plugin() -> None:
    """Raise ConfigError, with the command that mends it, if the CUDA plugin is missing or not of jax's version."""
    found = {name: version for name in PLUGINS if (version := _version(name)) is not None}
    in_clone = (Path(__file__).resolve().parents[2] / "Makefile").is_file()
    command = INSTALL_IN_CLONE if in_clone else INSTALL
    if not found:
        raise ConfigError(
            f"rehearse compiles with JAX's CUDA plugin, which is not installed (no GPU needed): {command}"
        )
    if jaxlib.__version__ not in found.values():
        have = ", ".join(f"{name} {version}" for name, version in found.items())
        raise ConfigError(
            f"rehearse needs JAX's CUDA plugin of jaxlib's own version, {jaxlib.__version__}, but here is {have}: "
            f"{command}"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mesh(recipe: Recipe, cluster: Cluster) -> Mesh:
    devices = compat.compile_only_devices(cluster.target, cluster.num_hosts, cluster.devices_per_host)
    return Mesh(layout(recipe.mesh, devices), recipe.mesh.order)


def _compile(lowered: jax.stages.Lowered, cluster: Cluster, options: dict[str, str | bool]) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        path = _keep(str(error), lowered.as_text(), cluster)
        first = str(error).splitlines()[0]
        words = f"XLA could not compile the step: {first}; the whole message and the program are in {path}"
        raise CompilerFailure(words) from error


def _keep(message: str, program: str, cluster: Cluster) -> Path:
    """A new file with what the compiler said, as comments, and the program as StableHLO."""
    head = [f"jaxlib {jaxlib.__version__}, for {cluster.words}", *message.splitlines()]
    with tempfile.NamedTemporaryFile("w", prefix="rehearse-", suffix=".mlir", delete=False, encoding="utf-8") as file:
        file.write("".join(f"// {line}\n" for line in head) + program)
    return Path(file.name)
