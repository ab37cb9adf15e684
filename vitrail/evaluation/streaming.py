"""Evaluators of the model's own head that measure batch by batch. Validation during training uses them: memory does not
grow with the number of classes, and no batch waits for the result of the previous batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.source import Source, truth_of
from vitrail.evaluation.metrics.numbers import StreamingAccuracy, StreamingErrors
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.answers import OutputKind


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy. `vitrail.evaluation.head.ByAccuracy` measures more metrics, with intervals."""

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
class NumberErrors:
    """R², mean absolute error and root mean squared error."""

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


def _cross_entropies(logits: Float[Tensor, "b classes"], batch: Batch, output: OutputKind) -> Float[Tensor, " b"]:
    """Return the cross-entropy of each sample in nats.

    For sigmoid outputs, it is the sum of the binary cross-entropies of all classes.
    """
    labels = batch.labels.clamp(min=0)
    if batch.targets is None and output == "softmax":
        return F.cross_entropy(logits, labels, reduction="none")
    answers = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
    return F.binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(dim=1)
