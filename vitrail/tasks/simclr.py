"""Contrastive learning: "A Simple Framework for Contrastive Learning of Visual Representations" (2002.05709).

The network embeds two augmented views of every image. The loss asks for each view which of all other views of the batch
shows the same image. No labels are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.augmentation.draws import Slot, keyed_uniform
from vitrail.data.augmentation.operations import on_device
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Ranks, evaluation_batches
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.predictor import shared_copy
from vitrail.models.variants import AnyConfig
from vitrail.settings import above_zero, at_least
from vitrail.tasks.task import LossOutput, Objective, StepCost, Task, TaskMetric, mean_of_counted
from vitrail.weights.bundle import OutputKind

__all__ = ["ContrastErrors", "SimClr", "SimClrObjective", "contrast_losses", "effective_rank", "uniformity"]

EVALUATION_SEED = 0
"""Seed of the views of held-out images. It is fixed, so that the losses of all runs can be compared."""

GROUP = 256
"""Number of held-out images whose views are compared with each other. The loss depends on it."""


@dataclass(frozen=True, kw_only=True)
class SimClr(Task):
    """Find the two views of each image among all views of a batch, which needs no labels.

    The saved model is the network without a head. The constructor raises `ConfigError` if fields have invalid values.
    The message names all of them.
    """

    name = "simclr"
    targets = ("none", "class", "classes", "numbers")
    views = 2
    output_noun = "output"
    metrics = (
        TaskMetric("contrast_loss", higher_is_better=False),
        TaskMetric("contrast_accuracy", is_fraction=True),
        TaskMetric("uniformity", higher_is_better=False, describes_model=False),
        TaskMetric("feature_rank", describes_model=False),
    )
    loss_metric = "contrast_loss"

    contrast_temperature: float = 0.1
    """Number that divides the cosine similarities of views in the loss. The paper uses 0.1 for batches of thousands of
    images, and 0.5 for CIFAR-10."""
    projection_hidden: int | None = None
    """Hidden units of the projection that is trained beside the network. By default the length of the network's
    embedding."""
    projection_width: int = 128
    """Length of the projected vectors that the loss compares."""

    def _problems(self) -> Iterator[str]:
        yield from above_zero(self, "contrast_temperature")
        yield from at_least(self, projection_hidden=1, projection_width=2)
        yield from super()._problems()

    @property
    def output(self) -> OutputKind:
        """Meaning of the outputs of the saved model, which has none."""
        return "softmax"

    def check_data(self, splits: Splits) -> None:
        """Raise `ConfigError` if there are fewer than two training images, which leaves nothing to compare."""
        if len(splits.train) < 2:
            raise ConfigError(
                f"{splits.title} has fewer than two training images, so no image can be told from another"
            )

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` for a network without embeddings, and for a layer that would not be trained."""
        if network is None:
            raise ConfigError(
                f"task={self.name!r} trains the embedding of a network, which a network of your own class need not "
                "have; choose a network of this package, such as variant='ViT-S/16'"
            )
        if hidden := getattr(network, "head_hidden", 0):
            raise ConfigError(
                f"head_hidden={hidden} is a layer that task={self.name!r} does not train, because the network has no "
                "head; set head_hidden to 0"
            )

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """Return no names, because the network has no head."""
        return ()

    def main_metric(self, splits: Splits) -> str:
        return "contrast_loss"

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

    def evaluator(self, objective: Objective) -> Evaluator:
        """Return the evaluator of the loss between fixed views, and of monitors of collapse."""
        assert isinstance(objective, SimClrObjective)
        return ContrastErrors(objective)


