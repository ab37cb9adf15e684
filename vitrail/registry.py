"""Tables of the parts that can be chosen by name. A part's module is imported when the part is used first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """A table of parts by name, such as tasks. A user's own part is added as to a dictionary."""

    def __init__(self, places: dict[str, str]) -> None:
        """`places` are the parts by name, each written as "module:attribute"."""
        self._places: dict[str, str | None] = {**places}
        self._parts: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if (place := self._places[name]) is not None:
            module, _, attribute = place.partition(":")
            self._parts[name] = getattr(importlib.import_module(module), attribute)
            self._places[name] = None
        return self._parts[name]

    def __setitem__(self, name: str, part: T) -> None:
        self._places[name], self._parts[name] = None, part

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._parts.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # the names are known without an import

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
