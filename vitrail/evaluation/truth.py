"""The true targets of samples: one class each, several classes each, or numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from vitrail.data.source import Samples, Source, target_kind
from vitrail.data.targets import Target, TargetKind, Targets, numbered
from vitrail.errors import DataError


def truth_of(source: Source, rows: Iterable[int] | None = None) -> Targets:
    """Return the targets of all samples of a source, or of the samples `rows` in this order. No image is read."""
    if isinstance(source, Samples) and source.target_kind != "none":
        return source.targets if rows is None else source.targets.rows(np.fromiter(rows, np.int64))
    chosen = range(len(source)) if rows is None else rows
    kind, names = target_kind(source), tuple(source.classes)
    return Targets.of(map(source.target, chosen), "class" if kind == "none" else kind, names)


def truth_of_targets(targets: Iterable[Target], kind: TargetKind, columns: int) -> Targets:
    """Return these targets of `columns` classes or numbers, without their names.

    If the kind is "none", every sample gets the label -1.
    """
    return Targets.of(targets, "class" if kind == "none" else kind, numbered(columns))


def target_from_plain(value: Any, kind: TargetKind, columns: int) -> Target:
    """Return the target that `Targets.plain` wrote as a JSON value. Raise `ValueError` if the value does not fit."""
    if kind == "numbers":
        fits = isinstance(value, list) and len(value) == columns and all(map(_is_number, value))
        target: Target = tuple(math.nan if one is None else float(one) for one in value) if fits else None
    else:
        several = value if isinstance(value, list) else [] if value is None else [value]
        fits = all(type(one) is int and 0 <= one < columns for one in several)
        fits = fits and isinstance(value, list) == (kind == "classes")
        target = tuple(several) if kind == "classes" else value
    if not fits:
        raise ValueError(f"{value} is not a valid target for {columns} {'numbers' if kind == 'numbers' else 'classes'}")
    return target


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_known(source: Source, name: str) -> Targets:
    """Return the targets of a source. Raise `DataError` if no sample has a label or a number. No image is read.

    `name` is the name of the evaluator, for the message.
    """
    truth = truth_of(source)
    if not truth.known.any():
        what, needed = ("known number", "numbers") if truth.kind == "numbers" else ("label", "classes")
        raise DataError(f"none of {len(source):,} images has a {what}, but {name} needs to know their {needed}")
    return truth
