"""The curves of several runs in the same charts, as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.analysis.charts import STYLE, series_chart
from vitrail.charts.svg import Series
from vitrail.files import partial_path, saving
from vitrail.page import document, escape
from vitrail.training.records.curves import averaged
from vitrail.training.reporting.journal import read_journal

__all__ = ["write_overlay"]

CURVES = {
    "loss": "training loss",
    "learning_rate": "learning rate",
    "gradient_norm": "norm of the gradients",
    "update_ratio": "relative update of the weights",
    "images_per_second": "images per second",
}
"""Numbers of the events `step` that are drawn, with the names of their axes."""


def write_overlay(path: Path, folders: Sequence[Path], *, metrics: Sequence[str]) -> None:
    """Write a page with these validation metrics and the training curves of all runs. Raises `SaveError`."""
    journals = {str(folder): read_journal(folder / "journal.jsonl") for folder in folders}
    page = document(
        "Curves of " + ", ".join(journals),
        _parts(journals, metrics),
        style=STYLE + ".scroll svg { max-width: 100%; height: auto; }",
    )
    with saving("the page", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)


def _parts(journals: Mapping[str, Sequence[dict[str, Any]]], metrics: Sequence[str]) -> Iterator[str]:
    readers = {f"validation {name.replace('_', ' ')}": _of("evaluation", name) for name in metrics}
    readers |= {name: _of("step", field) for field, name in CURVES.items()}
    yield '<div class="beside">'
    for name, value in readers.items():
        if chart := _chart(journals, name, value):
            yield f'<section><h2>{escape(name[0].upper() + name[1:])}</h2>\n<div class="scroll">{chart}</div></section>'
    yield "</div>"


def _of(kind: str, name: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Return a function that returns a number of an event of this kind. Evaluations are those on the validation split,
    without that of the finished model."""

    def value(event: Mapping[str, Any]) -> float | None:
        is_other = event["event"] != kind or event.get("split", "validation") != "validation" or event.get("kept")
        return None if is_other else event.get(name)

    return value


def _chart(
    journals: Mapping[str, Sequence[dict[str, Any]]], name: str, value: Callable[[Mapping[str, Any]], float | None]
) -> str:
    """Return a chart with a line for each run, or "" if no run has the number."""
    lines = []
    for run, events in journals.items():  # also those without the number, so that a run has one colour on the page
        points = [(float(event["step"]), float(found)) for event in events if (found := value(event)) is not None]
        lines.append(Series(run, averaged(points)[0]))
    return series_chart(lines, label=f"{name} of each run over steps", x_name="step", y_name=name)
