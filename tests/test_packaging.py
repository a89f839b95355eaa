"""What a fresh clone relies on: a pin for every package, a Makefile that keeps its word, nothing of one machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()

# Sites that a comment or a page may name; no package registry belongs here.
KNOWN_SITES = {
    *("arxiv.org", "www.apache.org", "www.w3.org", "keepachangelog.com", "semver.org"),
    *("localhost", "127.0.0.1"),
}
URL = re.compile(r"https?://([\w.-]+)")
REGISTRY = re.compile(r"python[h]osted|pypi[.]org|npm[j]s")
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:root|work|home/\w+|Users/\w+)/")


def requirements(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for: the core and the named extras."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for group in groups for line in group]


def pins(python: str | None = None) -> dict[str, Version]:
    """The versions in constraints.txt by package, for a Python on Linux (None: for this Python, here)."""
    environment = {}
    if python:
        environment = {
            "python_version": python,
            "python_full_version": f"{python}.1",
            "sys_platform": "linux",
            "platform_machine": "x86_64",
        }
    result: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            assert requirement.name not in result, f"{requirement.name} is pinned twice for Python {python}"
            result[canonicalize_name(requirement.name)] = Version(specifier.version)
    return result


def installed_closure(asked: Iterable[Requirement]) -> set[str]:
    """Names of all packages that the given requirements bring in, as the installed packages declare them."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, extra) for requirement in asked for extra in ("", *requirement.extras)]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed, each) for each in ("", *needed.extras)]
    return {name for name, _ in seen}


def make(*arguments: str, path: str = os.environ["PATH"]) -> str:
    """What make prints when it only says what it would do; variables of a make around the tests do not count."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    inherited = re.compile(r"M(AKE)?FLAGS|MAKE(LEVEL|OVERRIDES)|VENV|PYTHON|ACCELERATOR|INSTALLER|WORKERS|ARGS")
    environment = {key: value for key, value in os.environ.items() if not inherited.fullmatch(key)} | {"PATH": path}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def tracked_files() -> list[Path]:
    """All text files that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_bounds(python: str) -> None:
    pinned = pins(python)
    for requirement in requirements(*PROJECT["optional-dependencies"]):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"no pin for {requirement.name} on Python {python}"
        assert version in requirement.specifier, f"{requirement} does not admit the pin {version}"


def test_every_package_brought_in_is_pinned() -> None:
    missing = installed_closure(requirements("dev")) - pins().keys()
    assert not missing, "not in constraints.txt (make constraints writes it)"


@pytest.mark.parametrize("python", PYTHONS)
def test_gpu_plugins_have_the_version_of_jax(python: str) -> None:
    pinned = pins(python)
    plugins = {name: version for name, version in pinned.items() if re.fullmatch(r"jaxlib|jax-cuda\d+-.*", name)}
    assert len(plugins) == 5
    assert set(plugins.values()) == {pinned["jax"]}


def test_python_bounds_agree() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tuple(classifiers) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    bounds = re.search(r"\((\d), (\d+)\) <= sys.version_info\[:2\] <= \((\d), (\d+)\)", MAKEFILE)
    assert bounds is not None
    assert "{}.{} {}.{}".format(*bounds.groups()) == f"{PYTHONS[0]} {PYTHONS[-1]}"
    assert f"--python-version {PYTHONS[0]} " in MAKEFILE
    candidates = re.search(r"^CANDIDATES = .*", MAKEFILE, flags=re.MULTILINE)
    assert candidates is not None
    assert set(re.findall(r"python(3\.\d+)", candidates[0])) == set(PYTHONS)


def test_the_command_exists() -> None:
    module, _, function = PROJECT["scripts"]["sharded-train"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_make_without_a_target_only_lists_the_targets() -> None:
    assert make() == make("help")
    listed = re.findall(r"^([a-z-]+):.*  ## ", MAKEFILE, flags=re.MULTILINE)
    assert {"train", "test", "test-all", "lint", "help", "clean"} <= set(listed)


def test_make_train_uses_virtual_devices_on_a_cpu() -> None:
    lines = make("train", "ACCELERATOR=cpu", "VENV=.venv-none")
    assert "--cpu-devices=8" in lines
    assert "cuda" not in lines


def test_make_train_takes_the_cuda_build_where_there_is_a_gpu(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: any'\n")
    tool.chmod(0o755)
    lines = make("train", "VENV=.venv-none", path=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "[cuda12]" in lines
    assert "--cpu-devices" not in lines


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            unknown = set(URL.findall(line)) - KNOWN_SITES
            if unknown or REGISTRY.search(line) or MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
