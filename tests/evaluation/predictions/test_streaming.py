"""Tests of metrics that are added up batch by batch, against the metrics of all samples at once."""

from __future__ import annotations

import numpy as np

from vitrail.evaluation.predictions.metrics import mean_average_precision
from vitrail.evaluation.predictions.streaming import StreamingAccuracy, streaming_metrics
from vitrail.evaluation.truth import MultiLabels, SingleLabels


def test_the_first_of_equal_outputs_is_the_likeliest() -> None:
    accuracy = StreamingAccuracy()
    accuracy.add(np.array([[1.0, 1.0], [0.0, 2.0]]), SingleLabels(np.array([0, 0]), 2))
    accuracy.add(np.array([[1.0, 1.0]]), SingleLabels(np.array([1]), 2))
    assert accuracy.result() == {"accuracy": 1 / 3}


def test_samples_without_a_label_are_skipped() -> None:
    accuracy = StreamingAccuracy()
    assert accuracy.result() == {"accuracy": 0}
    accuracy.add(np.eye(3), SingleLabels(np.array([0, -1, 0]), 3))
    assert accuracy.result() == {"accuracy": 1 / 2} and accuracy.count == 2


def test_several_labels_in_parts_are_those_of_all() -> None:
    random = np.random.default_rng(1)
    scores, truth = random.normal(size=(23, 4)), (random.random((23, 4)) < 0.4).astype(np.uint8)
    metrics = streaming_metrics(MultiLabels(truth))
    for part in (slice(0, 10), slice(10, 11), slice(11, 23)):
        metrics.add(scores[part], MultiLabels(truth[part]))
    right = np.mean([truth[row, scores[row].argmax()] for row in range(23)])
    assert metrics.result() == {
        "accuracy": right, "mean_average_precision": mean_average_precision(scores, truth > 0),
    }  # fmt: skip
