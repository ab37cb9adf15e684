"""Imports at the first use: of the parts that can be chosen by name, and of optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import TypeVar

from vitrail.errors import ConfigError

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """A table of parts by name, such as tasks. A part's module is imported when the part is used first. A user's own
    part is added as to a dictionary."""

    def __init__(self, places: dict[str, str], rest: Callable[[], Mapping[str, T]] | None = None) -> None:
        """`places` are the parts by name, each written as "module:attribute". `rest` returns parts whose names only
        their modules know. It is called for a name that is not among `places`, and for a list of all names."""
        self._parts: dict[str, T | str] = {**places}
        self._unloaded = {*places}
        self._rest = rest

    def __getitem__(self, name: str) -> T:
        part: T | str = self._parts[name] if name in self._parts else self._all()[name]
        if name not in self._unloaded:
            return part  # type: ignore[return-value]
        module, _, attribute = str(part).partition(":")
        self[name] = found = getattr(importlib.import_module(module), attribute)
        return found

    def __setitem__(self, name: str, part: T) -> None:
        self._unloaded.discard(name)
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        self._unloaded.discard(name)
        del self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._all()  # no part is imported

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> Mapping[str, T | str]:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._parts |= rest()
        return self._parts


def optional_module(name: str, extra: str) -> ModuleType:
    """Return a module of an optional package. Raise `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ConfigError(f"{package} is not installed; install it with: pip install 'vitrail[{extra}]'") from None
