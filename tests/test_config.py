"""Settings from files and the command line: what is taken, what is refused, and the words for it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from ml_collections import ConfigDict, config_dict

from sharded_train.config import build, differences, option_keys, repeated, split_arguments, to_dict
from sharded_train.config import file as config_file
from sharded_train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Circle:
    radius: float = 1.0
    colour: str = "red"


@dataclasses.dataclass(frozen=True)
class Square:
    side: float = 2.0
    colour: str = "blue"


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = 3
    rate: float = 0.5
    on: bool = False
    mode: Literal["fast", "slow"] = "fast"
    level: Literal[0, 1, 2] = 1
    names: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=lambda: Inner(count=4))
    maybe: Inner | None = None
    shape: Circle | Square = dataclasses.field(default_factory=Circle)
    title: str = "x"


@dataclasses.dataclass(frozen=True)
class Required:
    size: int


def problems(function: Callable[..., Any], *arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def one_problem(values: Any, *overrides: str) -> str:
    (problem,) = problems(build, Outer, values, overrides)
    return problem


def test_nothing_given_is_the_default() -> None:
    assert build(Outer, {}) == Outer()
    assert build(Outer, ConfigDict()) == Outer()


def test_absent_options_come_from_the_default_of_their_group() -> None:
    assert build(Outer, {"inner": {"rate": 1.0}}).inner == Inner(count=4, rate=1.0)


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("count", 7, 7),
        ("rate", 2, 2.0),
        ("on", True, True),
        ("mode", "slow", "slow"),
        ("names", ["a", "b"], ("a", "b")),
        ("names", ("a",), ("a",)),
        ("span", (1, 2), (1, 2)),
        ("span", None, None),
        ("limit", 5, 5),
    ],
)
def test_values_of_a_file(option: str, given: Any, wanted: Any) -> None:
    value = getattr(build(Outer, ConfigDict({"inner": {option: given}})).inner, option)
    assert value == wanted
    assert type(value) is type(wanted)


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("count", "7", 7),
        ("count", "-1", -1),
        ("count", "1_000", 1000),
        ("rate", "2", 2.0),
        ("rate", "1e-3", 1e-3),
        ("on", "true", True),
        ("on", "False", False),
        ("mode", "slow", "slow"),
        ("level", "2", 2),
        ("names", "a,b", ("a", "b")),
        ("names", "(1 + 1, 'a')", ("1 + 1", "a")),  # no Python is evaluated
        ("names", "a,", ("a",)),
        ("names", "", ()),
        ("span", "1,2", (1, 2)),
        ("span", "(1, 2)", (1, 2)),
        ("names", """["a", 'b',]""", ("a", "b")),  # as JSON and Python write it
        ("names", "x[0-9],y[0-9]", ("x[0-9]", "y[0-9]")),  # globs keep their brackets
        ("span", "none", None),
        ("limit", "None", None),
        ("limit", "5", 5),
    ],
)
def test_values_of_the_command_line(option: str, text: str, wanted: Any) -> None:
    value = getattr(build(Outer, {"inner": {option: "of the file"}}, [f"--config.inner.{option}={text}"]).inner, option)
    assert value == wanted
    assert type(value) is type(wanted)


def test_a_text_may_hold_an_equals_sign() -> None:
    assert build(Outer, {}, ["--config.title=a=b"]).title == "a=b"


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("count", 1.5, "wanted int, got 1.5"),
        ("count", 1e6, "wanted int, got 1000000.0; write 1000000"),
        ("count", True, "wanted int, got True"),
        ("count", "7", "wanted int, got '7'"),
        ("count", None, "wanted int, got None"),
        ("rate", "0.1", "wanted float, got '0.1'"),
        ("rate", True, "wanted float, got True"),
        ("rate", float("nan"), "must be finite"),
        ("rate", 10**400, "must be finite"),
        ("on", 1, "wanted bool (true or false), got 1"),
        ("mode", "fats", "one of fast, slow, got 'fats'; did you mean fast?"),
        ("level", True, "one of 0, 1, 2, got True"),
        ("names", "a", "wanted a tuple of str values, got 'a'; write it as ('a',)"),
        ("names", ("a", 1), "got ('a', 1)"),
        ("span", (1, 2, 3), "a tuple (int, int) or None, got (1, 2, 3), 3 values"),
        ("limit", 2.0, "wanted int or None, got 2.0; write 2"),
    ],
)
def test_wrong_values_of_a_file(option: str, given: Any, words: str) -> None:
    problem = one_problem({"inner": {option: given}})
    assert problem.startswith(f"config.inner.{option}: ")
    assert words in problem


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("count", "many", "wanted int, got 'many'"),
        ("count", "1e3", "wanted int, got '1e3'; write 1000"),
        ("count", "none", "wanted int, got 'none'"),
        ("rate", "inf", "must be finite"),
        ("on", "1", "bool (true or false), got '1'"),
        ("mode", "fast ", "did you mean fast?"),
        ("level", "3", "one of 0, 1, 2, got '3'"),
        ("span", "1", "(int, int) or None, got (1,), 1 values"),
        ("span", "1,2,3", "3 values"),
        ("span", "1,b", "got (1, 'b')"),
    ],
)
def test_wrong_values_of_the_command_line(option: str, text: str, words: str) -> None:
    problem = one_problem({}, f"--config.inner.{option}={text}")
    assert problem.startswith(f"config.inner.{option}: ")
    assert words in problem


def test_unknown_option_names_its_neighbours() -> None:
    problem = one_problem({"inner": {"cuont": 1}})
    assert problem.startswith("config.inner.cuont: no such option; did you mean count?")
    assert "config.inner has count, rate, on, mode, level, names, span, limit" in problem
    assert "did you mean inner?" in one_problem({"iner": {}})
    assert "did you mean rate?" in one_problem({}, "--config.inner.raet=1")


def test_unknown_option_that_exists_elsewhere() -> None:
    assert "there is config.inner.count and config.maybe.count" in one_problem({"count": 1})


def test_options_of_another_type_say_so() -> None:
    problem = one_problem({"shape": {"side": 1.0}})
    assert "config.shape.side: an option of square, but config.shape.type is circle" in problem
    problem = one_problem({"shape": {"type": "square", "radis": 1.0}})
    assert "did you mean radius? (an option of another type; config.shape.type is square)" in problem


def test_type_chooses_the_member_of_a_union() -> None:
    assert build(Outer, {"shape": {"type": "square", "side": 3}}).shape == Square(side=3.0)
    assert build(Outer, {"shape": {"radius": 3}}).shape == Circle(radius=3.0)
    assert build(Outer, {}, ["--config.shape.type=square"]).shape == Square()
    assert "config.shape.type: wanted one of circle, square, got 'Square'; did you mean square?" in one_problem(
        {"shape": {"type": "Square"}}
    )


def test_another_type_on_the_command_line_replaces_the_group() -> None:
    file = {"shape": {"type": "circle", "radius": 3.0, "colour": "green"}}
    assert build(Outer, file, ["--config.shape.type=square"]).shape == Square()
    assert build(Outer, file, ["--config.shape.type=circle"]).shape == Circle(3.0, "green")
    assert build(Outer, file, ["--config.shape.colour=pink"]).shape == Circle(3.0, "pink")


def test_a_group_that_may_be_none() -> None:
    assert build(Outer, {"maybe": {}}).maybe == Inner()
    assert build(Outer, {"maybe": None}, ["--config.maybe.count=1"]).maybe == Inner(count=1)
    assert build(Outer, {"maybe": {"count": 1}}, ["--config.maybe=none"]).maybe is None
    assert build(Outer, {}, ["--config.maybe=none", "--config.maybe.count=1"]).maybe == Inner(count=1)


def test_a_value_where_a_group_is_wanted() -> None:
    assert "config.inner: wanted a group of options, got 3; config.inner has count" in one_problem({"inner": 3})
    assert "got None" in one_problem({"inner": None})
    assert "use --config.inner.OPTION=VALUE" in one_problem({}, "--config.inner=3")
    assert "or --config.maybe=none" in one_problem({}, "--config.maybe=3")
    assert "use --config.shape.type=circle|square" in one_problem({}, "--config.shape=square")


def test_a_group_where_a_value_is_wanted() -> None:
    assert "config.title.size: no such option; config.title is one value, str" in one_problem(
        {}, "--config.title.size=3"
    )
    assert "config.title: wanted str, got {'size': 3}" in one_problem({"title": {"size": 3}})


def test_everything_wrong_is_told_at_once() -> None:
    values = {"innner": {}, "inner": {"count": 1.5, "mode": "x"}, "shape": {"type": "oval"}, "maybe": {"rate": "a"}}
    found = problems(build, Outer, values, ["--config.inner.limit=x", "--config.title", "--config..a=1"])
    keys = [problem.split(":")[0] for problem in found]
    assert sorted(keys) == [
        "--config..a=1",
        "--config.title",
        "config.inner.count",
        "config.inner.limit",
        "config.inner.mode",
        "config.innner",
        "config.maybe.rate",
        "config.shape.type",
    ]


def test_required_options() -> None:
    assert "config.size: has no default and must be set" in problems(build, Required, {})[0]
    values = ConfigDict({"title": config_dict.required_placeholder(str)})
    assert "config.title: the config file leaves it to be set; add --config.title=VALUE" in one_problem(values)
    assert build(Outer, values, ["--config.title=t"]).title == "t"


def test_references_between_options_are_followed() -> None:
    values = ConfigDict({"inner": {"count": 6}})
    values.maybe = {"count": values.inner.get_ref("count") * 2}
    assert build(Outer, values).maybe == Inner(count=12)


def test_arguments_are_split_from_overrides() -> None:
    given = ["train", "--config=x.py", "--config.a.b=1", "--config.c", "-1", "--workdir", "w", "--config.d", "--json"]
    assert split_arguments(given) == (
        ["--config.a.b=1", "--config.c=-1", "--config.d"],
        ["train", "--config=x.py", "--workdir", "w", "--json"],
    )


def test_of_a_key_given_twice_the_last_counts_and_it_is_said() -> None:
    overrides = ["--config.title=a", "--config.inner.count=1", "--config.title=b", "--config.inner.count=1"]
    assert build(Outer, {}, overrides).title == "b"
    assert repeated(overrides) == ["--config.title is given 2 times (a, b): the last one counts"]


def test_settings_survive_json() -> None:
    settings = Outer(Inner(names=("a", "b"), span=(1, 2)), Inner(), Square(side=0.1), "t")
    values = json.loads(json.dumps(to_dict(settings)))
    assert values["shape"] == {"type": "square", "side": 0.1, "colour": "blue"}
    assert "type" not in values["inner"]
    assert build(Outer, values) == settings
    assert build(Outer, ConfigDict(values)) == settings


def test_differences_name_the_keys_and_both_values() -> None:
    old, new = Outer(), Outer(Inner(count=4, span=(1, 2)), shape=Square(), title="y")
    assert differences(old, old) == []
    assert differences(to_dict(old), old) == []
    assert differences(old, json.loads(json.dumps(to_dict(new)))) == [
        "config.inner.span: None -> [1, 2]",
        "config.shape.type: 'circle' -> 'square'",
        "config.shape.radius: 1.0 -> absent",
        "config.shape.colour: 'red' -> 'blue'",
        "config.title: 'x' -> 'y'",
        "config.shape.side: absent -> 2.0",
    ]


def test_option_keys_hold_every_member_of_a_union_once() -> None:
    keys = option_keys(Outer)
    assert {"config.shape", "config.shape.radius", "config.shape.side", "config.inner.count"} <= set(keys)
    assert len(keys) == len(set(keys))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


RETURNS = "def get_config():\n    return {'title': %r}\n"


def title(path: Path | str) -> str:
    return build(Outer, config_file.run(path)).title


def test_a_config_file_is_run(tmp_path: Path) -> None:
    assert title(written(tmp_path / "a.py", RETURNS % "one")) == "one"
    assert title(written(tmp_path / "a.py", RETURNS % "two")) == "two"  # as it is now, not as it was
    assert not list(tmp_path.rglob("*.pyc"))


def test_missing_files_name_their_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "quickstart.py", RETURNS % "x")
    (problem,) = problems(config_file.run, tmp_path / "quikstart.py")
    assert "quikstart.py: no such config file; did you mean" in problem
    assert problem.endswith("quickstart.py?")
    monkeypatch.chdir(tmp_path)
    assert problems(config_file.run, "zzz.py") == [f"zzz.py: no such config file; looked in {tmp_path}"]
    assert "it is a folder" in problems(config_file.run, tmp_path)[0]
    written(tmp_path / "configs" / "gpt2_124m.py", RETURNS % "x")
    for asked in ("gpt2_124m", "config/gpt2_124m.py"):
        (problem,) = problems(config_file.run, asked)
        assert problem == f"{asked}: no such config file; did you mean {Path('configs', 'gpt2_124m.py')}?"
    assert "a config is a Python file" in problems(config_file.run, written(tmp_path / "c.yaml", ""))[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = x.foo\n", ["a.py, line 2: AttributeError", "'foo'", "(at: y = x.foo)"]),
        ("def get_config():\n    raise KeyError('k')\n", ["a.py, line 2: KeyError: 'k'"]),
        ("def get_config(:\n", ["a.py, line 1: SyntaxError"]),
        ("import sys\nsys.exit(3)\n", ["a.py, line 2: SystemExit: 3"]),
        ("def get_confg(): ...\n", ["a.py: has no get_config(); did you mean get_confg?"]),
        ("get_config = {}\n", ["a.py: has no get_config()"]),
        ("def get_config(size):\n    return {}\n", ["a.py: TypeError", "missing 1 required positional argument"]),
        ("def get_config():\n    {}\n", ["a.py: get_config() returned None", "is its `return` missing?"]),
        ("def get_config():\n    return [1]\n", ["a.py: get_config() returned [1], not a ConfigDict or a dict"]),
        (
            "from ml_collections import ConfigDict\n\nc = ConfigDict({'lr': 0.1})\nc.lr = 'x'\n",
            ["a.py, line 4: TypeError", "(at: c.lr = 'x')"],
        ),
        ("import no_such_module_here\n", ["a.py, line 1: ModuleNotFoundError", "no_such_module_here"]),
    ],
)
def test_config_files_that_fail(tmp_path: Path, text: str, words: list[str]) -> None:
    (problem,) = problems(config_file.run, written(tmp_path / "a.py", text))
    for word in words:
        assert word in problem


def test_a_failing_neighbour_is_named(tmp_path: Path) -> None:
    written(tmp_path / "base.py", "\n\nraise ValueError('no')\n")
    (problem,) = problems(config_file.run, written(tmp_path / "a.py", "import base\n"))
    assert f"{tmp_path / 'base.py'}, line 3: ValueError: no" in problem


@pytest.mark.parametrize(
    "statement", ["from base import get_config", "from .base import get_config", "from FOLDER.base import get_config"]
)
def test_config_files_import_each_other_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(written(tmp_path / "elsewhere" / "x", "").parent)
    for folder in ("mine", "yours"):  # the same names in two folders
        base = written(tmp_path / folder / "base.py", RETURNS % folder)
        user = written(base.with_name("user.py"), statement.replace("FOLDER", folder) + "\n")
        assert title(user) == folder


def test_config_files_anywhere_build_on_those_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from configs.llama3_8b import get_config as llama\n\ndef get_config():\n    return llama()\n"
    path = written(tmp_path / "configs" / "mine.py", text)
    monkeypatch.chdir(tmp_path)
    assert config_file.run(path)["model"]["num_layers"] == 32


def test_running_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    written(tmp_path / "base.py", RETURNS % "x")
    config_file.run(written(tmp_path / "a.py", "from base import get_config\n"))
    problems(config_file.run, written(tmp_path / "b.py", "import base\nraise ValueError\n"))
    assert sys.path == path
    assert {m for m in set(sys.modules) - modules if "base" in m or m.endswith((".a", ".b"))} == set()


def test_no_jax_is_needed() -> None:
    code = "import sharded_train.config, sharded_train.config.file, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=config_file.CONFIGS.parent)
