"""Runs a config file: Python of the user's own, with a `get_config()` that returns the settings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from sharded_train.config.values import shown
from sharded_train.errors import ConfigError, did_you_mean

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # is there when the project runs from its repository


def run(path: Path | str) -> Mapping[str, Any] | ConfigDict:
    """What the file's `get_config()` returns. Raises ConfigError with the file, the line and the error."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file{_neighbour(path)}")
    if path.suffix != ".py":
        raise ConfigError(f"{path}: a config is a Python file with a get_config(), named *.py")
    with _importable(path.resolve()):
        try:
            settings = _call_get_config(path)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_located(error, path)) from error
    if not isinstance(settings, Mapping | ConfigDict):
        forgotten = "; is its `return` missing?" if settings is None else ""
        raise ConfigError(f"{path}: get_config() returned {shown(settings)}, not a ConfigDict or a dict{forgotten}")
    return settings


def _call_get_config(path: Path) -> Any:
    module = _execute(path.resolve())
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        functions = [name for name, value in vars(module).items() if isinstance(value, types.FunctionType)]
        raise ConfigError(f"{path}: has no get_config(){did_you_mean('get_config', functions)}")
    return get_config()


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now: no bytecode of an earlier state, and none left behind."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _execute(path: Path) -> types.ModuleType:
    """The file as the module FOLDER.NAME, so that it can say `from .neighbour import get_config`."""
    name = f"{path.parent.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(path: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as `x` and as `FOLDER.x`, and this project's `configs.x`, from anywhere.

    Those modules are forgotten afterwards: another folder may have some of the same names.
    """
    saved_path, saved_modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(path.parent), str(path.parents[1]), str(CONFIGS.parent)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = saved_path
        for name in set(sys.modules) - saved_modules:
            file = getattr(sys.modules[name], "__file__", None)
            if Path(file).parent in (path.parent, CONFIGS) if file else name in (path.parent.name, CONFIGS.name):
                del sys.modules[name]


def _located(error: BaseException, path: Path) -> str:
    """The innermost line of the config (or of a neighbour that it imports) that led to the error, and the error."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_near(error.filename, path)}, line {error.lineno}: {said}"
    folder = path.resolve().parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == folder]
    if not frames:
        return f"{path}: {said}"
    return f"{_near(frames[-1].filename, path)}, line {frames[-1].lineno}: {said} (at: {frames[-1].line})"


def _near(file: str, path: Path) -> Path:
    """A file of the config's folder, named the way that the config was."""
    return path.parent / Path(file).name if Path(file).parent == path.resolve().parent else Path(file)


def _neighbour(path: Path) -> str:
    if path.is_dir():
        return " (it is a folder)"
    names = sorted(str(p) for folder in {path.parent, Path("configs")} for p in folder.glob("*.py"))
    return did_you_mean(str(path), names) or (f"; looked in {Path.cwd()}" if not path.is_absolute() else "")
