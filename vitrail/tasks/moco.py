"""Contrast with a momentum encoder: "An Empirical Study of Training Self-Supervised Vision Transformers" (MoCo v3,
2104.02057).

For each of two views of an image, a predictor finds the other view among the views of the batch, as the running mean of
the network embeds them. No labels are needed.
"""

from __future__ import annotations

import itertools
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
from vitrail.processes.group import Processes
from vitrail.settings import setting
from vitrail.tasks.task import LossOutput, Objective, Position, StepCost, mean_of_counted
from vitrail.tasks.views import CONTRAST, GROUP, ViewObjective, ViewTask, follow, mean_of, momentum_at

PUBLISHED_HIDDEN = 4_096
NARROW, NARROW_HIDDEN = 192, 512
"""Width of embeddings below which the dense layers are smaller by default, and their hidden units."""


@dataclass(frozen=True, kw_only=True)
class MoCo(ViewTask):
    """Find each view among the embeddings of a running mean of the network, which needs no labels.

    The saved model is the network without a head. The constructor raises `ConfigError` if fields have invalid values.
    The message names all of them.
    """

    name = "moco"
    metrics = CONTRAST
    loss_metric = "contrast_loss"

    contrast_temperature: float = setting(0.2, above=0, below=math.inf)
    """Number that divides the cosine similarities of views in the loss."""
    projection_hidden: int | None = setting(None, least=1)
    """Hidden units of the projection and the predictor that are trained beside the network. By default 4,096, or 512 if
    the network's embedding is shorter than 192."""
    projection_width: int = setting(256, least=2)
    """Length of the projected vectors that the loss compares."""
    teacher_momentum: float = setting(0.99, least=0, below=1)
    """Fraction of the running mean that each step keeps at the beginning. It rises to 1 along half a cosine wave."""
    fixed_patches: bool = True
    """True to leave the patch projection of a Vision Transformer as it is, which makes the training more stable."""

    def heads(self, network: AnyConfig) -> tuple[nn.Sequential, nn.Sequential]:
        """Return a new projection and a new predictor for a network."""
        hidden, last = self.hidden_of(network), self.projection_width
        return _dense(network.embed_width, hidden, hidden, last), _dense(last, hidden, last)

    def hidden_of(self, network: AnyConfig) -> int:
        """Return the number of hidden units for a network."""
        return self.projection_hidden or (NARROW_HIDDEN if network.embed_width < NARROW else PUBLISHED_HIDDEN)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the running mean embeds all views as well."""
        with torch.device("meta"):
            heads = self.heads(network)
        macs = [sum(layer.weight.numel() for layer in head if isinstance(layer, nn.Linear)) for head in heads]
        projection, predictor = (sum(weight.numel() for weight in head.parameters()) for head in heads)
        return StepCost(
            network,
            parameters=projection + predictor,
            fixed_bytes=4 * (network.parameters() + projection),
            image_bytes=4 * (9 * self.hidden_of(network) + 6 * self.projection_width),
            flops=network.inference_flops(network.image_size) + 8 * macs[0] + 6 * macs[1],
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the network and its running mean. Raise `ConfigError` as `check_network`."""
        self.check_network(getattr(network, "config", None))
        return MoCoObjective(network, self)


class MoCoObjective(ViewObjective):
    """A network with a projection and a predictor, and running means of the network and the projection.

    The dense layers have layer norms where the published code has batch norms, so that an image does not depend on the
    others of its batch. With gradient accumulation, each part of a batch is compared by itself. With several processes,
    each process compares its own part.
    """

    def __init__(self, network: Any, task: MoCo) -> None:
        super().__init__(network)
        self.task: MoCo = task
        self.projection, self.predictor = task.heads(network.config)
        self.teacher = mean_of(self.network)
        self.teacher_projection = mean_of(self.projection)
        if task.fixed_patches and hasattr(self.network, "patches"):
            self.network.patches.requires_grad_(False)

    def train(self, mode: bool = True) -> MoCoObjective:
        """Set the mode of the network. The running mean is always in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_projection.eval()
        return self

    def forward(self, batch: Batch) -> LossOutput:
        counted = self.counted(batch)
        pairs = -1, 2, self.task.projection_width
        keys = self.keys(batch.images).reshape(pairs)  # before the activations of the network are in memory
        queries = self.queries(self.network, batch.images).reshape(pairs)
        losses, right = key_losses(queries, keys, counted[::2], self.temperature)
        return LossOutput(
            mean_of_counted(losses, counted[::2]), {"contrast_accuracy": mean_of_counted(right, counted[::2])}
        )

    def queries(self, network: Any, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b projected"]:
        """Return predicted vectors of length 1. `network` is the network in training or a copy of it."""
        return F.normalize(self.predictor(self.projection(network.embed(images))).float(), dim=1)

    @torch.no_grad()
    def keys(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b projected"]:
        """Return vectors of the running mean, of length 1."""
        return F.normalize(self.teacher_projection(self.teacher.embed(images)).float(), dim=1)

    def after_step(self, position: Position, processes: Processes) -> None:
        """Update the running mean."""
        momentum = momentum_at(position, self.task.teacher_momentum)
        follow(self.teacher, self.network, momentum)
        follow(self.teacher_projection, self.projection, momentum)

    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b 4 projected"]:
        """Return the predicted vectors of both views, and those of the running mean."""
        found = [self.queries(network, one), self.queries(network, other), self.keys(one), self.keys(other)]
        return torch.stack(found, dim=1)

    def means(self, rows: Float[Tensor, "n 4 projected"]) -> dict[str, float]:
        """Return the loss and the accuracy, with views that are compared among groups of 256 images."""
        losses, right = zip(
            *(
                key_losses(group[:, :2], group[:, 2:], torch.ones(len(group), dtype=torch.bool), self.temperature)
                for group in torch.split(rows, GROUP)
            ),
            strict=True,
        )
        return {
            "contrast_loss": float(torch.cat(losses).double().mean()),
            "contrast_accuracy": float(torch.cat(right).double().mean()),
        }

    @property
    def temperature(self) -> float:
        """Number that divides the similarities."""
        return self.task.contrast_temperature


def key_losses(
    queries: Float[Tensor, "b 2 width"], keys: Float[Tensor, "b 2 width"], valid: Bool[Tensor, " b"], temperature: float
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return the symmetric loss of each image, and the fraction of its views whose key is the most similar one.

    Each view is compared with the keys of the other views of all valid images. The loss is the sum of both
    cross-entropies times twice the temperature. Images that are not valid do not change the results of other
    images, and their own results have no meaning.
    """
    rows = torch.arange(len(queries), device=queries.device)
    losses, right = [], []
    for view in range(2):
        logits = queries[:, view] @ keys[:, 1 - view].T / temperature
        logits = logits.masked_fill(~valid & (rows[:, None] != rows), -torch.inf)
        losses.append(2 * temperature * F.cross_entropy(logits, rows, reduction="none"))
        right.append((logits.detach().argmax(dim=1) == rows).float())
    return losses[0] + losses[1], (right[0] + right[1]) / 2


def _dense(*widths: int) -> nn.Sequential:
    """Return dense layers of these widths, with a layer norm and ReLU between them."""
    layers: list[nn.Module] = []
    for first, last in itertools.pairwise(widths):
        layers += [nn.Linear(first, last), nn.LayerNorm(last), nn.ReLU()]
    return nn.Sequential(*layers[:-2])
