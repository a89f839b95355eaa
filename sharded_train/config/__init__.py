"""Settings as nested frozen dataclasses, built from a mapping and the command line; every problem is reported at once.

The annotations are the schema: int, float, bool, str, Literal, tuple, `X | None`, a nested dataclass, a tuple of them
(on the command line `key.0.option`), or a union of dataclasses, of which the key `type` (the class's name in lower
case) chooses one. An int is taken for a float; nothing else is coerced.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from sharded_train.config.values import Mismatch, checked, groups, item_groups, read, shown, wanted
from sharded_train.errors import ConfigError, did_you_mean, nearest_word

T = TypeVar("T")
PREFIX = "config"
FLAG = f"--{PREFIX}."
_ABSENT: Any = object()


def build(
    cls: type[T],
    values: Mapping[str, Any] | ConfigDict,
    overrides: Sequence[str] = (),
    check: Callable[[T], list[str]] = lambda built: [],
) -> T:
    """The dataclass that `values` and then `overrides` ("--config.a.b=text") ask for; the defaults fill the rest.

    Raises ConfigError with every unknown key, wrong type and unknown choice, each under its dotted key. Where unknown
    keys are all that is wrong, with what `check` finds in the rest too, but for what the unknown ones seem to mean.
    """
    builder = _Builder(cls)
    built = builder.group([cls], _ABSENT, values, builder.tree(overrides), PREFIX)
    if not builder.problems:
        return built
    rest = [] if built is None else check(built)
    raise ConfigError([*builder.problems, *(p for p in rest if not any(key in p for key in builder.meant))])


def to_dict(settings: Any) -> dict[str, Any]:
    """What `build` would read back, in values that JSON can hold; unions carry their `type`."""
    hints = typing.get_type_hints(type(settings))
    return {f.name: _plain(getattr(settings, f.name), hints[f.name]) for f in dataclasses.fields(settings)}


def differences(a: Any, b: Any) -> list[str]:
    """Where two settings (dataclasses, or what `to_dict` made of them) differ: "config.train.seed: 0 -> 1"."""
    old, new = (dict(_leaves(x if isinstance(x, Mapping) else to_dict(x), PREFIX)) for x in (a, b))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def option_keys(cls: type, key: str = PREFIX) -> list[str]:
    """Every dotted key there is, groups and all members of unions included."""
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        keys.append(f"{key}.{name}")
        for member in groups(hint):
            keys += option_keys(member, f"{key}.{name}")
    return list(dict.fromkeys(keys))


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides among a command's arguments, each as "--config.key=text", and all the other arguments.

    `--config.key text` means the same. Of a key given twice the last counts; `repeated` finds them, to be told.
    """
    overrides, others = [], []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith(FLAG):
            others.append(argument)
        elif "=" not in argument and waiting and not waiting[0].startswith("--"):
            overrides.append(f"{argument}={waiting.pop(0)}")
        else:
            overrides.append(argument)
    return overrides, others


def repeated(overrides: Sequence[str]) -> list[str]:
    """A note on every key that is given several texts."""
    texts: dict[str, list[str]] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        texts.setdefault(key, []).append(text)
    return [
        f"{key} is given {len(given)} times ({', '.join(given)}): the last one counts"
        for key, given in texts.items()
        if len(set(given)) > 1
    ]


