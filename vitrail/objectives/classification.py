"""Learning to name the class of an image."""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.errors import ConfigError
from vitrail.objectives import LossOutput
from vitrail.weights.bundle import Scores

__all__ = ["Classification"]


class Classification(nn.Module):
    """Cross-entropy of the network's logits with `batch.targets`, or with the labels where it has none; the accuracy.

    "softmax" treats the classes as alternatives. "sigmoid" asks of each class by itself, and sums over them: what the
    paper's group uses where an image can have several labels (JFT; Scaling ViT section 3.3). Raises `ConfigError`.

    The accuracy is how often the likeliest class is the label, or one of several, over the samples that count. A mixed
    image keeps the label of the image that it was made from: its larger share with mixup, but not always with CutMix.
    """

    def __init__(self, network: nn.Module, *, loss: Scores = "softmax", label_smoothing: float = 0.0) -> None:
        super().__init__()
        if loss not in get_args(Scores):
            raise ConfigError(f"loss={loss!r} is not one of {', '.join(map(repr, get_args(Scores)))}")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing={label_smoothing} is not in [0, 1)")
        self.network = network
        self.loss = loss
        self.label_smoothing = label_smoothing

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
            targets = labels if batch.targets is None else batch.targets
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing, reduction="none")
        shares = F.one_hot(labels, logits.shape[1]).float() if batch.targets is None else batch.targets
        # Each class is a yes-or-no question, so smoothing moves its target towards the middle of those two.
        shares = shares * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, shares, reduction="none").sum(dim=1)


def _mean(values: Float[Tensor, " b"], counted: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Over what is counted; 0 where nothing is."""
    weights = counted.float()
    return (values * weights).sum() / weights.sum().clamp(min=1)
