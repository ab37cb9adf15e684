"""Tests of the list of metrics that tables show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.evaluation.metrics.test_report import make_predictions, several
from vitrail.evaluation.metrics.intervals import Metric
from vitrail.evaluation.metrics.report import named_metrics, report


def test_metrics_of_one_label_are_those_of_the_report() -> None:
    found = report(make_predictions(), bootstrap=20)
    assert found.calibration is not None
    assert [(one.name, one.metric) for one in named_metrics(found)] == [
        ("accuracy", found.metrics["accuracy"]),
        ("balanced accuracy", found.metrics["balanced_accuracy"]),
        ("top-5 accuracy", found.metrics["top5_accuracy"]),
        ("cross-entropy, nats", found.metrics["cross_entropy"]),
        ("calibration error", found.calibration.error),
    ]


def test_metrics_that_the_report_lacks_are_left_out() -> None:
    names = [one.name for one in named_metrics(report(make_predictions(classes=5), bootstrap=0))]
    assert names == ["accuracy", "balanced accuracy", "cross-entropy, nats", "calibration error"]


def test_metrics_of_several_labels() -> None:
    found = report(several(), bootstrap=0)
    rows = {one.name: one.metric.value for one in named_metrics(found)}
    assert rows == {
        "likeliest class is a label": found.metrics["accuracy"].value,
        "mean average precision": found.metrics["mean_average_precision"].value,
        "micro F1": found.metrics["micro_f1"].value,
        "macro F1": found.metrics["macro_f1"].value,
        "all labels right": found.metrics["exact_match"].value,
        "cross-entropy, nats": found.metrics["cross_entropy"].value,
    }
    without = replace(found, metrics={name: one for name, one in found.metrics.items() if name != "micro_f1"})
    assert "micro F1" not in [one.name for one in named_metrics(without)]


@pytest.mark.parametrize(
    ("name", "metric", "value", "interval"),
    [
        ("accuracy", Metric(0.51239, 0.4, 0.6251), "51.24%", "40.00% to 62.51%"),
        ("cross_entropy", Metric(1.23456, 1.0, 2.0), "1.2346", "1.0000 to 2.0000"),
        ("accuracy", Metric(0.5), "50.00%", ""),
    ],
)
def test_texts_have_the_format_of_the_metric(name: str, metric: Metric, value: str, interval: str) -> None:
    found = replace(report(make_predictions(), bootstrap=0), metrics={name: metric})
    assert [(one.value, one.interval) for one in named_metrics(found)] == [(value, interval)]
