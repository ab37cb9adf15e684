"""Classification: one label per image, or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.data.source import Mixture, Source, class_indices, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.settings import below_one, one_of, raise_problems
from vitrail.tasks.task import LossOutput, Task
from vitrail.weights.bundle import OutputKind

__all__ = ["Classification", "ClassificationObjective", "Loss", "balanced_weights"]

Loss = Literal["softmax", "sigmoid"]
"""Loss of classification: classes that exclude each other, or one yes-or-no question per class."""

ClassWeights = Literal["none", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Learn the classes of images: one label per image, or several with the sigmoid loss.

    Raises `ConfigError`, naming every field that does not fit, when it is made.
    """

    name: ClassVar[str] = "classification"

    loss: Loss = "softmax"
    """Loss function: softmax if every image has exactly one class, sigmoid if an image can have several or none."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread over all classes."""
    class_weights: ClassWeights = "none"
    """balanced: weight the loss so that every class counts equally, however many images it has."""

    def __post_init__(self) -> None:
        raise_problems(
            [
                *below_one(self, "label_smoothing"),
                *one_of(self, loss=Loss, class_weights=ClassWeights),
            ]
        )

    @property
    def output(self) -> OutputKind:
        return self.loss

    def check_data(self, splits: Splits, spec: str) -> None:
        """Raise `ConfigError` if images have several labels and the loss takes one."""
        if target_kind(splits.train) == "classes" and self.loss != "sigmoid":
            raise ConfigError(
                f"data {spec!r} has images of several classes, which loss={self.loss!r} cannot learn; choose "
                "loss='sigmoid'"
            )

    def objective(self, network: nn.Module, splits: Splits) -> nn.Module:
        """Return the network with the cross-entropy loss of these settings."""
        weights = balanced_weights(splits.train) if self.class_weights == "balanced" else None
        return ClassificationObjective(
            network, loss=self.loss, label_smoothing=self.label_smoothing, class_weights=weights
        )


class ClassificationObjective(nn.Module):
    """Cross-entropy of the network's logits with `batch.targets`, or with `batch.labels` if there are no targets.

    The softmax loss treats the classes as alternatives. The sigmoid loss treats each class as a question of its own and
    sums over the classes, as the paper's group does if an image can have several labels (JFT; Scaling ViT section 3.3).

    With `class_weights` the loss of each image is multiplied by the weight of its class, and that of a mixed image by
    the mean of its classes' weights. In the sigmoid loss, which may have several true classes or none, the weights
    apply to the true answers only.

    The accuracy is the fraction of counted samples whose likeliest class is the label, or one of several labels. A
    mixed image keeps the label of the image that it was made from: the larger part with mixup, but not always with
    CutMix.
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
        super().__init__()
        self.network = network
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, batch: Batch) -> LossOutput:
        logits = self.network(batch.images).float()
        losses = self._losses(logits, batch)
        counted = batch.counted
        likeliest = logits.detach().argmax(dim=1)
        correct = likeliest == batch.labels
        if batch.targets is not None:  # of several labels, any will do
            hits = batch.targets.gather(1, likeliest[:, None])[:, 0] > 0.5
            correct = torch.where(batch.labels < 0, hits, correct)
        return LossOutput(_mean(losses, counted), {"accuracy": _mean(correct.float(), counted)})

    def _losses(self, logits: Float[Tensor, "b classes"], batch: Batch) -> Float[Tensor, " b"]:
        labels = batch.labels.clamp(min=0)
        if self.loss == "softmax":
            return self._alternatives(logits, labels if batch.targets is None else batch.targets)
        shares = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
        # Each class is a yes-or-no question, so smoothing moves its target towards the middle of those two.
        shares = shares * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, shares, pos_weight=self.class_weights, reduction="none")
        return losses.sum(dim=1)

    def _alternatives(self, logits: Float[Tensor, "b classes"], targets: Tensor) -> Float[Tensor, " b"]:
        """Cross-entropy with labels (b) or shares of classes (b classes)."""
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
    """For each class n / (k n_c), where n_c of n labels are of class c and k classes have any: the mean over the labels
    is 1, and every class counts as much as any other. Classes without a label have the weight 1.

    Labels are those that training draws: of a mixture, each source counts by its share.
    """
    parts = source.parts if isinstance(source, Mixture) else ((0, len(source), 1.0),)
    counts = torch.zeros(len(source.classes), dtype=torch.float64)
    for first, length, share in parts:
        for index in range(first, first + length):
            for one in class_indices(source.target(index)):
                counts[one] += share / length
    there = counts > 0
    weights = torch.ones_like(counts)
    weights[there] = counts.sum() / (there.sum() * counts[there])
    return weights.float()


def _mean(values: Float[Tensor, " b"], counted: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Over what is counted; 0 where nothing is."""
    weights = counted.float()
    return (values * weights).sum() / weights.sum().clamp(min=1)
