"""Run notebooks and keep what they show: each percent script becomes the notebook of its name.

python notebooks/run.py [01 03 ...]       all of them by default; needs the extra `notebooks`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent
PER_CELL = 900  # seconds


def run(script: Path) -> Path:
    """Execute one script as a notebook and write it beside. Raises nbclient's CellExecutionError."""
    notebook = jupytext.read(script)
    start = time.perf_counter()
    nbclient.NotebookClient(notebook, timeout=PER_CELL, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # the same at every run
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    path = script.with_suffix(".ipynb")
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1024:,.0f} KiB")
    return path


def main(names: list[str]) -> None:
    scripts = sorted(path for path in FOLDER.glob("[0-9]*.py") if not names or path.name.startswith(tuple(names)))
    if not scripts:
        sys.exit(f"no notebook begins with {' or '.join(names)}")
    for script in scripts:
        run(script)


if __name__ == "__main__":
    main(sys.argv[1:])
