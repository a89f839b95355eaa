"""Every command that README, docs and configs show: understood by our own parser, its config loaded and checked.

Those that cost little are run. Of a command with something left open (N, DIR, ..., [--option]) verb and options are
looked up.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_train import recipe
from sharded_train.__main__ import _parsers, main
from sharded_train.commands import VERBS, Verb
from sharded_train.config import PREFIX, option_keys
from sharded_train.rehearse import clusters

ROOT = Path(__file__).parents[1]
SOURCES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").glob("*.py")),
    *(path for path in sorted((ROOT / "launch").glob("*")) if path.is_file()),
]
COMMAND = re.compile(r"(?:^|[\s(`])(?:\.venv/bin/)?(?:sharded-train|python -m sharded_train) ([a-z]+\b[^`\n]*)")
OPEN = re.compile(r"\.\.\.|\[|=[A-Z]+\b|\b[A-Z]{4,}\b|\$")  # something that a reader fills in
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(path: Path) -> Iterator[str]:
    """What follows `sharded-train` in a file's commands, in code or among words, lines with a backslash joined.

    What launch/'s files are given they pass on to `train`.
    """
    text = re.sub(r" *\\\n[ #]*", " ", path.read_text())
    text = re.sub(r"launch/(slurm.sbatch|openmpi.sh\)?`? HOSTFILE) --", "sharded-train train --", text)
    for line in text.splitlines():
        for found in COMMAND.finditer(line):
            shown = found[1].split("  #")[0].rstrip("|; ")
            if shown.count(")") > shown.count("("):
                shown = shown.removesuffix(")")
            if shown.split()[0] in VERBS or "--" in shown:
                yield shown


SHOWN = [(path, command) for path in SOURCES for command in dict.fromkeys(commands(path))]
WHOLE = [(path, command) for path, command in SHOWN if not OPEN.search(command)]
NAMES = [f"{path.name}: {command}" for path, command in WHOLE]


def of_verb(name: str) -> list[str]:
    return list(dict.fromkeys(command for _, command in WHOLE if command.split()[0] == name and "--" in command))


def check_recipe(args: argparse.Namespace, overrides: list[str], processes: int = 1) -> None:
    """As far as can be told without the devices: those that the command names are taken as given."""
    asked = recipe.load(args.config, overrides) if args.config else recipe.from_dict({}, overrides)
    recipe.check(asked, None)
    if cluster := getattr(args, "cluster", None):
        hosts, devices = cluster.rpartition(":")[2].split("x")
        recipe.check(asked, int(hosts) * int(devices))
    elif getattr(args, "cpu_devices", None):
        recipe.check(asked, processes * args.cpu_devices)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: our configs, the files that pages show (a block that begins with # NAME.py), some text."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "docs", folder / "text", ignore=lambda _, names: [n for n in names if not n.endswith(".md")])
    for page in (ROOT / "docs").glob("*.md"):
        for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(), re.M | re.S):
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Verbs load and check their config, and do nothing else; `launch` has its command understood."""

    def instead(verb: Verb, processes: int) -> Verb:
        def run(args: argparse.Namespace, overrides: list[str]) -> int:
            if hasattr(args, "command") and args.command:
                monkeypatch.setitem(VERBS, args.command[0], instead(VERBS[args.command[0]], args.processes))
                return main(args.command)
            if verb.has_config:
                for more in getattr(args, "compare", None) or {"": []}:
                    variant = (args.compare or {}).get(more, []) if hasattr(args, "compare") else []
                    check_recipe(args, [*overrides, *variant], processes)
            return 7

        return dataclasses.replace(verb, run=run)

    monkeypatch.chdir(folder)
    for name, verb in list(VERBS.items()):
        monkeypatch.setitem(VERBS, name, instead(verb, 1))


@pytest.mark.usefixtures("understood")
@pytest.mark.parametrize(("path", "command"), WHOLE, ids=NAMES)
def test_it_is_understood(path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)
    if len(words) == 1:
        assert words[0] in VERBS, "no such verb"
        return
    assert main(words) == 7, capsys.readouterr().err


