"""Contrastive learning: "A Simple Framework for Contrastive Learning of Visual Representations" (2002.05709).

The network embeds two augmented views of every image. The loss asks for each view which of all other views of the batch
shows the same image. No labels are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.splits import Splits
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig
from vitrail.settings import setting
from vitrail.tasks.task import LossOutput, Objective, StepCost, mean_of_counted
from vitrail.tasks.views import CONTRAST, GROUP, ViewObjective, ViewTask


@dataclass(frozen=True, kw_only=True)
class SimClr(ViewTask):
    """Find the two views of each image among all views of a batch, which needs no labels.

    The saved model is the network without a head. The constructor raises `ConfigError` if fields have invalid values.
    The message names all of them.
    """

    name = "simclr"
    metrics = CONTRAST
    loss_metric = "contrast_loss"

    contrast_temperature: float = setting(0.1, above=0, below=math.inf)
    """Number that divides the cosine similarities of views in the loss. The paper uses 0.1 for batches of thousands of
    images, and 0.5 for CIFAR-10."""
    projection_hidden: int | None = setting(None, least=1)
    """Hidden units of the projection that is trained beside the network. By default the length of the network's
    embedding."""
    projection_width: int = setting(128, least=2)
    """Length of the projected vectors that the loss compares."""

    def sizes(self, network: AnyConfig) -> tuple[int, int, int]:
        """Return the widths of the projection: input, hidden units and output."""
        width = network.embed_width
        return width, self.projection_hidden or width, self.projection_width

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step. The similarities of the views are small beside the network."""
        first, hidden, last = self.sizes(network)
        return StepCost(
            network,
            parameters=hidden * (first + 1) + last * (hidden + 1),
            image_bytes=4 * (first + 2 * hidden + 2 * last),
            flops=6 * hidden * (first + last),
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the network with a projection. Raise `ConfigError` as `check_network`."""
        self.check_network(getattr(network, "config", None))
        return SimClrObjective(network, self)


class SimClrObjective(ViewObjective):
    """A network whose embedding is projected by two dense layers. The projection is trained beside the network.

    With gradient accumulation, each part of a batch is compared by itself. With several processes, each process
    compares its own part.
    """

    def __init__(self, network: Any, task: SimClr) -> None:
        super().__init__(network)
        self.task: SimClr = task
        first, hidden, last = task.sizes(network.config)
        self.projection = nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))

    def forward(self, batch: Batch) -> LossOutput:
        vectors = self.project(self.network.embed(batch.images))
        counted = self.counted(batch)
        losses, right = contrast_losses(vectors, counted, self.task.contrast_temperature)
        return LossOutput(mean_of_counted(losses, counted), {"contrast_accuracy": mean_of_counted(right, counted)})

    def project(self, embeddings: Float[Tensor, "b width"]) -> Float[Tensor, "b projected"]:
        """Return projected vectors of length 1."""
        return F.normalize(self.projection(embeddings).float(), dim=1)

    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b 2 projected"]:
        """Return the projected vectors of both views."""
        return torch.stack([self.project(network.embed(views)) for views in (one, other)], dim=1)

    def means(self, rows: Float[Tensor, "n 2 projected"]) -> dict[str, float]:
        """Return the loss and the accuracy, with views that are compared among groups of 256 images."""
        losses, right = [], []
        for group in torch.split(rows, GROUP):
            valid = torch.ones(2 * len(group), dtype=torch.bool)
            loss, hits = contrast_losses(group.flatten(0, 1), valid, self.task.contrast_temperature)
            losses.append(loss)
            right.append(hits)
        return {
            "contrast_loss": float(torch.cat(losses).double().mean()),
            "contrast_accuracy": float(torch.cat(right).double().mean()),
        }


def contrast_losses(
    vectors: Float[Tensor, "b width"], valid: Bool[Tensor, " b"], temperature: float
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return the loss of each view, and 1 if its partner is the most similar of all other views, else 0.

    `vectors` have length 1, and rows 2 k and 2 k + 1 are partners. The loss is the cross-entropy of the softmax of the
    cosine similarities with all other valid views, divided by the temperature (NT-Xent). Rows that are not valid do not
    change the results of other rows, and their own results have no meaning.
    """
    rows = torch.arange(len(vectors), device=vectors.device)
    logits = vectors @ vectors.T / temperature
    left_out = (rows[:, None] == rows) | ~valid
    partners = rows ^ 1
    left_out[rows, partners] = False  # partners are valid together, so that no row is empty
    logits = logits.masked_fill(left_out, -torch.inf)
    losses = F.cross_entropy(logits, partners, reduction="none")
    return losses, (logits.detach().argmax(dim=1) == partners).float()
