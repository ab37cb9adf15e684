"""The common part of the tasks that find each view of an image among the views of other images: SimCLR and MoCo v3."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.processes.group import Processes
from vitrail.tasks.task import BatchObjective, LossOutput, TaskMetric, mean_of_counted
from vitrail.tasks.views import COLLAPSE, ViewObjective

CONTRAST = (
    TaskMetric("contrast_loss", higher_is_better=False),
    TaskMetric("contrast_accuracy", is_fraction=True),
    *COLLAPSE,
)
"""Metrics of these tasks."""

GROUP = 256
"""Number of held-out images whose views are compared with each other. The loss depends on it."""


class ContrastObjective(ViewObjective, BatchObjective):
    """A network whose embeddings are projected and compared with those of all other images of the batch."""

    projection: Head

    def features(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings of the network in training."""
        return {"embeddings": self.network.embed(batch.images)}

    @torch.no_grad()
    def fixed_features(self, batch: Batch) -> dict[str, Tensor]:
        return self.targets(batch.images)

    def targets(self, images: Float[Tensor, "b c h w"]) -> dict[str, Float[Tensor, "b width"]]:
        """Return embeddings of other networks. By default there are none."""
        return {}

    @abstractmethod
    def losses(
        self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the loss of each image, and the fraction of its views that were found. `features` has two rows for
        each image of this process."""

    def compare(self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes) -> LossOutput:
        losses, right = self.losses(features, counted, processes)
        pairs = counted[::2]
        return LossOutput(mean_of_counted(losses, pairs), {"contrast_accuracy": mean_of_counted(right, pairs)})

    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b 2 k width"]:
        """Return the embeddings of both views by each network."""
        views = [[network.embed(images), *self.targets(images).values()] for images in (one, other)]
        return torch.stack([torch.stack(found, dim=1) for found in views], dim=1)

    def means(self, rows: Float[Tensor, "n 2 k width"]) -> dict[str, float]:
        """Return the loss and the accuracy. Each group of 256 images is a batch of its own, also for batch norms."""
        device = next(self.projection.parameters()).device
        sums = torch.zeros(2, dtype=torch.float64)
        for group in torch.split(rows, GROUP):
            features = group.flatten(0, 1).to(device).unbind(dim=1)
            counted = torch.ones(2 * len(group), dtype=torch.bool, device=device)
            loss, metrics = self.compare(
                dict(zip(("embeddings", "targets"), features, strict=False)), counted, Processes()
            )
            sums += len(group) * torch.stack([loss, metrics["contrast_accuracy"]]).double().cpu()
        loss, accuracy = (sums / len(rows)).tolist()
        return {"contrast_loss": loss, "contrast_accuracy": accuracy}


class Head(nn.Sequential):
    """Dense layers without biases, each followed by a batch norm. ReLUs follow all batch norms but the last."""

    def __init__(self, *widths: int, scales_last: bool, weight_std: float | None = None) -> None:
        """The last batch norm has no shift, and a scale only if `scales_last`. By default weights start as those of
        `nn.Linear`."""
        layers: list[nn.Module] = []
        for first, width in itertools.pairwise(widths[:-1]):
            layers += [nn.Linear(first, width, bias=False), BatchNorm(width), nn.ReLU()]
        last = BatchNorm(widths[-1], scales=scales_last, shifts=False)
        layers += [nn.Linear(widths[-2], widths[-1], bias=False), last]
        for layer in layers:
            if isinstance(layer, nn.Linear) and weight_std is not None:
                nn.init.normal_(layer.weight, std=weight_std)
        super().__init__(*layers)

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates per row."""
        return sum(layer.weight.numel() for layer in self if isinstance(layer, nn.Linear))

    def forward(  # type: ignore[override]
        self, rows: Float[Tensor, "b width"], counted: Bool[Tensor, " b"], processes: Processes
    ) -> Float[Tensor, "b outputs"]:
        """Return the outputs for each row."""
        mask = counted.float()[:, None]
        count = processes.sum(mask.sum()).clamp(min=1)
        for layer in self:
            rows = layer(rows, mask, count, processes) if isinstance(layer, BatchNorm) else layer(rows)
        return rows


class BatchNorm(nn.Module):
    """A batch norm (1502.03167) with the mean and the variance of the counted rows of all processes.

    It computes in float32 at least, and has no running statistics: in evaluations, too, the rows are a batch.
    """

    eps = 1e-5
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, *, scales: bool = True, shifts: bool = True) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if scales else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if shifts else None)

    def forward(
        self, rows: Float[Tensor, "b width"], mask: Float[Tensor, "b 1"], count: Float[Tensor, ""], processes: Processes
    ) -> Float[Tensor, "b width"]:
        """Return the normalised rows. `mask` is 1 for the counted rows, of which all processes have `count`."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        rows = rows - processes.sum_with_gradients((rows * mask).sum(dim=0)) / count
        variance = processes.sum_with_gradients((rows.square() * mask).sum(dim=0)) / count
        scale = (variance + self.eps).rsqrt()
        rows = rows * (scale if self.weight is None else scale * self.weight)
        return rows if self.bias is None else rows + self.bias
