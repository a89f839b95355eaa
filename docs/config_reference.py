"""Writes docs/config.md, every option of a config, from the dataclasses: `python -m docs.config_reference`."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharded_train.config.values import groups, item_groups, wanted
from sharded_train.recipe import Recipe

PAGE = Path(__file__).parent / "config.md"
HEAD = """# Every option of a config

<!-- Written by `python -m docs.config_reference` from the dataclasses; a test holds it in step. -->
A config file says what differs from these defaults; `--config.KEY=VALUE` on the command line changes an option once
more. A key that is not here is refused, and so is a value of another type. On the command line a tuple is written
`1,2`, nothing `none`, true and false by their names. [Write a config](../README.md#write-a-config) shows a file.
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for name, hint, default in options(Recipe, Recipe()):
        members = groups(hint)
        parts.append(f"\n## {name}\n")
        if len(members) == 1:
            parts += section(members[0], f"config.{name}", default)
            continue
        tags = ", ".join(f"`{member.__name__.lower()}`" for member in members)
        chosen = type(default).__name__.lower()
        parts.append(f"`config.{name}.type` chooses one: {tags}; by default `{chosen}`.\n")
        for member in members:
            parts.append(f"\n### {name}: {member.__name__.lower()}\n")
            parts += section(member, f"config.{name}", default if type(default) is member else None)
    return "".join(parts)


def section(cls: type, key: str, default: Any) -> Iterator[str]:
    """A dataclass: what it says of itself, the table of its options, and the groups within it."""
    yield f"{paragraphs(cls)}\n\n| option | type | default | |\n|---|---|---|---|\n"
    said, inner = comments(cls), []
    for name, hint, value in options(cls, default):
        path = f"{key}.{name}"
        items, members = item_groups(hint), groups(hint)
        if items or members:
            inner.append(((items or members)[0], f"{path}.N" if items else path))
            none = ", or None" if type(None) in typing.get_args(hint) else ""
            kind = f"a tuple of groups, `{path}.0` the first" if items else f"a group of options{none}"
        else:
            kind = wanted(hint)
        yield f"| `{path}` | {cell(kind)} | {cell(shown(value))} | {cell(said[name])} |\n"
    for cls, path in inner:
        yield f"\n**`{path}`**: "
        yield from section(cls, path, None)


def options(cls: type, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default (of the given instance, if there is one) of each field."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value = field.default if default is None else getattr(default, field.name)
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        yield field.name, hints[field.name], value


def comments(cls: type) -> dict[str, str]:
    """What stands behind each field, or in lines of its own above it; of an inherited one, where it comes from."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= own_comments(each) if dataclasses.is_dataclass(each) else {}
    return found


def own_comments(cls: type) -> dict[str, str]:
    found = dict.fromkeys(inspect.get_annotations(cls), "")
    above: list[str] = []
    name, lines = "", io.StringIO(inspect.cleandoc(inspect.getsource(cls))).readline
    first = True  # on its line
    for token in tokenize.generate_tokens(lines):
        if token.type == tokenize.NAME and first and token.string in found and token.start[1] == 4:
            name, found[token.string], above = token.string, " ".join(above), []
        elif token.type == tokenize.COMMENT:
            text = token.string.removeprefix("#").strip()
            if first:
                above.append(text)
            elif name:
                found[name] = f"{found[name]} {text}".strip()
        if token.type in (tokenize.NEWLINE, tokenize.NL):
            first, name = True, "" if token.type == tokenize.NEWLINE else name
        elif token.type not in (tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT):
            first = False
    return found


def paragraphs(cls: type) -> str:
    """A docstring, each paragraph on one line."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n"))


def shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "must be set"
    return "" if dataclasses.is_dataclass(value) else f"`{value}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
