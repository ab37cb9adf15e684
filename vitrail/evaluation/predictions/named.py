"""The metrics of a report with their names and number formats, as tables show them."""

from __future__ import annotations

from typing import NamedTuple

from vitrail.evaluation.predictions.bootstrap import Metric
from vitrail.evaluation.predictions.report import ClassificationReport


class NamedMetric(NamedTuple):
    """A metric with its name and number format."""

    name: str
    metric: Metric
    form: str
    """Format specification of the value, such as ".2%"."""

    @property
    def value(self) -> str:
        """Text of the value."""
        return f"{self.metric.value:{self.form}}"

    @property
    def interval(self) -> str:
        """Text of the interval, or "" if there is none."""
        return interval_text(self.metric, self.form)


def named_metrics(report: ClassificationReport) -> list[NamedMetric]:
    """Return the metrics over all images that the report has, in the order of tables."""
    multi_label = report.multi_label
    rows: list[tuple[str, Metric | None, str]] = [
        ("accuracy" if multi_label is None else "likeliest class is a label", report.accuracy, ".2%"),
        ("balanced accuracy", report.balanced_accuracy, ".2%"),
        ("top-5 accuracy", report.top5, ".2%"),
    ]
    if multi_label is not None:
        for name, value in (
            ("mean average precision", multi_label.mean_average_precision),
            ("micro F1", multi_label.micro_f1),
            ("macro F1", multi_label.macro_f1),
        ):
            rows.append((name, None if value is None else Metric(value), ".2%"))
        rows.append(("all labels right", multi_label.exact_match, ".2%"))
    rows.append(("cross-entropy, nats", report.cross_entropy, ".4f"))
    if report.calibration is not None:
        rows.append(("calibration error", report.calibration.error, ".2%"))
    return [NamedMetric(name, metric, form) for name, metric, form in rows if metric is not None]


def interval_text(metric: Metric, form: str) -> str:
    """Return the text of a metric's interval, or "" if there is none."""
    if metric.low is None or metric.high is None:
        return ""
    return f"{metric.low:{form}} to {metric.high:{form}}"
