"""Evaluators of the model's own head. They fit nothing and do not read the training split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.source import Source, check_known, samples_of, truth_of
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.imagenet import imagenet_columns, map_classes, read_real, real_accuracy, real_labels
from vitrail.evaluation.metrics.intervals import with_intervals
from vitrail.evaluation.metrics.numbers import StreamingAccuracy, StreamingErrors
from vitrail.evaluation.metrics.report import absent_note, regression_report, report
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.answers import OutputKind


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy, computed batch by batch. Validation during training uses this evaluator.

    Memory does not grow with the number of classes, and no batch waits for the result of the previous batch.
    `ByAccuracy` measures more metrics, with intervals.
    """

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `accuracy` in [0, 1], `cross_entropy` in nats, and the numbers of `images` and `skipped` images.

        An image is skipped if it cannot be decoded. If images can have several labels, a prediction is correct if the
        likeliest class is one of the labels. `cross_entropy` is then the sum of the binary cross-entropies of all
        classes, and `mean_average_precision` is returned too.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=outputs.bundle.device)  # sum of losses, their number
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # samples, valid, likeliest class; on the device
        accuracy = StreamingAccuracy()

        def take(batch: Batch, logits: Tensor) -> None:
            counted = batch.counted
            losses = _cross_entropies(logits, batch, outputs.bundle.output)
            totals.add_(torch.stack([losses * counted, counted]).double().sum(dim=1))
            found.append((batch.samples, batch.valid, logits.argmax(dim=1)))
            if batch.targets is not None:
                rows = batch.valid.cpu()
                accuracy.add_ranking(logits.cpu()[rows].numpy(), (batch.targets.cpu()[rows] > 0).numpy())

        skipped = outputs.each_batch(held_out, take)
        for samples, valid, likeliest in found:
            decoded = valid.cpu()
            accuracy.add_likeliest(likeliest.cpu()[decoded].numpy(), truth_of(held_out, samples[decoded].tolist()))
        loss, count = totals.tolist()
        metrics = accuracy.result()
        return {
            "accuracy": metrics.pop("accuracy"),
            "cross_entropy": loss / max(count, 1),
            "images": count,
            "skipped": float(len(skipped)),
            **metrics,
        }


@dataclass(frozen=True)
class ByAccuracy:
    """Metrics of the head over all images: accuracy with intervals, calibration, and the other metrics of `report`."""

    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""
    real: str = ""
    """Also measure with the ReaL labels of ImageNet's validation images: public, or a file real.json."""
    class_names: str = ""
    """File with the WordNet id and name of each model output, in order. Needed only if the data uses other class names
    than the model."""

    def __post_init__(self) -> None:
        _check_bootstrap(self.bootstrap)

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` if the targets are numbers or unknown, or if an image has no ReaL label to measure."""
        _check_classes(held_out)
        if self.real:
            imagenet_columns(outputs.bundle.classes)
            keys = [held_out.key(index) for index in range(len(held_out))]
            real_labels(keys, self._real())

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics. The classes of `held_out` are matched to the model's classes by `map_classes`.

        Raise `ConfigError` for a model without a head, and `DataError` for classes that the model does not have.
        """
        _check_classes(held_out)
        classes = outputs.bundle.classes
        if classes and classes != tuple(held_out.classes):
            mapped = map_classes(classes, held_out.classes, mapping=self.class_names or None)
            outputs.note(mapped.note)
            held_out = samples_of(held_out).renumbered(mapped.columns, classes)
        predictions = outputs.predictions(held_out)
        found = report(predictions, bootstrap=self.bootstrap)
        if note := absent_note(found):
            outputs.note(note)
        metrics = with_intervals(found.metrics)
        if self.real:
            by_real, images = real_accuracy(predictions, self._real(), bootstrap=self.bootstrap)
            metrics |= {**with_intervals({"real_accuracy": by_real}), "real_images": float(images)}
        if found.unlabelled:
            metrics["unlabelled"] = float(found.unlabelled)
        return metrics | {"images": float(found.images), "skipped": float(len(found.skipped))}

    def _real(self) -> tuple[tuple[int, ...], ...]:
        return read_real(None if self.real == "public" else self.real)


@dataclass(frozen=True)
class NumberErrors:
    """R², mean absolute error and root mean squared error, computed batch by batch. Validation during training uses
    this evaluator."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of `StreamingErrors`, and the counts `images` and `skipped`. If no number is known, only
        the counts are returned.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # samples, valid, predicted; on the device

        def take(batch: Batch, predicted: Tensor) -> None:
            found.append((batch.samples, batch.valid, predicted))

        skipped = outputs.each_batch(held_out, take)
        errors, images = StreamingErrors(), 0
        for samples, valid, predicted in found:
            decoded = valid.cpu()
            truth = truth_of(held_out, samples[decoded].tolist())
            errors.add(predicted.cpu()[decoded].numpy(), truth)
            images += int(truth.known.sum())
        return {**errors.result(), "images": float(images), "skipped": float(len(skipped))}


@dataclass(frozen=True)
class ByRegression:
    """Errors of predicted numbers over all images, with intervals (`regression_report`)."""

    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""

    def __post_init__(self) -> None:
        _check_bootstrap(self.bootstrap)

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` if the model does not predict numbers, and `DataError` if it predicts other numbers than
        the targets."""
        if check_known(held_out, "regression").kind != "numbers":
            raise DataError("regression needs numbers, but the targets of this data are classes; use accuracy")
        bundle = outputs.bundle
        if bundle.output != "numbers":
            raise ConfigError(
                "regression measures predicted numbers, but this model predicts classes; use linear or knn"
            )
        if bundle.classes != tuple(held_out.classes):
            raise DataError(
                f"the model predicts {', '.join(bundle.classes)}, but the targets of this data are "
                f"{', '.join(held_out.classes)}; choose the same columns in the same order"
            )

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `r2` and `standardised_error`, averaged over the outputs, and for each output `r2`,
        `mean_absolute_error` and `root_mean_squared_error`.

        If there are several outputs, the names of their metrics are NAME:r2 and so on. Raise the errors of `check`.
        """
        self.check(outputs, train, held_out)
        found = regression_report(outputs.predictions(held_out), bootstrap=self.bootstrap)
        metrics = with_intervals(found.metrics)
        for row in found.per_output:
            if row.metrics is not None:
                metrics |= with_intervals(row.metrics, f"{row.name}:" if len(found.per_output) > 1 else "")
        if found.unlabelled:
            metrics["unlabelled"] = float(found.unlabelled)
        return metrics | {"images": float(found.images), "skipped": float(len(found.skipped))}


def _check_classes(source: Source) -> None:
    """Raise `DataError` if the targets of a source are numbers, or if no target is known."""
    if check_known(source, "accuracy").kind == "numbers":
        raise DataError("accuracy needs classes, but the targets of this data are numbers; use regression")


def _check_bootstrap(resamples: int) -> None:
    if resamples < 0:
        raise ConfigError(f"bootstrap={resamples} is less than 0, the value for no intervals")


def _cross_entropies(logits: Float[Tensor, "b classes"], batch: Batch, output: OutputKind) -> Float[Tensor, " b"]:
    """Return the cross-entropy of each sample in nats.

    For sigmoid outputs, it is the sum of the binary cross-entropies of all classes.
    """
    labels = batch.labels.clamp(min=0)
    if batch.targets is None and output == "softmax":
        return F.cross_entropy(logits, labels, reduction="none")
    answers = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
    return F.binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(dim=1)
