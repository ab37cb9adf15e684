"""The option that names the Python of another library's environment."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.errors import ConfigError

__all__ = ["parse_environments"]


def parse_environments(pairs: Sequence[str]) -> dict[str, str]:
    """Return the Python of each library. Raise `ConfigError` for a text that is not LIBRARY=PATH."""
    found = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"environment={pair!r} is not LIBRARY=PATH; write for example timm=/opt/timm/bin/python")
        found[name] = path
    return found
