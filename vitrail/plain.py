"""Frozen dataclasses to plain JSON values and back, strictly; and sizes in words, like 4GB, to bytes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, get_type_hints

import dacite

from vitrail.errors import ConfigError, nearest

__all__ = ["byte_count", "from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, nested ones included; tuples become lists when written as JSON."""
    return dataclasses.asdict(value)


def from_plain(cls: type[T], values: Any) -> T:
    """The dataclass that `to_plain` took apart. Raises `ConfigError` naming the first field that does not fit."""
    if not isinstance(values, dict):
        raise ConfigError(f"{cls.__name__} must be an object of named fields, not {type(values).__name__}")
    try:
        return dacite.from_dict(cls, _tuples(values), dacite.Config(strict=True, type_hooks={int: _int, float: _float}))
    except dacite.UnexpectedDataError as error:
        unknown = str(min(error.keys, key=str))
        raise ConfigError(f"unknown field {unknown!r}; {nearest(unknown, _field_names(cls))}") from None
    except (dacite.DaciteError, AttributeError, TypeError) as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None


def byte_count(text: str, field: str) -> int:
    """The number of bytes that "1500000000", "1.5GB" or "2GiB" stands for. Raises `ConfigError`, naming the field."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kMGT]?)(i?)B)?", text.strip())
    if match is None:
        raise ConfigError(f"{field}={text!r} is not a number of bytes, like 4GB, 1.5GiB, 800MB or 1500000000")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " "))


def _tuples(value: Any) -> Any:
    """JSON has lists where frozen dataclasses have tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _field_names(cls: Any) -> list[str]:
    """Names of the fields of a dataclass and of those inside it."""
    hints = get_type_hints(cls)
    names = []
    for field in dataclasses.fields(cls):
        inner = hints[field.name]
        names += _field_names(inner) if dataclasses.is_dataclass(inner) else [field.name]
    return names


def _int(value: Any) -> Any:
    """Python takes True for a 1; we do not."""
    if isinstance(value, bool):
        raise TypeError(f"{value} is not a number")
    return value


def _float(value: Any) -> Any:
    """JSON writes 1.0 as 1 in other hands than ours."""
    return float(_int(value)) if isinstance(value, int) else value
