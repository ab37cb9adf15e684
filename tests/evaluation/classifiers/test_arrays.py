"""Tests of array checks, statistics, and draws within classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.targets import multi_labels, number_targets, single_labels
from vitrail.errors import DataError
from vitrail.evaluation.classifiers import logistic as arrays
from vitrail.evaluation.classifiers.linear import few_shot, linear_probe
from vitrail.evaluation.classifiers.logistic import class_ranks, moments, parts
from vitrail.evaluation.classifiers.nearest import knn


@given(rows=st.integers(0, 500), width=st.integers(0, 40))
def test_parts_are_all_rows_once_in_order(rows: int, width: int) -> None:
    slices = list(parts(rows, width * 100_000))
    assert [row for part in slices for row in range(rows)[part]] == list(range(rows))
    assert all(
        (part.stop - part.start) * width * 100_000 <= arrays.ROWS_PART or part.stop - part.start == 1 for part in slices
    )


def test_moments_of_a_mapped_file_in_parts_are_numpys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "ROWS_PART", 50)
    values = np.random.default_rng(0).normal(1000, 0.1, (101, 7)).astype(np.float32)
    np.save(tmp_path / "features.npy", values)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    rows = np.array([0, 3, 4, 50, 99, 100])
    mean, std = moments(mapped, rows)
    np.testing.assert_allclose(mean, values[rows].astype(np.float64).mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(std, values[rows].astype(np.float64).std(axis=0), rtol=1e-9)


@given(labels=st.lists(st.integers(0, 4), max_size=40), seed=st.integers(0, 2**63))
def test_ranks_number_each_class_and_ignore_the_others(labels: list[int], seed: int) -> None:
    array = np.array(labels, np.int64)
    ranks = class_ranks(array, seed)
    for label in set(labels):
        own = ranks[array == label]
        assert sorted(own) == list(range(len(own)))
        assert np.array_equal(own, class_ranks(array[array == label], seed))


def test_ranks_differ_by_seed_and_class() -> None:
    labels = np.repeat(np.arange(2), 30)
    one, other = class_ranks(labels, 0), class_ranks(labels, 1)
    assert not np.array_equal(one, other) and not np.array_equal(one[:30], one[30:])


KNOWN, FEATURES = single_labels(np.arange(10) % 2, 2), np.eye(10, 6, dtype=np.float32)
DAMAGED = FEATURES.copy()
DAMAGED[3, 1] = np.nan


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("classify", [partial(few_shot, shots=[5]), linear_probe, partial(knn, k=[1])])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({2: FEATURES[:, :5]}, "training features have 6 columns, but test features have 5"),
        ({1: single_labels(np.full(10, -1), 2)}, "training features: 10 of 10 labels are unknown, the first in row 0"),
        ({3: single_labels(np.array([0, 1, -1, 2, -1] * 2), 3)}, "test features: 4 of 10 labels are unknown, the fir"),
        ({2: FEATURES[:9]}, "there are 9 features and 10 labels"),
        ({2: FEATURES[:0], 3: KNOWN.rows(slice(0))}, "there are 0 features and 0 labels"),
        ({3: multi_labels(np.eye(10, 2, dtype=np.uint8))}, "are class with 2 columns, and test targets are classes"),
        ({3: single_labels(KNOWN.values, 3)}, "class with 2 columns, and test targets are class with 3"),
        ({3: number_targets(np.ones((10, 2)))}, "class with 2 columns, and test targets are numbers with 2"),
        ({0: DAMAGED}, "features of row 3 are not all finite"),
        ({2: DAMAGED}, "features of row 3 are not all finite"),
    ],
)
def test_features_and_targets_that_do_not_fit_are_refused(
    classify: Callable[..., object], changed: dict[int, Any], message: str
) -> None:
    arguments = [FEATURES, KNOWN, FEATURES, KNOWN]
    for place, value in changed.items():
        arguments[place] = value
    with pytest.raises(DataError, match=message):
        classify(*arguments)
