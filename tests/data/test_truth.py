"""Tests of the three kinds of targets: known values, selections, and conversion from and to sources and files."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.make import MemorySource
from tests.targets import multi_labels, number_targets, numbered, single_labels
from vitrail.data.source import check_known, target_from_plain, truth_of
from vitrail.data.targets import Target, TargetKind, Targets
from vitrail.errors import DataError

NAN = math.nan
LABELS = single_labels(np.array([2, -1, 0]), 3)
SEVERAL = multi_labels(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], np.uint8))
NUMBERS = number_targets(np.array([[1.5, NAN], [NAN, NAN], [-2.0, 0.0]]))


def same(one: Targets, other: Targets) -> bool:
    return one.kind == other.kind and one.columns == other.columns and np.array_equal(
        one.dense, other.dense, equal_nan=one.kind == "numbers"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "known", "plain"),
    [
        (LABELS, [True, False, True], [2, None, 0]),
        (SEVERAL, [True, True, True], [[0, 2], [], [1]]),
        (NUMBERS, [True, False, True], [[1.5, None], [None, None], [-2.0, 0.0]]),
    ],
)
def test_what_is_known_and_plain_values(truth: Targets, known: list[bool], plain: list[Any]) -> None:
    assert len(truth) == 3 and truth.known.tolist() == known
    assert [truth.plain(row) for row in range(3)] == plain
    assert truth.rows(slice(1, 3)).plain(1) == plain[2] and len(truth.rows(np.array([True, False, True]))) == 2
    assert [truth.rows(np.array([2, 0])).plain(row) for row in range(2)] == [plain[2], plain[0]]
    again = [target_from_plain(value, truth.kind, truth.columns) for value in json.loads(json.dumps(plain))]
    assert same(Targets.of(again, truth.kind, numbered(truth.columns)), truth)


def test_restricted_to_some_outputs() -> None:
    assert same(LABELS.restricted((1, 2)), single_labels(np.array([1, -1, -1]), 2))
    assert same(SEVERAL.restricted((2, 0)), multi_labels(np.array([[1, 1], [0, 0], [0, 0]], np.uint8)))
    assert same(NUMBERS.restricted((1,)), number_targets(np.array([[NAN], [NAN], [0.0]])))


def test_groups_are_the_classes_of_single_labels_and_the_likeliest_class_can_hit() -> None:
    assert LABELS.groups().tolist() == [2, -1, 0]
    assert SEVERAL.groups().tolist() == NUMBERS.groups().tolist() == [0, 0, 0]
    assert LABELS.hits(np.array([2, 0, 1])).tolist() == [True, False, False]
    assert SEVERAL.hits(np.array([2, 0, 1])).tolist() == [True, False, True]
    with pytest.raises(DataError, match="accuracy needs classes, but these samples have numbers; measure the errors"):
        NUMBERS.hits(np.array([0, 0, 0]))


@pytest.mark.parametrize("label", [3, -2])
def test_labels_outside_of_the_classes_are_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} of row 1 is not one of 3 classes, numbered from 0"):
        single_labels(np.array([0, label, 7]), 3)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([2, None, 0], LABELS), ([(0, 2), (), (1,)], SEVERAL), ([None, None], single_labels(np.array([-1, -1]), 3))],
)
def test_truth_of_a_source_of_classes(targets: list[Target], expected: Targets) -> None:
    source = MemorySource(labels=targets, classes=("a", "b", "c"))
    assert same(truth_of(source), expected)
    assert same(truth_of(source, [1, 0]), expected.rows(np.array([1, 0])))


def test_truth_of_a_source_of_numbers() -> None:
    source = MemorySource(labels=[(1.5, NAN), None, (-2.0, 0.0)], classes=("age", "height"))
    assert same(truth_of(source), NUMBERS)
    check_known(source, "linear")
    with pytest.raises(DataError, match="none of 2 images has a label, but linear needs to know their classes"):
        check_known(MemorySource(labels=[None, None], classes=("a",)), "linear")
    with pytest.raises(DataError, match="none of 1 images has a known number, but linear needs to know their"):
        check_known(MemorySource(labels=[(NAN,)], classes=("a",)), "linear")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, "class"), (-1, "class"), (True, "class"), ([1], "class"), ("a", "class"),
        ([3], "classes"), (1, "classes"), (None, "classes"), ([True], "classes"),
        ([1.0], "numbers"), (1.0, "numbers"), ([1.0, 2.0, "x"], "numbers"), ([1.0, 2.0, True], "numbers"),
    ],
)  # fmt: skip
def test_plain_values_that_do_not_fit_are_refused(value: Any, kind: TargetKind) -> None:
    with pytest.raises(ValueError, match=r"is not a valid target for 3 (classes|numbers)"):
        target_from_plain(value, kind, 3)
