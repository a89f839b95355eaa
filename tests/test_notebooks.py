"""The notebooks: each script runs, and the notebook beside it is what it makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharded_train.errors import ConfigError
from sharded_train.rehearse.compile import check_plugin

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
FAST = ("02_sharding_by_hand",)  # the others compile for minutes on a busy machine


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=() if path.stem in FAST else pytest.mark.slow) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_scripts_run(script: Path) -> None:
    try:
        check_plugin()
    except ConfigError as error:
        pytest.skip(str(error))
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environ["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebooks_are_in_step_with_their_scripts(script: Path) -> None:
    """`python notebooks/run.py` makes them anew."""
    notebook, source = jupytext.read(script.with_suffix(".ipynb")), jupytext.read(script)
    cells = [[(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, source)]
    assert cells[0] == cells[1], f"{script.stem} has changed: python notebooks/run.py {script.stem[:2]}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebooks_say_nothing_of_the_machine(script: Path) -> None:
    text = script.with_suffix(".ipynb").read_text()
    assert not re.findall(r'(?:/home|/root|/tmp|/work|/Users)/[^ "\\<]+', text)
