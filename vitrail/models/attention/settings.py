"""Settings of an attention mechanism, which follow its name in `ViTConfig.attention`: `local:window=9:padding=zero`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError

SWITCHES = {"on": True, "off": False}


@dataclass(frozen=True)
class NoSettings:
    """The settings of a mechanism that has none."""


def attention_name(text: str) -> str:
    """Return the name of the mechanism, without its settings."""
    return text.partition(":")[0]


def settings_of(text: str, settings: type[Any]) -> Any:
    """Return the settings behind a mechanism's name as an instance of `settings`, a frozen dataclass.

    Fields may be whole numbers, numbers, names (`Literal`), switches (written as on and off), and several whole numbers
    (written as 4/8). Raises `ConfigError` for an unknown setting and for a value that the setting cannot have.
    """
    name, _, rest = text.partition(":")
    hints, found = get_type_hints(settings), {}
    for part in rest.split(":") if rest else []:
        key, equals, value = part.partition("=")
        if key not in hints or not equals:
            known = ", ".join(f"{field.name}={_written(field.default)}" for field in fields(settings))
            choices = f"its settings and their defaults are {known}" if known else "it has no settings"
            raise ConfigError(f"attention={text!r}: {part!r} is not a setting of {name!r}; {choices}")
        try:
            found[key] = _reader(hints[key])(value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"attention={text!r}: {key}={value!r} is not {_described(hints[key])}; the default is "
                f"{_written(getattr(settings, key))}{'; a colon separates settings' if ',' in value else ''}"
            ) from None
    return settings(**found)


def _reader(hint: Any) -> Callable[[str], Any]:
    """Return the function that reads a setting of this type. It raises `ValueError` or `KeyError` for other texts."""
    if get_origin(hint) is Literal:
        return lambda text: {name: name for name in get_args(hint)}[text]
    if hint is bool:
        return lambda text: SWITCHES[text]
    if get_origin(hint) is tuple:
        return lambda text: tuple(int(part) for part in text.split("/"))
    return int if hint is int else float


def _described(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if hint is bool:
        return "on or off"
    if get_origin(hint) is tuple:
        return "one or several whole numbers, such as 4 or 4/8"
    return "a whole number" if hint is int else "a number"


def _written(value: Any) -> str:
    """Return a value as it is written in the text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
