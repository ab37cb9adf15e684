"""The tables of an overview for other programs: CSV, and Parquet for the embeddings."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.analysis.summaries.overview import Overview
from vitrail.errors import DataError
from vitrail.evaluation.features.files import parquet_library, printable_key

PARQUET = "embedding.parquet"
"""Table of the embeddings with all their features."""


def write_tables(found: Overview, folder: Path) -> tuple[str, ...]:
    """Write the tables of an overview into a folder, and return notes about those that cannot be written.

    classes.csv has the metrics of each class, saliency.csv the measurements of each saliency method, and embedding.csv
    the place of each image on the map of embeddings. embedding.parquet has the embeddings themselves as well, and is
    written if pyarrow is installed.
    """
    if found.answers is not None:
        rows = [(row.name, row.images, row.accuracy, row.precision, row.f1) for row in found.answers.report.per_class]
        _write_csv(folder / "classes.csv", ("class", "images", "accuracy", "precision", "f1"), rows)
    if found.saliency is not None:
        heads = ("method", "deletion_area", "insertion_area", "correlation_random_head", "correlation_random_all")
        methods = [
            (one.name, one.deletion.value, one.insertion.value, one.random_head, one.random_all)
            for one in found.saliency.methods
        ]
        _write_csv(folder / "saliency.csv", heads, methods)
    if found.embedding is None:
        return ()
    columns = _embedding_columns(found)
    _write_csv(folder / "embedding.csv", tuple(columns), zip(*columns.values(), strict=True))
    try:
        parquet_library()
    except DataError as reason:
        return (f"{PARQUET} was not written: {reason}",)
    _write_parquet(folder / PARQUET, columns, found.embedding.features)
    return ()


def _embedding_columns(found: Overview) -> dict[str, Sequence[Any]]:
    """Return the columns of the embedding table, one row for each image."""
    mapped, answers = found.embedding, found.answers
    assert mapped is not None
    columns: dict[str, Sequence[Any]] = {"key": mapped.keys, "class": mapped.labels}
    if answers is not None:
        columns["predicted"] = [found.bundle.classes[number] for number in answers.each.predicted]
        columns["probability"] = answers.each.confidence.tolist()
    columns["component_1"], columns["component_2"] = mapped.points.T.tolist()
    return columns


def _write_parquet(path: Path, columns: dict[str, Sequence[Any]], features: np.ndarray) -> None:
    """Write the columns and the features: a list of float32 of fixed length for each image."""
    arrow = parquet_library()
    texts = {"key", "class", "predicted"}
    arrays = {
        name: arrow.array(list(map(printable_key, values)) if name in texts else values)
        for name, values in columns.items()
    }
    flat = arrow.array(np.ascontiguousarray(features, dtype=np.float32).reshape(-1))
    arrays["feature"] = arrow.FixedSizeListArray.from_arrays(flat, features.shape[1])
    arrow.parquet.write_table(arrow.table(arrays), path)


def _write_csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    path.write_text(file.getvalue(), encoding="utf-8", errors="backslashreplace")
