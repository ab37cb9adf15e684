"""Imports at the first use: of the parts that can be chosen by name, and of optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, TypeVar

from vitrail.errors import ConfigError

T = TypeVar("T")

SETTINGS: tuple[Callable[[Any], bool], str] = (
    lambda part: (
        isinstance(part, type)
        and is_dataclass(part)
        and ("__dataclass_fields__" in vars(part) or not vars(part).get("__annotations__"))
    ),
    "a class with @dataclass, whose fields are the settings",
)
"""`fits` of a registry of classes that have settings. A class that inherits from a dataclass and has fields of its own
needs the decorator too, because Python ignores the fields without it."""


def subclass_of(base: type, names: str) -> tuple[Callable[[Any], bool], str]:
    """Return the `fits` of a registry of subclasses of `base`. `names` are the classes that users inherit from."""
    return lambda part: isinstance(part, type) and issubclass(part, base), f"a subclass of {names}"


class Registry(MutableMapping[str, T]):
    """A table of parts by name, such as tasks. A part's module is imported when the part is used first. A user's own
    part is added as to a dictionary."""

    def __init__(
        self,
        places: Mapping[str, str],
        rest: Callable[[], Mapping[str, T]] | None = None,
        fits: tuple[Callable[[Any], bool], str] | None = None,
    ) -> None:
        """`places` are the parts by name, each written as "module:attribute". `rest` returns parts whose names only
        their modules know. It is called for a name that is not among `places`, and for a list of all names. `fits`
        tells if an object can be a part of a user's own, and names the parts in messages."""
        self._places = dict(places)
        self._fits = fits
        self._parts: dict[str, T] = {}
        self._rest = rest

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            if name in self._places:
                module, _, attribute = self._places[name].partition(":")
                self._parts[name] = getattr(importlib.import_module(module), attribute)
            else:
                self._read_rest()
        return self._parts[name]

    def __setitem__(self, name: str, part: T) -> None:
        """Add a part. Raise `ConfigError` for an object that can be none."""
        if self._fits is not None and not self._fits[0](part):
            raise ConfigError(f"{name!r}: {part!r:.60} is not {self._fits[1]}")
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._places.pop(name, None)
        self._parts.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._names()  # no part is imported

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        """Return all names: those of `places` first."""
        self._read_rest()
        return list(dict.fromkeys((*self._places, *self._parts)))

    def _read_rest(self) -> None:
        if (rest := self._rest) is not None:
            self._parts = {**rest(), **self._parts}
            self._rest = None  # last, because other threads look up names meanwhile


def optional_module(name: str, extra: str) -> ModuleType:
    """Return a module of an optional package. Raise `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ConfigError(f"{package} is not installed; install it with: pip install 'vitrail[{extra}]'") from None
