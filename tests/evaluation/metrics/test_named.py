"""Tests of the list of metrics that tables show."""

from __future__ import annotations

from dataclasses import replace

from tests.evaluation.metrics.test_report import make_predictions, several
from vitrail.evaluation.metrics.report import named_metrics, report


def test_metrics_of_one_label_are_those_of_the_report() -> None:
    found = report(make_predictions(), bootstrap=20)
    assert [(one.name, one.metric) for one in named_metrics(found)] == [
        ("accuracy", found.metrics["accuracy"]),
        ("balanced accuracy", found.metrics["balanced_accuracy"]),
        ("top-5 accuracy", found.metrics["top5_accuracy"]),
        ("cross-entropy, nats", found.metrics["cross_entropy"]),
        ("calibration error", found.calibration.error),
    ]


def test_metrics_of_several_labels_that_the_report_lacks_are_left_out() -> None:
    found = report(several(), bootstrap=0)
    names = {
        "accuracy": "likeliest class is a label", "mean_average_precision": "mean average precision",
        "micro_f1": "micro F1", "macro_f1": "macro F1", "exact_match": "all labels right",
        "cross_entropy": "cross-entropy, nats",
    }  # fmt: skip
    rows = {one.name: one.metric for one in named_metrics(found)}
    assert rows == {names[name]: metric for name, metric in found.metrics.items()}
    without = replace(found, metrics={name: one for name, one in found.metrics.items() if name != "micro_f1"})
    assert "micro F1" not in [one.name for one in named_metrics(without)]
