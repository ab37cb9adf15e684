"""The choice of splits, columns and labels that can follow the name of data, as in `photos.csv?label=kind`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from urllib.parse import quote, unquote

from vitrail.data.splits import SPLITS, SplitNames, split_names
from vitrail.errors import ConfigError, DataError

OPTIONS = {
    "splits": "--splits",
    "image": "?image=",
    "label": "?label=",
    "separator": "--label-separator",
    "keep_missing": "--keep-missing-words",
}
"""The option or the word after the name by which a user makes each choice, for messages."""


@dataclass(frozen=True)
class Choice:
    """The choice of splits, columns and labels of some data. The defaults choose nothing."""

    splits: SplitNames | None = None
    """The names that form each split. None if the usual names are recognised."""
    image: str | None = None
    """The column of images or of their paths."""
    label: str | None = None
    """The column of labels."""
    separator: str | None = None
    """The text between the labels in a cell. "none" if a cell is always one label. None if the user did not choose."""
    keep_missing: bool = False
    """True if words for a missing value, such as None and NA, are names of classes."""

    def refuse_others(self, title: str, *used: str) -> None:
        """Raise `DataError` if something was chosen on which the format of the data does not act."""
        unused = [OPTIONS[one.name] for one in fields(self) if one.name not in used and getattr(self, one.name)]
        if unused:
            raise DataError(f"{' and '.join(unused)} has no effect on {title}; leave it out")


def choice_in(location: str) -> tuple[str, Choice]:
    """Return a location without the choice at its end, and this choice. A "?" in the path of a file is part of the
    path, and that of a URL can be followed by other words. Raise `DataError` or `ConfigError` for a wrong choice."""
    base, mark, query = location.rpartition("?")
    if not mark or os.path.lexists(location):
        return location, Choice()
    pairs = query.split("&")
    names = (*SPLITS, "splits", "separator", "missing", *(() if "://" in base else ("image", "label")))
    divided = [pair.partition("=") for pair in pairs]
    ours = [(name, unquote(value)) for name, _, value in divided if name in names]
    others = "&".join(pair for pair, (name, _, _) in zip(pairs, divided, strict=True) if name not in names)
    is_data = "://" not in base and (base.startswith("hf:") or os.path.lexists(base))
    if not ours and not is_data:
        return location, Choice()
    if (is_data and (others or not ours)) or not all(value for _, value in ours):
        raise DataError(
            f"{location!r} ends in ?{query}, which chooses nothing; write ?image=COLUMN, ?label=COLUMN, ?train=NAME, "
            "?separator=TEXT or ?missing=keep, joined by &"
        )
    values = dict(ours)
    words = [value if name == "splits" else f"{name}={value}" for name, value in ours if name in (*SPLITS, "splits")]
    if values.get("missing", "keep") != "keep":
        raise DataError(f"{location!r} has missing={values['missing']!r}, and the only choice is missing=keep")
    choice = Choice(
        split_names(words) if words else None,
        values.get("image"), values.get("label"), values.get("separator"), "missing" in values,
    )  # fmt: skip
    return f"{base}?{others}" if others else base, choice


def chosen(location: str, splits: Iterable[str] = (), separator: str = "", *, keep_missing: bool = False) -> str:
    """Return a location with a choice at its end, such as "photos?train=Training&test=Testing" for the words
    "train=Training" and "test=Testing". Raise `ConfigError` for a wrong word, or if the location has such a choice."""
    before = choice_in(location)[1]
    names = split_names(words) if (words := list(splits)) else None
    given = {"splits": names, "separator": separator, "keep_missing": keep_missing}
    for name, value in given.items():
        if (value or value == {}) and getattr(before, name) not in (None, False):
            raise ConfigError(f"{OPTIONS[name]}: {location!r} has this choice already; leave one out")
    pairs = [f"{split}={quote(name, safe='/*')}" for split, some in (names or {}).items() for name in some]
    pairs += ["splits=none"] * (names == {})
    pairs += [f"separator={quote(separator, safe='')}"] * bool(separator) + ["missing=keep"] * keep_missing
    asked = before != Choice() or ("?" in location and "://" in location)
    return location + ("&" if asked else "?") + "&".join(pairs) if pairs else location
