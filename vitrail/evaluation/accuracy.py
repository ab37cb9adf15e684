"""How often the likeliest class is the true one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vitrail.data.pipeline import Skipped, evaluation_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.machine import Precision
from vitrail.models.fused import predicting

__all__ = ["Accuracy"]


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy, every sample once.

    The result has `accuracy` in [0, 1], `cross_entropy` in nats, and the numbers of `images` that were measured and
    `skipped` because they could not be decoded.
    """

    preprocess: Preprocess
    batch_size: int = 256
    threads: int | None = None
    precision: Precision = "float32"
    """Of matrix products. bf16 gave the demo's model another label for 1 of 2,000 test images, 1.7 times as fast."""
    on_skip: Callable[[Skipped], None] | None = None
    """Called with each sample that cannot be decoded."""

    def __call__(self, network: nn.Module, source: Source) -> dict[str, float]:
        device = next(network.parameters()).device
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # correct, cross-entropy, valid
        skipped = 0
        with predicting(network, self.precision):
            for batch in evaluation_batches(source, self.preprocess, batch_size=self.batch_size, threads=self.threads):
                skipped += len(batch.skipped)
                if self.on_skip is not None:
                    for item in batch.skipped:
                        self.on_skip(item)
                batch = batch.to(device)
                logits = network(self.preprocess.normalise(batch.images)).float()
                losses = F.cross_entropy(logits, batch.labels.clamp(min=0), reduction="none")
                correct = logits.argmax(dim=1) == batch.labels
                valid = batch.valid & (batch.labels >= 0)
                totals += torch.stack([correct * valid, losses * valid, valid]).double().sum(dim=1)
        correct_count, loss_sum, count = totals.tolist()
        return {
            "accuracy": correct_count / max(count, 1),
            "cross_entropy": loss_sum / max(count, 1),
            "images": count,
            "skipped": float(skipped),
        }
