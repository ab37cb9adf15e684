"""Metrics that are added up batch by batch, so that the outputs of all samples need not be in memory at once."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int64

from vitrail.data.source import TargetKind
from vitrail.evaluation.predictions.metrics import mean_average_precision
from vitrail.evaluation.predictions.number_metrics import StreamingErrors
from vitrail.evaluation.truth import MultiLabels, Numbers, Truth

SELECTING: dict[TargetKind, str] = {"class": "accuracy", "classes": "mean_average_precision", "numbers": "r2"}
"""The metric by which the best model is chosen, for each kind of target. A larger value is better."""


def merit(value: float | None, loss: float | None, *, higher_is_better: bool = True) -> tuple[float, float]:
    """Return a pair that is larger for a better model: the metric that selects decides, and the loss decides between
    equal values. None and NaN are worse than every number."""
    score = -math.inf if value is None or math.isnan(value) else value if higher_is_better else -value
    return score, -math.inf if loss is None or math.isnan(loss) else -loss


@runtime_checkable
class StreamingMetrics(Protocol):
    """Adds up metrics batch by batch."""

    def add(self, outputs: Float[np.ndarray, "b outputs"], truth: Truth) -> None:
        """Add a batch of samples: the model's outputs for them, and their targets."""

    def result(self) -> dict[str, float]:
        """Return the metrics of all samples so far, by name."""


class StreamingAccuracy:
    """Top-1 accuracy: the fraction of the labelled samples whose likeliest class is a true class.

    The likeliest class is the first one with the largest output. If samples can have several labels,
    `mean_average_precision` is measured too, which keeps all outputs in memory.
    """

    def __init__(self) -> None:
        self.right = self.count = 0
        self._several: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, outputs: Float[np.ndarray, "b classes"], truth: Truth) -> None:
        self.add_likeliest(outputs.argmax(axis=1), truth)
        if isinstance(truth, MultiLabels):
            self.add_ranking(outputs, truth.values > 0)

    def add_likeliest(self, likeliest: Int64[np.ndarray, " b"], truth: Truth) -> None:
        """Add samples for which only the likeliest class is given."""
        known = truth.known
        self.right += int(truth.hits(likeliest)[known].sum())
        self.count += int(known.sum())

    def add_ranking(self, outputs: Float[np.ndarray, "b classes"], truth: Bool[np.ndarray, "b classes"]) -> None:
        """Add the outputs and true classes from which `mean_average_precision` is computed."""
        self._several.append((outputs, truth))

    def result(self) -> dict[str, float]:
        metrics = {"accuracy": self.right / max(self.count, 1)}
        if self._several:
            outputs, truth = (np.concatenate(parts) for parts in zip(*self._several, strict=True))
            metrics["mean_average_precision"] = mean_average_precision(outputs, truth)
        return metrics


def streaming_metrics(truth: Truth) -> StreamingMetrics:
    """Return an empty accumulator of the metrics for this kind of target."""
    return StreamingErrors() if isinstance(truth, Numbers) else StreamingAccuracy()
