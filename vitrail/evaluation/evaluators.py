"""The contract of evaluators, and the evaluators by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vitrail.data.source import Source, target_kind
from vitrail.errors import ConfigError, DataError, check_known
from vitrail.evaluation.outputs import Outputs
from vitrail.registry import SETTINGS, Registry
from vitrail.settings import Checked, from_plain, setting
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle


@runtime_checkable
class Evaluator(Protocol):
    """Measures a model on held-out images. The command line, validation during training and a run's probes use
    evaluators.

    `outputs` computes the features and predictions of the model. An evaluator of frozen features fits a simple model to
    the features of `train`. An evaluator must not change the weights of the model. It returns metrics by name. Two of
    the metrics are `images`, the number of measured images, and `skipped`, the number of images that could not be
    decoded. Accuracies are in [0, 1]. NAME_low and NAME_high are the ends of the 95 % interval of the metric NAME.
    NAME_deviation is the standard deviation of the metric NAME over seeds.
    """

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]: ...


@dataclass(frozen=True)
class Bootstrapped(Checked):
    """The setting of an evaluator whose metrics have bootstrap intervals."""

    bootstrap: int = setting(1000, least=0, most=1_000_000, advice="0 computes no intervals")
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""


EVALUATORS = Registry[Any](
    {
        "accuracy": "vitrail.evaluation.head:ByAccuracy",
        "regression": "vitrail.evaluation.head:ByRegression",
        "linear": "vitrail.evaluation.frozen:ByLinear",
        "fewshot": "vitrail.evaluation.frozen:ByFewShot",
        "knn": "vitrail.evaluation.frozen:ByNeighbours",
        "detection": "vitrail.evaluation.detection:ByDetection",
        "masks": "vitrail.evaluation.segmentation:ByMasks",
        "segmentation": "vitrail.evaluation.segmentation:BySegmentation",
        "retrieval": "vitrail.evaluation.retrieval:ByRetrieval",
        "zeroshot": "vitrail.evaluation.retrieval:ByZeroShot",
    },
    fits=SETTINGS,
)
"""Classes of evaluators by name. The fields of a class are the settings of the evaluator."""


BY_HEAD: dict[OutputKind, str] = {
    "softmax": "accuracy", "sigmoid": "accuracy", "numbers": "regression", "boxes": "detection", "mask": "masks",
}  # fmt: skip
"""Name of the evaluator that measures a model's own head, for each meaning of the outputs."""

UNLEARNED = frozenset({"retrieval", "zeroshot"})
"""Names of the evaluators that measure features without learning from training images."""

COUNTS = frozenset({"images", "skipped", "unlabelled", "training_images"})
"""Metrics that are numbers of images, which evaluators share."""

OF_PLACED: dict[str, frozenset[str]] = {
    "boxes": frozenset({"detection"}), "mask": frozenset({"masks", "segmentation"}), "texts": frozenset({"retrieval"}),
}  # fmt: skip
"""Names of the evaluators that measure data with boxes, masks or texts. No other data has targets for them, and no
other evaluator measures such data."""


def evaluators_of(names: str, settings: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Evaluator]:
    """Return the evaluators in a comma-separated list of names, like "linear,knn".

    `settings` maps names of evaluators in the list to fields, like {"knn": {"k": [20]}}. Raise `ConfigError` for an
    unknown name or setting, and for settings of an evaluator that is not in the list.
    """
    rest, result = dict(settings or {}), {}
    for name in dict.fromkeys(text.strip() for text in names.split(",")):
        check_known(name, EVALUATORS, f"unknown evaluator {name!r}")
        try:
            result[name] = from_plain(EVALUATORS[name], dict(rest.pop(name, {})))
        except ConfigError as error:
            raise ConfigError(f"evaluator {name}: {error}") from None
    if rest:
        raise ConfigError(
            f"settings={rest!r} are of evaluators that are not in {names!r}; add them, or leave these out"
        )
    return result


RESERVED = frozenset({"event", "time", "step", "split", "weights", "name", "best", "kept"})
"""Names of other values of events in a run's journal, which cannot be names of metrics in training."""


def checked_metrics(
    name: str, found: Any, needed: Iterable[str] = (), *, reserved: Set[str] = frozenset()
) -> dict[str, float]:
    """Return what the evaluator `name` returned as Python's own numbers by name. Raise `ConfigError` for anything else,
    for names that are `reserved`, and if one of the `needed` metrics is missing."""
    try:
        metrics = {str(metric): float(value) for metric, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name}: an evaluator must return numbers by name, not {found!r:.100}") from None
    if wrong := sorted(reserved & metrics.keys()):
        raise ConfigError(f"{name}: a metric cannot be called {wrong[0]!r}, which the journal uses; rename it")
    if lacking := [metric for metric in needed if metric not in metrics]:
        raise ConfigError(
            f"{name}: the evaluator returned no {lacking[0]!r}, but only {', '.join(metrics) or 'nothing'}"
        )
    return metrics


def check_head(output: OutputKind, bundle: Bundle, held_out: Source, *, lacks: str, other: str) -> None:
    """Raise the errors of an evaluator of heads whose predictions are `output`: `DataError` with the text `lacks` for
    data with other targets, `ConfigError` with the text `other` for other models, and `DataError` for other names."""
    if target_kind(held_out) != output:
        raise DataError(lacks)
    if bundle.output != output:
        raise ConfigError(other)
    if bundle.classes != tuple(held_out.classes):
        raise DataError(
            f"the model predicts {', '.join(bundle.classes)}, but the targets of this data are "
            f"{', '.join(held_out.classes)}; both must have the same names in the same order"
        )


def check_evaluators(evaluators: Mapping[str, Evaluator], outputs: Outputs, train: Source, held_out: Source) -> None:
    """Raise the errors that evaluators find before anything is computed. An evaluator finds errors early if it has a
    method `check` with the parameters of its call. The method reads no image."""
    for evaluator in evaluators.values():
        if hasattr(evaluator, "check"):
            evaluator.check(outputs, train, held_out)


def measure(evaluators: Mapping[str, Evaluator], outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
    """Return the metrics of several evaluators, which share features and predictions. Raise the errors of the
    evaluators, and `ConfigError` if two of them measure different values of the same name, apart from `COUNTS`.
    """
    metrics: dict[str, float] = {}
    for name in sorted(evaluators, key=lambda name: name == "fewshot"):  # last: it can use the others' features
        found = checked_metrics(name, evaluators[name](outputs, train, held_out))
        both = [one for one in found if one in metrics and one not in COUNTS]
        if twice := [one for one in both if not np.array_equal(metrics[one], found[one], equal_nan=True)]:
            raise ConfigError(
                f"evaluator {name}: another evaluator measures another {twice[0]!r}; give the metric another name, or "
                "measure them one after the other"
            )
        metrics |= found
    return metrics
