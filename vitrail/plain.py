"""Frozen dataclasses to plain JSON values and back, strictly: unknown keys and wrong types are errors."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import dacite

from vitrail.errors import ConfigError, nearest

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, nested ones included; tuples become lists when written as JSON."""
    return dataclasses.asdict(value)


def from_plain(cls: type[T], values: Any) -> T:
    """The dataclass that `to_plain` took apart. Raises `ConfigError` naming the first field that does not fit."""
    if not isinstance(values, dict):
        raise ConfigError(f"{cls.__name__} must be an object of named fields, not {type(values).__name__}")
    try:
        return dacite.from_dict(cls, values, dacite.Config(strict=True, cast=[tuple], type_hooks={float: _float}))
    except dacite.UnexpectedDataError as error:
        unknown = sorted(error.keys)
        fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        raise ConfigError(f"unknown field {unknown[0]!r} of {cls.__name__}; {nearest(unknown[0], fields)}") from None
    except dacite.DaciteError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None


def _float(value: Any) -> Any:
    """JSON writes 1.0 as 1 in other hands than ours."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
