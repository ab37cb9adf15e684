"""Table and JSON values of `vitrail export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vitrail.errors import plural
from vitrail.evaluation.predictions.bootstrap import Metric, mean_interval
from vitrail.serving.export.export import ExportResult
from vitrail.serving.export.parity import BATCHES, Parity, describe_drop
from vitrail.serving.export.timing import TIMED_BATCHES

__all__ = ["export_parts", "plain_exports"]

Seconds = Mapping[str, Sequence[float]]
"""Seconds of a batch of each size of `TIMED_BATCHES`, by the paths of files, and by "network"."""


def export_parts(results: Sequence[ExportResult], seconds: Seconds) -> list[Any]:
    """Return the lines about written files and the table of all files beside the network."""
    return [*(line for result in results for line in _lines(result)), *([_table(results, seconds)] if results else [])]


def plain_exports(
    results: Sequence[ExportResult], seconds: Seconds, failures: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the values of the table, and the messages about files that were not written."""
    return {
        "files": [_plain(result, seconds) for result in results],
        "network": {"milliseconds": _milliseconds(seconds, "network")},
        "failures": list(failures),
        "notes": list(notes),
    }


def _accuracy(parity: Parity, *, network: bool = False) -> Metric | None:
    """Return the accuracy of a file, or of its network, with an interval. None if no image has a label."""
    if parity.correct is None:
        return None
    correct = parity.correct + (parity.lost - parity.gained if network else 0)
    return mean_interval(np.arange(parity.labelled) < correct)


def _plain(result: ExportResult, seconds: Seconds) -> dict[str, Any]:
    accuracy = _accuracy(result.parity)
    return {
        "written": str(result.path),
        "format": result.to,
        "precision": result.precision,
        "bytes": result.bytes,
        "milliseconds": _milliseconds(seconds, str(result.path)),
        "parity": {
            **asdict(result.parity),
            "relative": result.parity.relative,
            "accuracy": None if accuracy is None else asdict(accuracy),
            "drop": None if accuracy is None else asdict(Metric(result.parity.drop, *result.parity.drop_interval)),
        },
    }


def _milliseconds(seconds: Seconds, name: str) -> dict[str, float]:
    return {str(size): 1e3 * value for size, value in zip(TIMED_BATCHES, seconds[name], strict=True)}


def _lines(result: ExportResult) -> list[str]:
    parity, sizes = result.parity, ", ".join(map(str, BATCHES))
    lines = [
        f"Written: {escape(str(result.path))} ({result.bytes / 1e6:.1f} MB)",
        f"Loaded again and compared with the network on {plural(parity.images, 'image')} in batches of {sizes}:",
        f"  largest difference {parity.difference:.2g}, {parity.relative:.1e} of the change from image to image",
    ]
    if parity.agreement is not None:
        lines.append(f"  same class for {parity.agreement:.2%} of the images")
    if accuracy := _accuracy(parity):
        lines.append(f"  accuracy of the file {_percent(accuracy)} on {plural(parity.labelled, 'labelled image')}")
    if result.precision == "int8":
        lines.append(f"  the file loses {describe_drop(parity)}")
    return lines


def _table(results: Sequence[ExportResult], seconds: Seconds) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("file", overflow="fold")
    times = (f"ms for {plural(size, 'image')}" for size in TIMED_BATCHES)
    for name in ("precision", "MB", *times, "accuracy"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    rows = [("network, PyTorch", "float32", "", "network", _accuracy(results[0].parity, network=True))]
    for result in results:
        size = f"{result.bytes / 1e6:.1f}"
        rows.append((escape(str(result.path)), result.precision, size, str(result.path), _accuracy(result.parity)))
    for title, precision, size, name, accuracy in rows:
        times = (f"{value:.1f}" for value in _milliseconds(seconds, name).values())
        table.add_row(title, precision, size, *times, "" if accuracy is None else _percent(accuracy))
    return table


def _percent(metric: Metric) -> str:
    low, high = (100 * (bound or 0.0) for bound in (metric.low, metric.high))
    return f"{metric.value:.1%} ({low:.1f} to {high:.1f})"
