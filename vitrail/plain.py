"""Conversion of frozen dataclasses to plain JSON values and back, and of texts like 4GB to bytes."""

from __future__ import annotations

import dataclasses
import re
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import dacite

from vitrail.errors import ConfigError, nearest

__all__ = ["byte_count", "from_plain", "to_plain"]

T = TypeVar("T")

NOUNS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "values that are true or false"),
    str: ("a text", "texts"),
}
"""Names of JSON's types in messages, in singular and plural."""


def to_plain(value: Any) -> dict[str, Any]:
    """Return a dataclass as a dictionary, in which dataclasses inside it are dictionaries as well. Tuples become lists
    when they are written as JSON.
    """
    return dataclasses.asdict(value)


def from_plain(cls: type[T], values: Any) -> T:
    """Return the dataclass from the values that `to_plain` returned. A missing field has its default.

    Raise `ConfigError` with the first field that is unknown, missing or has a wrong value. Errors of the dataclass's
    own checks are raised unchanged.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{cls.__name__} must be an object of named fields, not {type(values).__name__}")
    try:
        return dacite.from_dict(cls, _tuples(values), dacite.Config(strict=True, type_hooks={int: _int, float: _float}))
    except dacite.UnexpectedDataError as error:
        unknown = str(min(error.keys, key=str))
        raise ConfigError(f"unknown field {unknown!r}; {nearest(unknown, _field_names(cls))}") from None
    except dacite.MissingValueError as error:
        raise ConfigError(f"{error.field_path} is missing, and {cls.__name__} has no default for it") from None
    except dacite.WrongTypeError as error:
        raise ConfigError(f"{error.field_path}={error.value!r} is not {_noun(error.field_type)}") from None
    except (dacite.DaciteError, AttributeError, TypeError) as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None


def byte_count(text: str, field: str) -> int:
    """Return the number of bytes for a text like "1500000000", "1.5GB" or "2GiB". Raise `ConfigError` for other
    texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kMGT]?)(i?)B)?", text.strip())
    if match is None:
        raise ConfigError(f"{field}={text!r} is not a size in bytes; write for example 4GB, 1.5GiB or 1500000000")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " "))


def _tuples(value: Any) -> Any:
    """Return JSON values with every list replaced by a tuple, because the fields of frozen dataclasses are tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _field_names(cls: Any) -> list[str]:
    """Return the names of the fields of a dataclass and of the dataclasses inside it."""
    hints = get_type_hints(cls)
    names = []
    for field in dataclasses.fields(cls):
        inner = hints[field.name]
        names += _field_names(inner) if dataclasses.is_dataclass(inner) else [field.name]
    return names


class _Boolean:
    """Wrapper that makes dacite refuse booleans as numbers. Python accepts True and False as numbers."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _int(value: Any) -> Any:
    return _Boolean(value) if isinstance(value, bool) else value


def _float(value: Any) -> Any:
    """Return a whole number as a float, because other JSON writers may write 1.0 as 1."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else _int(value)


def _noun(kind: Any) -> str:
    """Return the name of a field's type for a message."""
    if kind in NOUNS:
        return NOUNS[kind][0]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if one is type(None) else _noun(one) for one in inner)
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a list of {count}{NOUNS[inner[0]][1] if inner[0] in NOUNS else f'items, each {_noun(inner[0])}'}"
    return f"an object with the fields of {kind.__name__}" if isinstance(kind, type) else str(kind)
