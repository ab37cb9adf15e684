"""The tasks that find each view of an image among the views of other images, which need no labels.

- SimCLR, "A Simple Framework for Contrastive Learning of Visual Representations" (2002.05709): the loss asks for each
  of two augmented views which of all other views of the batch shows the same image.
- MoCo v3, "An Empirical Study of Training Self-Supervised Vision Transformers" (2104.02057): for each of two views, a
  predictor finds the other view among the views of the batch, as the running mean of the network embeds them.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
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
from vitrail.tasks.task import BatchObjective, LossOutput, Objective, Position, StepCost, TaskMetric, mean_of_counted
from vitrail.tasks.unlabelled import COLLAPSE, ViewObjective, ViewTask, follow, mean_of, momentum_at

GROUP = 256
"""Number of held-out images whose views are compared with each other. The loss depends on it."""


@dataclass(frozen=True, kw_only=True)
class ContrastTask(ViewTask):
    """A task that compares the views of an image with those of other images."""

    metrics = (
        TaskMetric("contrast_loss", higher_is_better=False),
        TaskMetric("contrast_accuracy", is_fraction=True),
        *COLLAPSE,
    )
    loss_metric = "contrast_loss"
    least_batch = 2


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


# SimCLR: the two views of each image are found among all views of the batch.


@dataclass(frozen=True, kw_only=True)
class SimClr(ContrastTask):
    """Find the two views of each image among all views of a batch, which needs no labels.

    The saved model is the network without a head.
    """

    name = "simclr"

    contrast_temperature: float = setting(0.1, above=0, below=math.inf)
    """Number that divides the cosine similarities of views in the loss. The paper uses 0.1 for batches of thousands of
    images, and 0.5 for CIFAR-10."""
    projection_hidden: int | None = setting(None, least=1, most=2**24)
    """Hidden units of the projection that is trained beside the network. By default the length of the network's
    embedding."""
    projection_width: int = setting(128, least=2, most=2**24)
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


# MoCo v3: each view is found among the embeddings of a running mean of the network.


PUBLISHED_HIDDEN = 4_096
NARROW, NARROW_HIDDEN = 192, 512
"""Width of embeddings below which the dense layers are smaller by default, and their hidden units."""


@dataclass(frozen=True, kw_only=True)
class MoCo(ContrastTask):
    """Find each view among the embeddings of a running mean of the network, which needs no labels.

    The saved model is the network without a head.
    """

    name = "moco"

    contrast_temperature: float = setting(0.2, above=0, below=math.inf)
    """Number that divides the cosine similarities of views in the loss."""
    projection_hidden: int | None = setting(None, least=1, most=2**24)
    """Hidden units of the projection and the predictor that are trained beside the network. By default 4,096, or 512 if
    the network's embedding is shorter than 192."""
    projection_width: int = setting(256, least=2, most=2**24)
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

    def after_step(self, position: Position, processes: Processes) -> None:
        """Update the running mean, with the momentum of the next step, as in the published code."""
        momentum = momentum_at(position._replace(step=position.step + 1), self.task.teacher_momentum)
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
