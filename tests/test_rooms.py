"""The rooms of the house: imports point down only, and every file has a room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sharded_train"

# From the ground up; a file may import from its own room and those before it.
ROOMS = {
    "language": "errors compat gpu_flags links sharding params collectives in_order in_place precision schedules",
    "model": "ops models",
    "step": "optimizer local attending gradients pipeline scaling model_order step",
    "run": "exits mesh mesh_picture devices peak flops noise tables config recipe workdir checkpoint data metrics "
    "precision_log train_precision assemble begin train calibrate initial_weights scaling_resumed report stopping "
    "memory profiling evaluate generate decode equivalence attention_check faults show schedule_report rehearse draw "
    "bench doctor verbs",
    "entry": "launch options commands __main__",
}
LEVEL = {name: level for level, names in enumerate(ROOMS.values()) for name in names.split()}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


def room_of(module: str) -> str:
    """The name under which a module such as "sharded_train.ops.linear" stands in the rooms."""
    return module.split(".")[1] if "." in module else ""


def imported(path: Path) -> set[str]:
    """Our own modules that a file imports, wherever in it, but for type checking."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "sharded_train":
            found |= {f"sharded_train.{name.name}" for name in node.names if not name.name.startswith("__version")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sharded_train."):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("sharded_train.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in LEVEL, f"{own} has no room: give it one in {Path(__file__).name}"
    up = [module for module in imported(path) if LEVEL[room_of(module)] > LEVEL[own]]
    assert not up, f"{own} imports from a room above it: {up}"


def test_the_core_is_small_enough_to_read() -> None:
    core = [path for path in FILES if LEVEL[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] <= 2]
    assert sum(len(path.read_text().splitlines()) for path in core) < 7000
    assert max(len(path.read_text().splitlines()) for path in FILES) <= 320