class SimClrObjective(Objective):
    """A network whose embedding is projected by two dense layers. The projection is trained beside the network.

    The two views of an image are in consecutive rows. With gradient accumulation, each part of a batch is compared by
    itself. With several processes, each process compares its own part.
    """

    def __init__(self, network: Any, task: SimClr) -> None:
        super().__init__(network)
        self.task = task
        first, hidden, last = task.sizes(network.config)
        self.projection = nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))

    def forward(self, batch: Batch) -> LossOutput:
        vectors = self.project(self.network.embed(batch.images))
        counted = self.counted(batch)
        losses, right = contrast_losses(vectors, counted, self.task.contrast_temperature)
        return LossOutput(mean_of_counted(losses, counted), {"contrast_accuracy": mean_of_counted(right, counted)})

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the views that were decoded together with their partners."""
        return batch.valid.view(-1, 2).all(dim=1).repeat_interleave(2)

    def project(self, embeddings: Float[Tensor, "b width"]) -> Float[Tensor, "b projected"]:
        """Return projected vectors of length 1."""
        return F.normalize(self.projection(embeddings).float(), dim=1)


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


@dataclass(frozen=True)
class ContrastErrors:
    """Measures the loss on held-out images, and metrics that show a collapse of the embeddings.

    Each image has two fixed views: boxes of 30 to 100 % of its sides, one of them mirrored. Views are compared among
    the views of groups of 256 images.
    """

    objective: SimClrObjective

    @torch.no_grad()
    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `contrast_loss`, `contrast_accuracy`, `uniformity`, `feature_rank`, `images` and `skipped`."""
        bundle, objective = outputs.bundle, self.objective
        network = shared_copy(bundle.network)
        none = torch.empty(0, 2, objective.task.projection_width), torch.empty(0, network.config.embed_width)
        found: list[tuple[Tensor, Tensor, Tensor]] = [(torch.empty(0, dtype=torch.int64), *none)]
        skipped: list[Skipped] = []
        ranks = Ranks(outputs.processes.rank, outputs.processes.world)
        for batch in evaluation_batches(
            held_out, bundle.preprocess, batch_size=outputs.batch_size or 256, readers=outputs.readers, ranks=ranks
        ):
            skipped += batch.skipped
            moved = batch.to(bundle.device)
            images = bundle.preprocess.normalise(moved.images)
            one, other = (network.embed(each) for each in fixed_views(images, batch.samples))
            pairs = torch.stack([objective.project(one), objective.project(other)], dim=1).cpu()
            whole = network.embed(images).float().cpu()
            found.append((batch.samples[batch.valid], pairs[batch.valid], whole[batch.valid]))
        own = [torch.cat(column) for column in zip(*found, strict=True)]
        samples, pairs, whole = (torch.cat(column) for column in zip(*outputs.processes.gather(own), strict=True))
        order = samples.argsort()
        vectors, embeddings = pairs[order], whole[order]
        skipped = [item for part in outputs.processes.gather(skipped) for item in part]
        for item in skipped:
            outputs.on_skip(item)
        counts = {"images": float(len(samples)), "skipped": float(len(skipped))}
        if not len(samples):
            return dict.fromkeys((metric.name for metric in objective.task.metrics), 0.0) | counts
        losses, right = [], []
        for group in torch.split(vectors, GROUP):
            valid = torch.ones(2 * len(group), dtype=torch.bool)
            loss, hits = contrast_losses(group.flatten(0, 1), valid, objective.task.contrast_temperature)
            losses.append(loss)
            right.append(hits)
        return {
            "contrast_loss": float(torch.cat(losses).double().mean()),
            "contrast_accuracy": float(torch.cat(right).double().mean()),
            "uniformity": uniformity(embeddings),
            "feature_rank": effective_rank(embeddings),
            **counts,
        }


def fixed_views(
    images: Float[Tensor, "b c h w"], samples: Int64[Tensor, " b"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c h w"]]:
    """Return two views of each image, which depend on its sample alone. The second one is mirrored."""
    views = []
    for view in range(2):
        numbers = torch.zeros_like(samples).numpy()
        key = numbers, np.from_dlpack(samples), np.full_like(numbers, view)
        uniform = torch.from_numpy(keyed_uniform(EVALUATION_SEED, *key, draws=4, first=Slot.CROP)).double()
        size = 0.3 + 0.7 * uniform[:, :2]  # of the sides
        centre = (1 - size) * (2 * uniform[:, 2:] - 1)
        theta = torch.zeros(len(images), 2, 3, dtype=torch.float64)
        theta[:, 0, 0], theta[:, 1, 1] = size[:, 0] * (-1 if view else 1), size[:, 1]
        theta[:, :, 2] = centre
        grid = F.affine_grid(on_device(theta.float().numpy(), images.device), list(images.shape), align_corners=False)
        views.append(F.grid_sample(images, grid, padding_mode="border", align_corners=False))
    return views[0], views[1]


def uniformity(embeddings: Float[Tensor, "n width"]) -> float:
    """Return the logarithm of the mean of exp(-2 d^2) over all pairs of the first 1,024 embeddings (2005.10242).

    Here d is the distance of two embeddings that are scaled to length 1. The value is 0 if all embeddings are equal,
    and about -4 if they are spread evenly over a sphere of many dimensions. A single embedding has the value 0.
    """
    points = F.normalize(embeddings[:1024].double(), dim=1)
    if len(points) < 2:
        return 0.0
    squares = (2 - 2 * points @ points.T).clamp(min=0)
    above = torch.ones_like(squares, dtype=torch.bool).triu(1)
    return float((-2 * squares[above]).exp().mean().log())


def effective_rank(embeddings: Float[Tensor, "n width"]) -> float:
    """Return the exponential of the entropy of the variances along the principal axes, which is the number of axes that
    the embeddings use. The value is 0 if all embeddings are equal."""
    centred = embeddings.double() - embeddings.double().mean(dim=0)
    variances = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0)
    if variances.sum() <= 1e-12 * embeddings.double().square().sum():
        return 0.0
    fractions = variances / variances.sum()
    return float(torch.special.entr(fractions).sum().exp())
