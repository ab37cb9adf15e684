"""Checks of arrays, their statistics, draws within classes, and tallies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evaluation.classifiers import arrays
from vitrail.evaluation.classifiers.arrays import (
    Figures,
    Tally,
    check_labelled,
    check_pair,
    class_ranks,
    moments,
    parts,
)
from vitrail.evaluation.predictions.accuracy import mean_average_precision


@given(rows=st.integers(0, 500), width=st.integers(0, 40))
def test_parts_are_all_rows_once_in_order(rows: int, width: int) -> None:
    slices = list(parts(rows, width * 100_000))
    assert [row for part in slices for row in range(rows)[part]] == list(range(rows))
    assert all(
        (part.stop - part.start) * width * 100_000 <= arrays.PART or part.stop - part.start == 1 for part in slices
    )


def test_moments_of_a_mapped_file_in_parts_are_numpys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PART", 50)
    values = np.random.default_rng(0).normal(1000, 0.1, (101, 7)).astype(np.float32)
    np.save(tmp_path / "features.npy", values)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    rows = np.array([0, 3, 4, 50, 99, 100])
    mean, std = moments(mapped, rows)
    np.testing.assert_allclose(mean, values[rows].astype(np.float64).mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(std, values[rows].astype(np.float64).std(axis=0), rtol=1e-9)


def test_moments_name_the_row_that_is_not_finite() -> None:
    features = np.zeros((9, 3), np.float32)
    features[5, 1], features[7, 0] = np.inf, np.nan
    with pytest.raises(DataError, match="features of row 5 are not all finite"):
        moments(features, np.array([1, 5, 7]))
    moments(features, np.array([0, 1, 2, 8]))


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


def test_ranks_are_fair() -> None:
    labels = np.zeros(5, np.int64)
    first = np.bincount([int(class_ranks(labels, seed).argmin()) for seed in range(2000)], minlength=5)
    assert abs(first - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, -1, 2, -1], "rows: 2 of 5 labels are not in 0 to 2; the first, of row 2, is none"),
        ([0, 1, 3], "rows: 1 of 3 labels are not in 0 to 2; the first, of row 2, is 3"),
        ([0, -2, 1], "rows: 1 of 3 labels are not in 0 to 2; the first, of row 1, is -2"),
        ([], "rows: 0 features and 0 labels"),
    ],
)
def test_labels_out_of_range_are_named(labels: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_labelled("rows", np.zeros((len(labels), 2), np.float32), np.array(labels, np.int64), 3)


def test_shapes_that_do_not_fit_are_refused(types_unchecked: None) -> None:
    with pytest.raises(DataError, match="rows: 4 features and 3 labels"):
        check_labelled("rows", np.zeros((4, 2), np.float32), np.zeros(3, np.int64), 3)
    with pytest.raises(DataError, match="targets of 5 columns, not one for each of 3 classes"):
        check_labelled("rows", np.zeros((4, 2), np.float32), np.zeros((4, 5), np.uint8), 3)
    with pytest.raises(DataError, match="learn from are 2 wide and those to test on 3"):
        check_pair(np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float32))


def test_a_tally_counts_the_first_of_equal_scores() -> None:
    tally = Tally()
    tally.add(np.array([[1.0, 1.0], [0.0, 2.0]]), np.array([0, 0]))
    tally.add(np.array([[1.0, 1.0]]), np.array([1]))
    assert tally.figures() == Figures(1 / 3, None)


def test_a_tally_of_several_labels_in_parts_is_that_of_all() -> None:
    random = np.random.default_rng(1)
    scores, truth = random.normal(size=(23, 4)), (random.random((23, 4)) < 0.4).astype(np.uint8)
    tally = Tally()
    for part in (slice(0, 10), slice(10, 11), slice(11, 23)):
        tally.add(scores[part], truth[part])
    right = np.mean([truth[row, scores[row].argmax()] for row in range(23)])
    precision = mean_average_precision(torch.from_numpy(scores), torch.from_numpy(truth > 0))
    assert tally.figures() == Figures(right, precision)
