"""The report of a run without labels: one HTML page with metrics and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.files import partial_path, saving
from vitrail.page import document, escape, figure, table, thumbnail
from vitrail.tasks.pictures import PictureTable
from vitrail.training.records.inside import inside_link

__all__ = ["write_pictures"]

STYLE = """
.strip { flex-wrap: nowrap; overflow-x: auto; }
.strip figure { flex: none; width: 6.5rem; }
"""


def write_pictures(
    folder: Path, heading: str, metrics: dict[str, float], tables: Sequence[PictureTable]
) -> Path | None:
    """Write `report.html` into a run's folder, replace an earlier report, and return the path. Without tables of
    pictures, write nothing. Raise `SaveError`.

    `heading` is a sentence about the run.
    """
    if not tables:
        return None
    parts = [f'<p class="dim">{escape(heading)}</p>']
    if (folder / "progress.html").is_file():
        parts.append('<p><a href="progress.html">Curves and settings of the run</a></p>')
    parts.append(inside_link(folder))
    if metrics:
        rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in metrics.items()]
        parts.append(table(("metric", "value"), rows))
    for title, text, rows_of_pictures in tables:
        parts.append(f"<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>")
        for row in rows_of_pictures:
            figures = (figure(thumbnail(image, lines[0] if lines else title), lines) for image, lines in row)
            parts.append(f'<div class="strip">{"".join(figures)}</div>')
    path = folder / "report.html"
    with saving("the report", path):
        partial = partial_path(path)
        partial.write_text(document(f"Report of {folder.resolve().name}", parts, style=STYLE), encoding="utf-8")
        partial.replace(path)
    return path
