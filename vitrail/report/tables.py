"""Tables for the terminal: rows of values, and the columns that say which values are shown, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    value: str | Callable[[Any], Any]
    """Key of the value in a row, or a function that returns the value from a row."""
    form: str | Callable[[Any], str] = ""
    """Format specification of a value, or a function that returns its text."""
    missing: str = ""
    """Text for None."""
    is_text: bool = False
    """True for a column that is aligned to the left. The first column of a table always is."""

    def text(self, row: Any) -> str:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if value is None:
            return self.missing
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


def terminal_table(columns: Sequence[Column], rows: Iterable[Any], caption: str | None = None) -> Table:
    """Return a table with a line for each row. `caption` explains the columns."""
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    for column in columns:
        is_text = column.is_text or column is columns[0]
        table.add_column(column.heading, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    return table
