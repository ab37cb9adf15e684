"""Texts of images, such as captions: how the cells of a file are read, and how the texts are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8

from vitrail.errors import DataError, plural

TEXTS = ("text", "texts", "caption", "captions", "sentence", "sentences", "title", "description", "alt_text")
"""Names of columns and of JSON fields that hold texts, in lower case. The first one that is present is used."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that programs write for bytes that they cannot decode."""


@dataclass(frozen=True, eq=False)
class TextTable:
    """Different texts, one after another as UTF-8, so that a million of them are two arrays."""

    data: UInt8[np.ndarray, " bytes"]
    ends: Int64[np.ndarray, " n"]
    """The end of each text in `data`."""

    @staticmethod
    def of(texts: Iterable[str]) -> TextTable:
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return TextTable(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        return self.data[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes().decode()


class TextReader:
    """Reads the texts in cells, and counts those that are empty or broken.

    A cell is a text or a list of texts. Spaces at the ends are removed. A broken text is no text at all, or has
    characters that could not be decoded.
    """

    def __init__(self) -> None:
        self.empty = self.broken = 0

    def __call__(self, cell: object) -> tuple[str, ...]:
        """Return the texts of a cell, without those that are empty or broken."""
        found = [text for one in (cell if isinstance(cell, list | tuple) else [cell]) if (text := self._one(one))]
        return tuple(dict.fromkeys(found))

    def _one(self, cell: object) -> str:
        if cell is None or (isinstance(cell, str) and cell.strip().lower() in ("", "nan", "null")):
            self.empty += 1
            return ""
        if not isinstance(cell, str) or not is_sound(cell):
            self.broken += 1
            return ""
        return cell.strip()

    def notes(self, title: str) -> Iterator[str]:
        """Yield a note about the texts that are not used."""
        found = (("empty", self.empty), ("broken (not a text, or characters that cannot be decoded)", self.broken))
        for kind, count in found:
            if count:
                yield f"{title}: {plural(count, 'text')} {'is' if count == 1 else 'are'} {kind} and not used"


def is_sound(text: str) -> bool:
    """Return True unless a text has characters that stand for bytes that could not be decoded, or the character 0."""
    return REPLACEMENT not in text and "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def without_texts(title: str, names: Sequence[str]) -> DataError:
    """Return the error of a file without a column of texts."""
    return DataError(
        f"{title} has no column of texts: its columns are {', '.join(names) or 'none'}; the column of texts must be "
        f"called {', '.join(TEXTS[:4])} or the like, or chosen by adding ?text=COLUMN to the data's name"
    )
