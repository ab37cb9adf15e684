"""The rules by which the text of a label becomes the name of a class, in every format of data."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vitrail.data.choice import Choice
from vitrail.data.faults import Fault
from vitrail.errors import DataError, listed, plural

MISSING = frozenset({"nan", "none", "null", "n/a", "na", "#n/a", "<na>", "nat"})
"""Words for a missing value, in lower case, as pandas and spreadsheets write them."""

INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
"""Characters without width or meaning, which copied text can contain: two names must not differ in them alone."""

JOINERS = frozenset("\u200c\u200d\u200e\u200f\u061c")
"""Invisible characters that several scripts and emoji need inside a word: joiners and marks of direction."""

SEPARATORS = ("|", ";", ",", "/", "+", "&", " ")
NEVER_IN_NAMES = ("|", ";")
"""Separators that names of classes do not contain: a part of several names need not be a class of its own."""

WHOLE = re.compile(r"(\d+)(\.0*)?")


def class_name(text: str) -> str:
    """Return the name of a class in Unicode's normal form C, without spaces at its ends and without characters that
    cannot be seen. A space of another kind is a space."""
    name = unicodedata.normalize("NFC", text).translate(INVISIBLE)
    return "".join(" " if unicodedata.category(one) == "Zs" else one for one in name).strip()


def is_missing(text: str) -> bool:
    """Return True for an empty text, and for a word that stands for a missing value, such as "nan", "None" or "N/A"."""
    return not text.strip() or text.strip().lower() in MISSING


def check_names(title: str, names: Iterable[str]) -> None:
    """Raise `DataError` for a class name that is empty or contains control characters. All scripts are accepted."""
    wrong = [name for name in names if not name or not "".join(one for one in name if one not in JOINERS).isprintable()]
    if wrong:
        raise DataError(f"{title} has classes with unprintable names: {sorted(wrong)}; rename them")


class LabelReader:
    """Reads the cells of a column of labels, and counts what it does not take as the name of a class."""

    def __init__(self, choice: Choice) -> None:
        self._separator = None if choice.separator in (None, "none") else choice.separator
        self._keep = choice.keep_missing
        self.missing: Counter[str] = Counter()
        """The number of cells with each word for a missing value."""

    def __call__(self, cell: object, times: int = 1) -> str | tuple[str, ...] | None:
        """Return the name of a cell's class, or the names of all its classes. Return None if the cell has no label.

        A list holds several names. If a separator was chosen, a text holds several names, and an empty text none.
        `times` is the number of such cells, for the count of missing values.
        """
        if isinstance(cell, list | tuple):
            return tuple(name for one in cell if (name := self._one(one, times)) is not None)
        if self._separator is not None:
            parts = str("" if cell is None else cell).split(self._separator if self._separator.strip() else None)
            return tuple(name for one in parts if (name := self._one(one, times)) is not None)
        return self._one(cell, times)

    def _one(self, cell: object, times: int) -> str | None:
        name = "" if cell is None else class_name(str(cell))
        if name and name.lower() in MISSING and not self._keep:
            self.missing[name] += times
            return None
        return name or None

    def notes(self, title: str) -> Iterator[str]:
        """Yield a note on words that were read as a missing value."""
        if self.missing:
            yield (
                f"{title}: {plural(self.missing.total(), 'label')} ({listed(sorted(self.missing))}) stand for a "
                "missing value, so these images have no label; if they are names of classes, add --keep-missing-words"
            )


def whole_numbers(names: Iterable[str]) -> dict[str, str]:
    """Return the whole number of each name such as "1.0", which is how pandas writes class numbers in a column with a
    missing value. Return nothing unless all names are whole numbers and some have a decimal point."""
    found: dict[str, str] = {}
    for name in names:
        if (match := WHOLE.fullmatch(name)) is None:
            return {}
        found[name] = match[1]
    return found if any("." in name for name in found) else {}


def refuse_joined(title: str, counts: Mapping[str, int], choice: Choice) -> None:
    """Raise `DataError` if labels of several images join names of other classes, as "cat|fox" does, because an image
    can then have several labels. `counts` holds the number of images of each class."""
    if choice.separator is not None:
        return
    for separator in SEPARATORS:
        joined = {name: parts for name in counts if len(parts := _parts(name, separator)) > 1}
        used = Counter(part for parts in joined.values() for part in set(parts))
        known = {part for part in used if part in counts or (separator in NEVER_IN_NAMES and used[part] > 1)}
        found = [name for name, parts in joined.items() if known.issuperset(parts)]
        rows = sum(counts[name] for name in found)
        if rows > 1:
            raise DataError(
                f"{title}: {plural(rows, 'label')} such as {found[0]!r} join the names of other classes; if they are "
                f"several labels of one image, add --label-separator {separator!r}; if each of them is one class, add "
                "--label-separator none"
            )


def _parts(name: str, separator: str) -> list[str]:
    return [part.strip() for part in name.split(separator) if part.strip()]


def similar_names(title: str, classes: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault if names of classes differ only in case, or in the number of spaces."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    groups = [names for names in alike.values() if len(names) > 1]
    if groups:
        shown = listed([" and ".join(map(repr, names)) for names in groups])
        yield Fault(
            "similar-names", "warning", sum(map(len, groups)),
            f"{title} has classes whose names differ only in case or spaces: {shown}",
            "Each spelling is a class of its own.",
            "If they are one class, give its images the same label.",
        )  # fmt: skip
