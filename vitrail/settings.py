"""Settings: dataclasses for the sections of a config, and range checks for their fields.

The command line and `TrainConfig.override` name a field without its section. This bare name is unique over all
sections. By default, the bare name is the field's own name. `named` sets a different bare name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, get_args

from vitrail.errors import ConfigError

__all__ = [
    "above_zero",
    "at_least",
    "bare_names",
    "below_one",
    "named",
    "one_of",
    "pairs",
    "raise_problems",
    "seconds_in",
]


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def named(bare_name: str) -> dict[str, str]:
    """Return the metadata of a field whose bare name is not the field's own name."""
    return {"bare_name": bare_name}


def bare_names(cls: Any) -> dict[str, str]:
    """Return a dictionary from bare names to field names of a settings dataclass."""
    return {item.metadata.get("bare_name", item.name): item.name for item in dataclasses.fields(cls)}


def raise_problems(problems: Iterable[str]) -> None:
    """Raise `ConfigError` if there are any problems. The message has one line per problem."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def at_least(settings: Any, **limits: int | float) -> Iterator[str]:
    """Yield a message for every value that is below its limit. A value of None is allowed."""
    for name, value in _values(settings, limits):
        if not value >= limits[name]:
            yield f"{name}={value} is less than {limits[name]}"


def above_zero(settings: Any, *names: str) -> Iterator[str]:
    """Yield a message for every value that is not a finite number above 0. A value of None is allowed."""
    for name, value in _values(settings, names):
        if not 0 < value < math.inf:
            yield f"{name}={value} is not above 0"


def below_one(settings: Any, *names: str) -> Iterator[str]:
    """Yield a message for every value that is not in [0, 1)."""
    for name, value in _values(settings, names):
        if not 0 <= value < 1:
            yield f"{name}={value} is not in [0, 1)"


def one_of(settings: Any, **choices: Any) -> Iterator[str]:
    """Yield a message for every value that is not one of the choices of its `Literal` type."""
    for name, value in _values(settings, choices):
        if value not in get_args(choices[name]):
            yield f"{name}={value!r} is not one of {', '.join(map(repr, get_args(choices[name])))}"


def pairs(settings: Any, *names: str) -> Iterator[str]:
    """Yield a message for every value that is not a pair of whole numbers."""
    for name, value in _values(settings, names):
        if not (isinstance(value, Sequence) and len(value) == 2 and all(isinstance(one, Integral) for one in value)):
            yield f"{name}={value!r} is not a pair of whole numbers, (height, width)"


def seconds_in(text: str) -> float | None:
    """Return the seconds in a text such as "90s", "3m" or "1.5h". Return None for any other text, and for no time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text)
    return float(match[1]) * UNITS[match[2]] or None if match else None


def _values(settings: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values that are not None, with their bare names."""
    fields = bare_names(settings)
    for name in names:
        if (value := getattr(settings, fields[name])) is not None:
            yield name, value
