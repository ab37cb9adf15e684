"""Tests of the report of numbers: residuals, points, largest errors, and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.targets import number_targets, single_labels
from vitrail.data.batch import Skipped
from vitrail.errors import DataError
from vitrail.evaluation.metrics.numbers import number_metrics
from vitrail.evaluation.metrics.report import QUANTILES, RegressionReport, regression_report, report
from vitrail.evaluation.outputs import Predictions
from vitrail.settings import from_plain, to_plain

NAN = math.nan


def make(truth: list[list[float]], predicted: list[list[float]]) -> Predictions:
    names = ("age", "height", "weight")[: len(truth[0])]
    return Predictions(
        np.array(predicted, np.float32),
        number_targets(np.array(truth, np.float64)),
        tuple(f"{row}.png" for row in range(len(truth))),
        np.arange(len(truth)) + 100,
        names,
        "numbers",
        (Skipped("x", "is empty"),),
    )


def random_predictions(n: int) -> Predictions:
    random = np.random.default_rng(0)
    truth = random.normal(size=(n, 2)) * (1, 50) + (3, -200)
    return make(truth.tolist(), (truth + random.normal(size=(n, 2)) * (0.5, 10)).tolist())


def test_metrics_and_residuals_of_each_number() -> None:
    predictions = random_predictions(41)
    truth, predicted = predictions.truth.values, predictions.logits.astype(np.float64)
    found = regression_report(predictions, bootstrap=20, seed=5)
    assert (found.metrics, tuple(row.metrics for row in found.per_output)) == number_metrics(
        predicted, truth, resamples=20, seed=5
    )
    assert (found.images, found.unlabelled, found.names) == (41, 0, ("age", "height"))
    assert found.skipped == (Skipped("x", "is empty"),)
    for index, row in enumerate(found.per_output):
        residuals = predicted[:, index] - truth[:, index]
        assert (row.index, row.name, row.images) == (index, found.names[index], 41)
        known = truth[:, index].mean(), truth[:, index].std(), residuals.mean()
        assert (row.mean, row.deviation, row.mean_residual) == pytest.approx(known)
        np.testing.assert_allclose(row.residual_quantiles, np.quantile(residuals, QUANTILES))
        np.testing.assert_allclose(row.points, np.stack([truth[:, index], predicted[:, index]], axis=1))


def test_unknown_numbers_are_skipped() -> None:
    found = regression_report(make([[1, NAN], [NAN, NAN], [3, NAN], [2, NAN]], [[1, 0], [2, 0], [5, 0], [2, 0]]))
    age, height = found.per_output
    assert (found.images, found.unlabelled, age.images, height.images) == (3, 1, 3, 0)
    assert age.points == ((1, 1), (3, 5), (2, 2)) and age.mean == 2
    assert height.metrics is None and height.mean is None and height.points == () == height.residual_quantiles
    (worst,) = found.worst
    assert (worst.index, worst.key, worst.name, worst.true, worst.predicted) == (102, "2.png", "age", 3, 5)
    assert worst.deviations == pytest.approx(2 / np.std([1, 2, 3]))


def test_the_largest_errors_are_compared_in_deviations() -> None:
    found = regression_report(make([[0, 0], [1, 100], [2, 200]], [[0, 0], [2, 100], [2, 250]]), worst=2)
    assert [(one.key, one.name) for one in found.worst] == [("1.png", "age"), ("2.png", "height")]
    equal = regression_report(make([[7], [7]], [[7], [8]]))
    assert [(one.key, one.deviations) for one in equal.worst] == [("1.png", None)]


def test_points_are_spaced_evenly() -> None:
    predictions = random_predictions(100)
    rows = regression_report(predictions, bootstrap=0, points=4).per_output
    assert [true for true, _ in rows[0].points] == predictions.truth.values[[0, 33, 66, 99], 0].tolist()
    assert len(regression_report(predictions, bootstrap=0, points=1).per_output[0].points) == 1


def test_it_is_json_and_back() -> None:
    found = regression_report(make([[1, NAN], [3, NAN], [2, NAN]], [[1, 0], [5, 0], [2, 0]]), bootstrap=10)
    assert from_plain(RegressionReport, json.loads(json.dumps(to_plain(found), allow_nan=False))) == found


def test_truth_of_another_kind_is_refused() -> None:
    numbers = make([[NAN], [NAN]], [[1], [2]])
    with pytest.raises(DataError, match="none of 2 images has a known number, so there is nothing to measure"):
        regression_report(numbers)
    with pytest.raises(DataError, match="a regression report needs numbers, but these samples have classes"):
        regression_report(replace(numbers, truth=single_labels(np.array([0, 0]), 1)))
    with pytest.raises(DataError, match="a classification report needs classes, but these samples have numbers; use"):
        report(make([[1], [2]], [[1], [2]]))
