"""What docs/extend.md tells to change is changed in a copy of the package, and what it tells to check is run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (sharded_train/[\w/]+\.py)\n")


def changed(text: str, change: str) -> str:
    """A text after a block of changes; what each hunk wants to find must be there once."""
    for hunk in change.split("@@\n"):
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before, after = ("".join(f"{text}\n" for sign, text in lines if sign in f" {which}") for which in "-+")
        assert text.count(before) == 1, f"docs/extend.md wants to find once, not {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def test_changes_are_made_where_they_belong() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+B\n@@\n c\n+d\n") == "a\nB\nc\nd\n"
    with pytest.raises(AssertionError, match="wants to find once, not 2 times"):
        changed("a\na\n", "-a\n")


def test_the_worked_examples_work(tmp_path: Path) -> None:
    """Seven small programs are compiled, in a process of its own: some 25 s."""
    for name in ("sharded_train", "docs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    checks = []
    for kind, text in BLOCK.findall((ROOT / "docs/extend.md").read_text()):
        named = FILE.match(text)
        if named is None:
            assert kind == "python", f"a block of changes begins with the name of the file: {text}"
            checks.append(text)
            continue
        path = tmp_path / named[1]
        path.write_text(changed(path.read_text(), text[named.end() :]) if kind == "diff" else text)
    assert len(checks) > 3
    (tmp_path / "checks.py").write_text("\n".join(checks))
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    there = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PJRT_NPROC": "6"}
    done = subprocess.run([sys.executable, "checks.py"], cwd=tmp_path, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings = ("test_recipe.py::test_every_number_has_a_range", "test_docs.py::test_every_option_says_what_it_is")
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/{each}" for each in settings)]
    here = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
