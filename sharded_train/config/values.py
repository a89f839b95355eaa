"""One option's value: read from the command line's text, checked against its annotation, and put in words."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from sharded_train.errors import did_you_mean

LARGEST = 3.4e38  # what the run computes with is fp32


class Mismatch(Exception):
    """A value is not of the wanted type; the text, possibly empty, is a hint to put after the message."""


def checked(hint: Any, value: Any) -> Any:
    """The value when it is of the wanted type (an int made a float, a list a tuple), else Mismatch."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        return None if value is None else checked(_without_none(hint), value)
    if origin is typing.Literal:
        if any(type(choice) is type(value) and choice == value for choice in arguments):
            return value
        raise Mismatch(did_you_mean(str(value), map(str, arguments)))
    if origin is tuple:
        if not isinstance(value, tuple | list):
            raise Mismatch(f"; write it as ({shown(value)},)")
        hints = _element_hints(arguments, len(value))
        if len(hints) != len(value):
            raise Mismatch(f", {len(value)} values")
        return tuple(checked(h, v) for h, v in zip(hints, value, strict=True))
    assert hint in (int, float, bool, str), f"{hint} is not a type that a setting can have"
    if isinstance(value, bool) and hint is not bool:
        raise Mismatch
    if hint is float and isinstance(value, int | float):
        return _finite(value)
    if isinstance(value, hint):
        return value
    raise Mismatch(_whole_number(value) if hint is int else "")


def read(hint: Any, text: str) -> Any:
    """A text of the command line as a value of the wanted type, or the text itself where it cannot be read so."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        return None if text.lower() == "none" else read(_without_none(hint), text)
    if origin is typing.Literal:
        return {str(choice): choice for choice in arguments}.get(text, text)
    if origin is tuple:
        inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        parts = [_unquoted(part.strip()) for part in inner.split(",")]
        if not parts[-1]:  # nothing at all, or a comma after the last
            parts.pop()
        hints = _element_hints(arguments, len(parts)) + [str] * len(parts)  # too many stay texts, and are refused
        return tuple(read(h, p) for h, p in zip(hints, parts, strict=False))
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def wanted(hint: Any) -> str:
    """The wanted type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        return f"{wanted(_without_none(hint))} or None"
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and arguments[-1] is ...:
        return f"a tuple of {wanted(arguments[0])} values"
    if origin is tuple:
        return f"a tuple ({', '.join(map(wanted, arguments))})"
    return {bool: "bool (true or false)"}.get(hint, hint.__name__)


def shown(value: Any) -> str:
    """A value as people would write it, on one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def groups(hint: Any) -> list[type]:
    """The dataclasses in an annotation: none for a plain value, several for a union to choose from."""
    members = typing.get_args(hint) if is_union(hint) else (hint,)
    return [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]


def item_groups(hint: Any) -> list[type]:
    """The dataclasses that a tuple of any length holds: none for a plain value or a group."""
    arguments = typing.get_args(hint)
    return groups(arguments[0]) if typing.get_origin(hint) is tuple and arguments[-1] is ... else []


def _without_none(hint: Any) -> Any:
    members = [m for m in typing.get_args(hint) if m is not type(None)]
    assert len(members) == 1, f"{hint}: a union of plain values cannot be told apart"
    return members[0]


def _element_hints(arguments: tuple[Any, ...], count: int) -> list[Any]:
    return [arguments[0]] * count if arguments[-1] is ... else list(arguments)


def _unquoted(text: str) -> str:
    """Without the quotes of a Python string or of JSON."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise Mismatch("; it must be finite in fp32")
    return number


def _whole_number(value: Any) -> str:
    """The int that 1e6, or a text like it, stands for."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    return f"; write {int(number)}" if number.is_integer() else ""
