"""Classification: one label per image, or several. Also the evaluator of validation during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.source import Samples, Source, has_soft_targets, soft_target_of, truth_of
from vitrail.data.splits import Splits, check_classes
from vitrail.data.targets import class_indices
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.metrics.numbers import StreamingAccuracy
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import setting
from vitrail.tasks.task import LossOutput, Objective, Task, TaskMetric, drawn_samples, mean_of_counted
from vitrail.weights.answers import OutputKind

Loss = Literal["softmax", "sigmoid"]
"""Loss of classification: softmax for classes that exclude each other, or sigmoid for one yes-or-no question per
class."""


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Learn the classes of images: one label per image, or several with the sigmoid loss."""

    name = "classification"
    targets = ("class", "classes")
    output_noun = "class"
    metrics = (
        TaskMetric("accuracy", is_fraction=True),
        TaskMetric("mean_average_precision", is_fraction=True),
        TaskMetric("cross_entropy", higher_is_better=False, describes_model=False),
    )
    loss_metric = "cross_entropy"

    loss: Loss = "softmax"
    """Loss function. softmax: one class per image. sigmoid: several classes or none."""
    label_smoothing: float = setting(0.0, least=0, below=1)
    """Fraction of the target that is spread over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes in the loss. balanced: every class counts equally, however many images it has."""

    @property
    def output(self) -> OutputKind:
        return self.loss

    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` if the targets of the data are not classes, or if its soft targets are no probabilities of
        classes that exclude each other, although the loss is for such classes.

        Raise `ConfigError` if images have several labels but the loss is for one label. Also raise `ConfigError` if
        every image has one label, but `select` is the mean average precision, which needs several.
        """
        check_classes(splits)
        several = splits.target_kind == "classes"
        if several and self.loss != "sigmoid":
            raise ConfigError(
                f"{splits.title} has images with several labels, which loss={self.loss!r} cannot learn; choose "
                "loss='sigmoid'"
            )
        if self.loss == "softmax" and has_soft_targets(splits.train):
            train = splits.train
            # The amounts of a source of the user's own may be too many to hold at once.
            found = (
                (amounts for amounts, _ in train.targets.soft.blocks)
                if isinstance(train, Samples) and train.targets.soft is not None
                else (soft_target_of(train, index) for index in range(len(train)))
            )
            sums = np.hstack([1.0, *(amounts.sum(axis=-1) for amounts in found if amounts is not None)])
            if (wrong := sums[np.abs(sums - 1) > 0.01]).size:  # they can be rounded to bf16
                raise DataError(
                    f"the soft target of an image of {splits.title} has amounts with the sum {wrong[0]:g}, but "
                    f"loss={self.loss!r} needs the sum 1; divide the amounts by their sum, or choose loss='sigmoid'"
                )
        if self.select == "mean_average_precision" and not several:
            raise ConfigError(
                f"select={self.select!r} needs images with several labels, but the images of {splits.title} have "
                "one label each; choose accuracy or cross_entropy"
            )

    def main_metric(self, splits: Splits) -> str:
        """Return the mean average precision if images have several labels, and the accuracy otherwise. The accuracy
        tests only the most likely class, which is not informative for images with several labels."""
        return "mean_average_precision" if splits.target_kind == "classes" else "accuracy"

    def evaluator(self, objective: Objective) -> Evaluator:
        return Accuracy()

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        weights = balanced_weights(splits.train) if self.class_weights == "balanced" else None
        return ClassificationObjective(
            network, loss=self.loss, label_smoothing=self.label_smoothing, class_weights=weights
        )


class ClassificationObjective(Objective):
    """Cross-entropy of the network's logits with `batch.targets`, or with `batch.labels` if there are no targets.

    The softmax loss treats the classes as alternatives. The sigmoid loss treats each class as a separate yes-or-no
    question, and sums over the classes. The authors of the paper use the sigmoid loss for images with several labels
    (JFT; Scaling ViT section 3.3). With `class_weights`, the softmax loss of an image is multiplied by the weight of
    its class. For a mixed image, the factor is the mean of its classes' weights, in the proportions of the mixture. The
    sigmoid loss applies the weights to the true classes only.

    The accuracy is the fraction of counted samples whose most likely class is the label, or one of several labels. A
    mixed image keeps the label of its first image. With mixup, that image has the larger weight; with CutMix, it may
    cover the smaller area.
    """

    class_weights: Float[Tensor, " classes"] | None

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: Loss = "softmax",
        label_smoothing: float = 0.0,
        class_weights: Float[Tensor, " classes"] | None = None,
    ) -> None:
        super().__init__(network)
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, batch: Batch) -> LossOutput:
        logits = self.network(batch.images).float()
        counted = self.counted(batch)
        loss = mean_of_counted(self.losses(logits, batch), counted)
        return LossOutput(loss, {"accuracy": mean_of_counted(self.hits(logits, batch), counted)})

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the samples that were decoded and have a label."""
        return batch.counted

    def hits(self, logits: Float[Tensor, "b classes"], batch: Batch) -> Float[Tensor, " b"]:
        """Return 1 for each sample whose most likely class is right, else 0."""
        likeliest = logits.detach().argmax(dim=1)
        correct = likeliest == batch.labels
        if batch.targets is not None:  # any of several labels counts
            hits = batch.targets.gather(1, likeliest[:, None])[:, 0] > 0.5
            correct = torch.where(batch.labels < 0, hits, correct)
        return correct.float()

    def losses(self, logits: Float[Tensor, "b classes"], batch: Batch) -> Float[Tensor, " b"]:
        """Return the cross-entropy of each image with its labels."""
        labels = batch.labels.clamp(min=0)
        if self.loss == "softmax":
            return self._alternatives(logits, labels if batch.targets is None else batch.targets)
        targets = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
        # Each class is a yes-or-no question, so smoothing moves its target towards the middle between yes and no.
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.class_weights, reduction="none")
        return losses.sum(dim=1)

    def _alternatives(self, logits: Float[Tensor, "b classes"], targets: Tensor) -> Float[Tensor, " b"]:
        """Return the softmax cross-entropy of each image. `targets` are labels of shape (b), or target probabilities of
        shape (b, classes)."""
        if self.class_weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing, reduction="none")
        if targets.ndim == 1:
            weights = self.class_weights[targets]
        else:
            targets = targets * self.class_weights
            weights = targets.sum(dim=1)
            targets = targets / weights.clamp(min=torch.finfo(weights.dtype).tiny)[:, None]
        return weights * F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing, reduction="none")


def balanced_weights(source: Source) -> Float[Tensor, " classes"]:
    """Return the weight n / (k n_c) of each class. Here n is the number of labels, n_c the number of labels of class c,
    and k the number of classes that have labels.

    With these weights, every class counts equally, and the mean weight over all labels is 1. Classes without a label
    have the weight 1. In a mixture, the labels of each source count in proportion to the samples that training draws
    from the source.
    """
    counts = torch.zeros(len(source.classes), dtype=torch.float64)
    for index, weight in drawn_samples(source):
        for one in class_indices(source.target(index)):
            counts[one] += weight
    there = counts > 0
    weights = torch.ones_like(counts)
    weights[there] = counts.sum() / (there.sum() * counts[there])
    return weights.float()


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy, added up batch by batch: no batch waits for the result of the previous one.
    `vitrail.evaluation.head.ByAccuracy` measures more metrics, with intervals."""

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


def _cross_entropies(logits: Float[Tensor, "b classes"], batch: Batch, output: OutputKind) -> Float[Tensor, " b"]:
    """Return the cross-entropy of each sample in nats.

    For sigmoid outputs, it is the sum of the binary cross-entropies of all classes.
    """
    labels = batch.labels.clamp(min=0)
    if batch.targets is None and output == "softmax":
        return F.cross_entropy(logits, labels, reduction="none")
    answers = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
    return F.binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(dim=1)
