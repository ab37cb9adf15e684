"""Targets without names, for tests."""

from __future__ import annotations

import numpy as np

from vitrail.data.targets import Targets


def numbered(count: int) -> tuple[str, ...]:
    """Return names that are numbers from 1."""
    return tuple(str(number + 1) for number in range(count))


def single_labels(values: np.ndarray, classes: int) -> Targets:
    """Return one of `classes` classes for each sample, or -1 for no label."""
    return Targets("class", numbered(classes), values)


def multi_labels(dense: np.ndarray) -> Targets:
    """Return several classes for each sample, from an array with 1 for each class of a sample (n classes)."""
    return Targets.of([tuple(np.flatnonzero(row).tolist()) for row in dense], "classes", numbered(dense.shape[1]))


def number_targets(values: np.ndarray, names: tuple[str, ...] = ()) -> Targets:
    """Return numbers for each sample (n k)."""
    return Targets("numbers", names or numbered(values.shape[1]), values)
