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

from vitrail.data.splits import Splits
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.settings import setting
from vitrail.tasks.contrast import CONTRAST, ContrastObjective, Head
from vitrail.tasks.task import Objective, StepCost
from vitrail.tasks.views import ViewTask


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

    def head(self, network: AnyConfig) -> Head:
        """Return a new projection for a network."""
        width = network.embed_width
        hidden = self.projection_hidden or width
        return Head(width, hidden, hidden, self.projection_width, scales_last=True, weight_std=0.01)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step. The similarities of the views are small beside the network."""
        with torch.device("meta"):
            head = self.head(network)
        return StepCost(
            network,
            parameters=sum(weight.numel() for weight in head.parameters()),
            batch_bytes=12 * sum(layer.out_features for layer in head if isinstance(layer, nn.Linear)),
            flops=6 * head.macs,
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return SimClrObjective(network, self)


class SimClrObjective(ContrastObjective):
    """A network whose embedding is projected by three dense layers with batch norms. The projection is trained beside
    the network."""

    def __init__(self, network: Any, task: SimClr) -> None:
        super().__init__(network)
        self.task: SimClr = task
        self.projection = task.head(network.config)

    def losses(
        self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        vectors = F.normalize(self.projection(features["embeddings"], counted, processes), dim=1)
        others, valid = processes.gather_rows(vectors), processes.gather_rows(counted.float()) > 0
        first = processes.rank * len(vectors)
        return contrast_losses(vectors, others, valid, self.task.contrast_temperature, first)


def contrast_losses(
    vectors: Float[Tensor, "b width"],
    others: Float[Tensor, "n width"],
    valid: Bool[Tensor, " n"],
    temperature: float,
    first: int = 0,
) -> tuple[Float[Tensor, " b//2"], Float[Tensor, " b//2"]]:
    """Return the loss of each image, and the fraction of its views whose partner is the most similar of all others.

    `vectors` have length 1, and are the rows of `others` from `first` on. Rows 2 k and 2 k + 1 are partners. For each
    of its views, the loss of an image has the cross-entropy of the softmax of the cosine similarities with all other
    valid views, divided by the temperature (NT-Xent). It is their sum, which is 2 log(n - 1) for n views that are all
    alike. Rows that are not valid do not change the results of other rows, and their own results have no meaning.
    """
    every = torch.arange(len(others), device=vectors.device)
    rows = every[first : first + len(vectors)]
    partners = rows ^ 1
    left_out = ((every == rows[:, None]) | ~valid) & (every != partners[:, None])  # so that no row is empty
    logits = (vectors @ others.T / temperature).masked_fill(left_out, -torch.inf)
    losses = F.cross_entropy(logits, partners, reduction="none")
    right = logits.detach().argmax(dim=1) == partners
    return losses.view(-1, 2).sum(dim=1), right.float().view(-1, 2).mean(dim=1)
