"""Contrast with a momentum encoder: "An Empirical Study of Training Self-Supervised Vision Transformers" (MoCo v3,
2104.02057).

For each of two views of an image, a predictor finds the other view among the views of the batch, as the running mean of
the network embeds them. No labels are needed.
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
from vitrail.tasks.task import Objective, Position, StepCost
from vitrail.tasks.views import ViewTask, follow, mean_of, momentum_at

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

    def heads(self, network: AnyConfig) -> tuple[Head, Head]:
        """Return a new projection and a new predictor for a network."""
        hidden, last = self.hidden_of(network), self.projection_width
        projection = Head(network.embed_width, hidden, hidden, last, scales_last=False)
        return projection, Head(last, hidden, last, scales_last=False)

    def hidden_of(self, network: AnyConfig) -> int:
        """Return the number of hidden units for a network."""
        return self.projection_hidden or (NARROW_HIDDEN if network.embed_width < NARROW else PUBLISHED_HIDDEN)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the running mean embeds all views as well."""
        with torch.device("meta"):
            projection, predictor = self.heads(network)
        weights, more = (sum(weight.numel() for weight in head.parameters()) for head in (projection, predictor))
        return StepCost(
            network,
            parameters=weights + more,
            fixed_bytes=4 * (network.parameters() + weights),
            batch_bytes=4 * (9 * self.hidden_of(network) + 6 * self.projection_width),
            flops=network.inference_flops(network.image_size) + 8 * projection.macs + 6 * predictor.macs,
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return MoCoObjective(network, self)


class MoCoObjective(ContrastObjective):
    """A network with a projection and a predictor, and running means of the network and the projection."""

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
        return self

    def before_step(self, position: Position) -> None:
        """Update the running mean by the weights after the last step, with the momentum of this step."""
        momentum = momentum_at(position, self.task.teacher_momentum)
        follow(self.teacher, self.network, momentum)
        follow(self.teacher_projection, self.projection, momentum)

    def targets(self, images: Float[Tensor, "b c h w"]) -> dict[str, Float[Tensor, "b width"]]:
        """Return the embeddings of the running mean."""
        return {"targets": self.teacher.embed(images)}

    def losses(
        self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the loss and the fraction of found views of each image. Each view has batch norms of its own."""
        valid = counted[::2]
        views, targets = (features[name].reshape(len(valid), 2, -1).unbind(1) for name in ("embeddings", "targets"))
        projected = [self.projection(rows, valid, processes) for rows in views]
        queries = torch.stack([self.predictor(rows, valid, processes) for rows in projected], dim=1)
        with torch.no_grad():
            keys = torch.stack([self.teacher_projection(rows, valid, processes) for rows in targets], dim=1)
        return key_losses(
            F.normalize(queries, dim=2),
            processes.gather_rows(F.normalize(keys, dim=2)),
            processes.gather_rows(valid.float()) > 0,
            self.task.contrast_temperature,
            first=processes.rank * len(valid),
        )


def key_losses(
    queries: Float[Tensor, "b 2 width"],
    keys: Float[Tensor, "n 2 width"],
    valid: Bool[Tensor, " n"],
    temperature: float,
    first: int = 0,
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return the symmetric loss of each image, and the fraction of its views whose key is the most similar one.

    The keys of the first image are those at `first`. Each view is compared with the keys of the other views of all
    valid images. The loss is the sum of both cross-entropies times twice the temperature. Images that are not valid do
    not change the results of other images, and their own results have no meaning.
    """
    every = torch.arange(len(keys), device=queries.device)
    rows = every[first : first + len(queries)]
    losses, right = [], []
    for view in range(2):
        logits = queries[:, view] @ keys[:, 1 - view].T / temperature
        logits = logits.masked_fill(~valid & (every != rows[:, None]), -torch.inf)
        losses.append(2 * temperature * F.cross_entropy(logits, rows, reduction="none"))
        right.append((logits.detach().argmax(dim=1) == rows).float())
    return losses[0] + losses[1], (right[0] + right[1]) / 2