class _Builder:
    """Walks the schema with the file's values (`given`) beside the command line's texts (`typed`).

    After a problem it walks on, so that all are found; what it builds is then of no use.
    """

    def __init__(self, root: type):
        self.root = root
        self.problems: list[str] = []
        self.num_unknown = 0  # of the problems
        self.meant: set[str] = set()  # keys that unknown ones seem to stand for

    def tree(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Overrides as nested dicts of texts."""
        tree: dict[str, Any] = {}
        for override in overrides:
            key, equals, text = override.partition("=")
            path = key.removeprefix(FLAG).split(".")
            if not key.startswith(FLAG) or not all(path):
                self.problems.append(f"{override}: an override has the form {FLAG}KEY=VALUE")
            elif not equals:
                self.problems.append(f"{key}: has no value; write {key}=VALUE")
            else:
                branch = tree
                for name in path[:-1]:
                    if not isinstance(branch.get(name), dict):
                        branch[name] = {}
                    branch = branch[name]
                branch[path[-1]] = text
        return tree

    def group(self, members: list[type], default: Any, given: Any, typed: Any, key: str) -> Any:
        """One of the dataclasses `members`, from a mapping (or absent) and a dict of texts (or absent)."""
        if not isinstance(given, Mapping | ConfigDict):
            if given is not _ABSENT:
                self.problems.append(f"{key}: wanted a group of options, got {shown(given)}; {_has(key, members[0])}")
            given = {}
        typed = {} if typed is _ABSENT else typed
        cls = members[0]
        if len(members) > 1:
            chosen = self._member(members, default, given, typed, key)
            if chosen is None:
                return None
            cls, given = chosen
        hints = typing.get_type_hints(cls)
        for name in dict.fromkeys([*given, *typed]):
            if name not in hints and not (name == "type" and len(members) > 1):
                self._unknown(str(name), cls, members, key)
        base = default if type(default) is cls else None
        values = {}
        for field in dataclasses.fields(cls):
            fallback = _default(field) if base is None else getattr(base, field.name)
            values[field.name] = self._option(field.name, hints[field.name], fallback, given, typed, key)
        return None if len(self.problems) > self.num_unknown else cls(**values)

    def _member(
        self, members: list[type], default: Any, given: Any, typed: dict[str, Any], key: str
    ) -> tuple[type, Any] | None:
        """The member of a union that `type` names, and what the file gives for it.

        Another type on the command line replaces the file's whole group: its options were meant for the old type.
        """
        names = {_tag(member): member for member in members}
        of_file = given.get("type", _tag(type(default)) if type(default) in members else None)
        name = typed.get("type", of_file)
        if not isinstance(name, str) or name not in names:
            hint = did_you_mean(str(name).lower(), names)
            self.problems.append(f"{key}.type: wanted one of {', '.join(names)}, got {shown(name)}{hint}")
            return None
        return names[name], given if name == of_file else {}

    def _option(self, name: str, hint: Any, default: Any, group: Any, texts: dict[str, Any], key: str) -> Any:
        """The value of one option or group: from the command line, else from the file, else the default."""
        key, typed, given = f"{key}.{name}", texts.get(name, _ABSENT), _ABSENT
        members, items = groups(hint), item_groups(hint)
        if name in group and (members or items or typed is _ABSENT):
            try:
                given = group[name]
            except RequiredValueError:
                self.problems.append(f"{key}: the config file leaves it to be set; add --{key}=VALUE")
                return None
        if typed is _ABSENT and given is _ABSENT:
            if default is _ABSENT:
                self.problems.append(f"{key}: has no default and must be set")
            return default
        if members:
            return self._nested(members, hint, default, given, typed, key)
        if items:
            return self._several(items, default, given, typed, key)
        if isinstance(typed, dict):
            for sub in typed:
                self.problems.append(f"{key}.{sub}: no such option; {key} is one value, {wanted(hint)}")
            return None
        value = given if typed is _ABSENT else read(hint, typed)
        try:
            return checked(hint, value)
        except Mismatch as mismatch:
            self.problems.append(f"{key}: wanted {wanted(hint)}, got {shown(value)}{mismatch}")
            return None

    def _nested(self, members: list[type], hint: Any, default: Any, given: Any, typed: Any, key: str) -> Any:
        """A group inside a group; one that may be None is turned on by setting any of its options."""
        optional = type(None) in typing.get_args(hint)
        if isinstance(typed, str):
            if optional and typed.lower() == "none":
                return None
            setting = f"type={'|'.join(map(_tag, members))}" if len(members) > 1 else "OPTION=VALUE"
            none = f" or --{key}=none" if optional else ""
            self.problems.append(f"{key}: a group of options, got {typed!r}; use --{key}.{setting}{none}")
            typed = _ABSENT
        if given is None and optional:
            if typed is _ABSENT:
                return None
            given = _ABSENT
        return self.group(members, default, given, typed, key)

    def _several(self, members: list[type], default: Any, given: Any, typed: Any, key: str) -> Any:
        """A tuple of groups; the command line changes them by their numbers, and adds one by the next number."""
        if typed is not _ABSENT and not isinstance(typed, dict):
            self.problems.append(f"{key}: a tuple of groups, got {typed!r}; use --{key}.0.OPTION=VALUE")
            return None
        if given is not _ABSENT and not isinstance(given, tuple | list):
            self.problems.append(f"{key}: wanted a tuple of groups of options, got {shown(given)}")
            return None
        bases = [_ABSENT] * len(given) if given is not _ABSENT else list(default)
        values = list(given) if given is not _ABSENT else [_ABSENT] * len(bases)
        texts = {} if typed is _ABSENT else typed
        if str(len(bases)) in texts:
            bases, values = [*bases, _ABSENT], [*values, _ABSENT]
        for number in [text for text in texts if text not in map(str, range(len(bases)))]:
            self.problems.append(f"{key}.{number}: there are {len(bases)} of them, numbered from 0")
        return tuple(
            self.group(members, base, value, texts.get(str(number), _ABSENT), f"{key}.{number}")
            for number, (base, value) in enumerate(zip(bases, values, strict=True))
        )

    def _unknown(self, name: str, cls: type, members: list[type], key: str) -> None:
        """Say where an option that does not exist here may have been meant to go."""
        problem = f"{key}.{name}: no such option"
        owners = [_tag(m) for m in members if name in typing.get_type_hints(m)]
        others = [n for m in members if m is not cls for n in typing.get_type_hints(m)]
        elsewhere = [k for k in option_keys(self.root) if k.rsplit(".", 1)[1] == name]
        if owners:
            problem = f"{key}.{name}: an option of {' and '.join(owners)}, but {key}.type is {_tag(cls)}"
        elif near := did_you_mean(name, typing.get_type_hints(cls)):
            problem += near
        elif near := did_you_mean(name, others):
            problem += f"{near} (an option of another type; {key}.type is {_tag(cls)})"
        elif elsewhere:
            problem += f"; there is {' and '.join(elsewhere)}"
        else:
            problem += did_you_mean(f"{key}.{name}", option_keys(self.root))
        self.problems.append(f"{problem}{' ' if problem.endswith('?') else '; '}{_has(key, cls)}")
        self.num_unknown += 1
        near = nearest_word(name, typing.get_type_hints(cls))
        keys = [f"{key}.{near}"] if near else elsewhere or [nearest_word(f"{key}.{name}", option_keys(self.root))]
        self.meant |= {meant.removeprefix(f"{PREFIX}.") for meant in keys if meant}


def _has(key: str, cls: type) -> str:
    return f"{key} has {', '.join(f.name for f in dataclasses.fields(cls))}"


def _tag(cls: type) -> str:
    return cls.__name__.lower()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _ABSENT if field.default is dataclasses.MISSING else field.default


def _plain(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        tag = {"type": _tag(type(value))} if len(groups(hint)) > 1 else {}
        return {**tag, **to_dict(value)}
    return [_plain(v, None) for v in value] if isinstance(value, tuple) else value


def _leaves(tree: Mapping[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.{name}")
        else:
            yield f"{key}.{name}", repr(value)
