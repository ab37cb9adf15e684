"""The common part of all tasks that compare two or more views of each image, without labels."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import on_device
from vitrail.data.batch import Batch, Skipped
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.models.compiled import compile_copy
from vitrail.models.network import shared_copy
from vitrail.processes.group import local
from vitrail.tasks.pictures import PictureTable, neighbour_table
from vitrail.tasks.task import (
    EVALUATION_SEED,
    HeadlessObjective,
    HeadlessTask,
    Objective,
    Position,
    TaskMetric,
    normalised_batches,
)
from vitrail.weights.bundle import Bundle

COLLAPSE = (
    TaskMetric("uniformity", higher_is_better=False, describes_model=False),
    TaskMetric("feature_rank", describes_model=False),
)
"""Metrics of the embeddings that show a collapse."""


@dataclass(frozen=True, kw_only=True)
class ViewTask(HeadlessTask):
    """A task that compares two views of each image. The saved model is the network without a head.

    The constructor raises `ConfigError` if fields have invalid values. The message names all of them.
    """

    views = 2

    def check_data(self, splits: Splits) -> None:
        """Raise `ConfigError` if there are fewer than two training images, which leaves nothing to compare."""
        if len(splits.train) < 2:
            raise ConfigError(f"{splits.title} has fewer than two training images, so there is nothing to compare")

    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return images with those whose embeddings are most similar."""
        found = neighbour_table(shared_copy(bundle.network), bundle.preprocess, source, bundle.device)
        return () if found is None else (found,)


class ViewObjective(HeadlessObjective):
    """A network that is trained to embed views of the same image alike.

    The two views of an image are in consecutive rows.
    """

    task: ViewTask

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the views that were decoded together with their partners."""
        return batch.valid.view(-1, 2).all(dim=1).repeat_interleave(2)

    @abstractmethod
    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b ..."]:
        """Return values for each held-out image. `means` computes the metrics from them. `one` and `other` are its two
        views, and `network` is the saved network in evaluation mode."""

    @abstractmethod
    def means(self, rows: Float[Tensor, "n ..."]) -> dict[str, float]:
        """Return the metrics of held-out images. `rows` has the values that `compared` returned, in the order of the
        images."""

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of two fixed views of each image (`fixed_views`), those that show a collapse of the
        embeddings, and the counts `images` and `skipped`."""
        network = shared_copy(outputs.bundle.network)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        skipped: list[Skipped] = []
        for batch in normalised_batches(outputs, held_out, skipped):
            rows = self.compared(network, *fixed_views(batch.images, batch.samples)).cpu()
            whole, valid = network.embed(batch.images).float().cpu(), batch.valid.cpu()
            found.append((batch.samples[valid], rows[valid], whole[valid]))
        count_skipped = outputs.gather_skipped(skipped)
        found = [columns for part in outputs.processes.gather(found) for columns in part]
        count = float(sum(len(samples) for samples, _, _ in found))
        counts = {"images": count, "skipped": float(count_skipped)}
        if not count:
            return dict.fromkeys((metric.name for metric in self.task.metrics), 0.0) | counts
        samples, rows, embeddings = (torch.cat(column) for column in zip(*found, strict=True))
        order = samples.argsort()
        monitors = {"uniformity": uniformity(embeddings[order]), "feature_rank": effective_rank(embeddings[order])}
        return self.means(rows[order]) | monitors | counts


def fixed_views(
    images: Float[Tensor, "b c h w"], samples: Int64[Tensor, " b"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c h w"]]:
    """Return two views of each image, which depend on its sample alone: boxes of 30 to 100 % of its sides. The second
    one is mirrored."""
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


# A running mean of the weights of a network in training, which is a network as well: a teacher that is never trained.
# The mean follows the trained weights after every step. Its momentum is the factor of the old mean.


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def mean_of(module: AnyModule) -> AnyModule:
    """Return a copy of a module in evaluation mode that is not trained. Blocks that are compiled are compiled again."""
    made = copy.deepcopy(module).requires_grad_(False).eval()
    for part in made.modules():
        compile_copy(part)
    return made


@torch.no_grad()
def follow(mean: nn.Module, trained: nn.Module, momentum: float) -> None:
    """Multiply the weights of `mean` by the momentum, and add the trained weights, multiplied by 1 minus the
    momentum."""
    means, weights = ([local(weight.detach()) for weight in module.parameters()] for module in (mean, trained))
    torch._foreach_lerp_(means, weights, 1 - momentum)


def momentum_at(position: Position, start: float) -> float:
    """Return the momentum after a step, which rises from `start` to 1 along half a cosine wave."""
    return 1 - (1 - start) * 0.5 * (1 + math.cos(math.pi * position.step / position.steps))