@pytest.mark.usefixtures("understood")
@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_is_understood(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(VERBS[verb].example)[1:]) == 7, capsys.readouterr().err


def test_what_is_left_open_has_the_right_names() -> None:
    _, parsers = _parsers()
    keys = {*option_keys(recipe.Recipe, PREFIX), f"{PREFIX}.KEY"}
    wrong = []
    for path, command in SHOWN:
        verb, *rest = command.split()
        if verb not in VERBS:
            wrong.append(f"{path.name}: {verb}")
            continue
        known = {option for option in parsers[verb]._option_string_actions} | {"--help"}
        if "--" in rest:  # launch: what it starts is another verb's
            known |= {option for option in parsers["train"]._option_string_actions}
        for option in re.findall(r"--[a-z][\w.-]*", " ".join(rest)):
            is_key = option.startswith(f"--{PREFIX}.")
            if not (option.removeprefix("--") in keys or option.endswith(".type") if is_key else option in known):
                wrong.append(f"{path.name}: {verb} {option}")
    assert not wrong


@pytest.mark.parametrize("command", of_verb("schedule"))
def test_schedules_are_drawn(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0


@pytest.mark.parametrize("command", [command for command in of_verb("show") if "--cluster" in command])
def test_what_is_shown_without_devices(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) == 0
    assert "tensor" in capsys.readouterr().out


@pytest.mark.slow
def test_getting_started_from_top_to_bottom(folder: Path) -> None:
    """Some minutes: what the page shows is run as it stands, but for the rehearsal, in one folder and in this order."""
    page = ROOT / "docs/getting_started.md"
    shown = [command for command in commands(page) if command.split()[0] != "rehearse" and "--workdir" in command]
    assert len(shown) == 8
    for command in shown:
        words = [sys.executable, "-m", "sharded_train", *shlex.split(command)]
        there = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=folder, env=there, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    for run, steps in (("first", 12), ("mine", 10), ("two", 12)):
        assert (folder / f"runs/{run}/checkpoints/{steps}").is_dir()


def test_targets_extras_and_programs_exist() -> None:
    makefile, missing = (ROOT / "Makefile").read_text(), []
    for path in SOURCES:
        text = path.read_text()
        code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)])
        for target in re.findall(r"^make ([a-z-]+)", code, flags=re.MULTILINE):
            missing += [] if f"\n{target}:" in makefile else [f"{path.name}: make {target}"]
        for program in re.findall(r"python (?:-m docs\.)?([\w./]+\.py)\b", text):
            missing += [] if (ROOT / program).is_file() else [f"{path.name}: {program}"]
        for extras in re.findall(r"(?:sharded-train|-e '?\.)\[([\w,]+)\]", text):
            missing += [f"{path.name}: [{extra}]" for extra in extras.split(",") if extra not in EXTRAS]
    assert not missing


FRAGMENTS = [
    (path, text)
    for path in SOURCES
    for text in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
    if "get_config" in text or text.startswith("config.")
]


@pytest.mark.parametrize(("path", "text"), FRAGMENTS, ids=[path.name for path, _ in FRAGMENTS])
def test_configs_and_parts_of_them_are_taken(path: Path, text: str, tmp_path: Path) -> None:
    if "get_config" not in text:
        whole = f"config = ConfigDict()\n{text}return config\n"
        text = f"from ml_collections import ConfigDict\n\ndef get_config():\n{textwrap.indent(whole, '    ')}"
    (tmp_path / "config.py").write_text(text)
    recipe.check(recipe.load(tmp_path / "config.py"), 8)


def test_a_cluster_of_ones_own_is_taken(tmp_path: Path) -> None:
    (toml,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/rehearse.md").read_text(), re.M | re.S)
    (tmp_path / "ours.toml").write_text(toml)
    assert clusters.parse(f"file:{tmp_path / 'ours.toml'}").num_hosts == 16


def test_this_finds_commands() -> None:
    assert len(WHOLE) > 20
    assert {command.split()[0] for _, command in SHOWN} == set(VERBS), "a verb that no page shows"
