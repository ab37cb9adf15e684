"""Learning to name the class of an image."""

from __future__ import annotations

from typing import get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.errors import ConfigError
from vitrail.objectives import LossOutput
from vitrail.weights.bundle import Scores

__all__ = ["Classification"]


class Classification(nn.Module):
    """Cross-entropy of the network's logits, and the accuracy.

    "softmax" treats the classes as alternatives. "sigmoid" asks of each class by itself, and sums over them: what the
    paper's group uses where an image can have several labels (JFT; Scaling ViT section 3.3). Raises `ConfigError`.
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
        losses = self._losses(logits, batch.labels.clamp(min=0))
        valid = (batch.valid & (batch.labels >= 0)).float()
        count = valid.sum().clamp(min=1)
        correct = (logits.detach().argmax(dim=1) == batch.labels).float()
        return LossOutput(loss=(losses * valid).sum() / count, metrics={"accuracy": (correct * valid).sum() / count})

    def _losses(self, logits: Float[Tensor, "b classes"], labels: Tensor) -> Float[Tensor, " b"]:
        if self.loss == "softmax":
            return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="none")
        targets = F.one_hot(labels, logits.shape[1]).float()
        # Each class is a yes-or-no question, so smoothing moves its target towards the middle of those two.
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
