"""Tests of metrics that are added up batch by batch, against the metrics of all samples at once."""

from __future__ import annotations

import numpy as np

from tests.targets import multi_labels, single_labels
from vitrail.evaluation.metrics.classes import mean_average_precision
from vitrail.evaluation.metrics.numbers import StreamingAccuracy, merit, streaming_metrics


def test_the_first_of_equal_outputs_is_the_likeliest_and_samples_without_a_label_are_skipped() -> None:
    accuracy = StreamingAccuracy()
    assert accuracy.result() == {"accuracy": 0}
    accuracy.add(np.array([[1.0, 1.0], [0.0, 2.0], [3.0, 1.0]]), single_labels(np.array([0, 0, -1]), 2))
    accuracy.add(np.array([[1.0, 1.0]]), single_labels(np.array([1]), 2))
    assert accuracy.result() == {"accuracy": 1 / 3} and accuracy.count == 3


def test_several_labels_in_parts_are_those_of_all() -> None:
    random = np.random.default_rng(1)
    scores, truth = random.normal(size=(23, 4)), (random.random((23, 4)) < 0.4).astype(np.uint8)
    metrics = streaming_metrics(multi_labels(truth))
    for part in (slice(0, 10), slice(10, 11), slice(11, 23)):
        metrics.add(scores[part], multi_labels(truth[part]))
    right = np.mean([truth[row, scores[row].argmax()] for row in range(23)])
    assert metrics.result() == {
        "accuracy": right, "mean_average_precision": mean_average_precision(scores, truth > 0),
    }  # fmt: skip


def test_the_loss_decides_between_equal_metrics() -> None:
    """From the worst to the best model: a metric that is unknown or NaN is worse than every number."""
    ranked = [(None, 0.1), (0.5, None), (0.5, 0.7), (0.5, 0.2), (0.6, 3.0)]
    merits = [merit(value, loss) for value, loss in ranked]
    assert merits == sorted(set(merits)) and merit(float("nan"), 0.1) == merits[0]
    assert merit(0.5, float("nan")) == merits[1]
    falling = [merit(value, loss, higher_is_better=False) for value, loss in [(0.6, 0.1), (0.5, 0.7), (0.5, 0.2)]]
    assert falling == sorted(set(falling))
