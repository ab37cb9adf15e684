"""The task segmentation: a class for every pixel, which a head of patches learns by the cross-entropy of the known
pixels. Queries learn masks: those of classes, and in the task detection those of objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.objects import IGNORED
from vitrail.data.splits import Splits, one_class
from vitrail.errors import DataError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.segmentation import ByMasks
from vitrail.models.heads.masks import CELLS
from vitrail.registry import Registry
from vitrail.settings import setting
from vitrail.tasks.dense_objective import DenseObjective, DenseTask
from vitrail.tasks.detection import class_loss, match, token_amounts
from vitrail.tasks.task import LossOutput, Objective, Position, Task, TaskMetric


@dataclass(frozen=True, kw_only=True)
class Segmentation(DenseTask):
    """Predict the class of every pixel."""

    name = "segmentation"
    targets = ("mask",)
    targets_noun = "masks of pixels"
    output = "mask"
    objectives = Registry[Callable[[nn.Module, Any], Objective]](
        {
            "fine-patches": "vitrail.tasks.segmentation:SegmentationObjective",
            "patches": "vitrail.tasks.segmentation:SegmentationObjective",
            "queries": "vitrail.tasks.segmentation:QueryObjective",
        }
    )
    head_kinds = tuple(objectives)
    unread = MappingProxyType({"queries": ("dice_weight", "loss_stride")})
    metrics = (
        TaskMetric("mean_iou", is_fraction=True, label="mIoU"),
        TaskMetric("pixel_accuracy", is_fraction=True, label="pixel accuracy"),
    )
    loss_metric = "mean_iou"

    dice_weight: float = setting(0.0, least=0, below=math.inf, advice="0 means none")
    """Weight of the Dice loss beside the cross-entropy of masks. It gives all classes of an image the same weight, so
    that small things count more."""
    loss_stride: int = setting(2, least=1)
    """Distance in pixels between the pixels of a mask that are learned. 1 learns from all pixels and takes longer."""

    def check_data(self, splits: Splits) -> None:
        super().check_data(splits)
        if len(splits.classes) < 2:
            raise DataError(one_class(splits).text)

    def evaluator(self, objective: Objective) -> Evaluator:
        return ByMasks(bootstrap=0)


class SegmentationObjective(DenseObjective):
    """The cross-entropy of the pixels with a known class, and the Dice loss. Each image counts as often as it has known
    pixels, so that parts of a batch have the loss of the whole."""

    def forward(self, batch: Batch) -> LossOutput:
        outputs = self.outputs(batch.images)
        height, width = batch.images.shape[2:]
        config = self.network.config
        maps = config.dense_head.class_maps(outputs, config.grid_of(height, width))
        logits = at_pixels(maps, (height, width), self.task.loss_stride)
        truths = self._truths(batch)
        amounts = self.counted(batch)
        total = amounts.sum().clamp(min=1)
        entropy = F.cross_entropy(logits, truths.long(), ignore_index=IGNORED, reduction="sum") / total
        if not self.task.dice_weight:
            return LossOutput(entropy, {})
        dice = (dice_loss(logits, truths) * amounts).sum() / total
        return LossOutput(
            entropy + self.task.dice_weight * dice, {"pixel_loss": entropy.detach(), "dice_loss": dice.detach()}
        )

    def counted(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return the number of pixels of each image that are learned, which is 0 for an image that cannot be
        decoded."""
        return (self._truths(batch) != IGNORED).float().sum(dim=(1, 2))

    def _truths(self, batch: Batch) -> UInt8[Tensor, "b h w"]:
        assert batch.masks is not None, "the task checks that the data has masks"
        stride = self.task.loss_stride
        return batch.masks[:, ::stride, ::stride].where(batch.valid[:, None, None], IGNORED)


def at_pixels(maps: Float[Tensor, "b k rows columns"], size: tuple[int, int], stride: int) -> Float[Tensor, "b k h w"]:
    """Return maps at the centres of the pixels 0, `stride`, 2 `stride` and so on of an input of a height and width, by
    linear interpolation."""
    down, across = (
        (torch.arange(0, side, stride, dtype=maps.dtype, device=maps.device) + 0.5) * (2 / side) - 1 for side in size
    )
    grid = torch.stack([across.expand(len(down), -1), down[:, None].expand(-1, len(across))], dim=2)
    return F.grid_sample(
        maps, grid.expand(len(maps), -1, -1, -1), mode="bilinear", padding_mode="border", align_corners=False
    )


def dice_loss(logits: Float[Tensor, "b k h w"], truths: UInt8[Tensor, "b h w"]) -> Float[Tensor, " b"]:
    """Return 1 minus the Dice coefficient of each image, as a mean over the classes that it has. It is 0 for an image
    without known pixels."""
    known = (truths != IGNORED)[:, None]
    classes = torch.arange(logits.shape[1], device=logits.device)[:, None, None]
    true = (truths[:, None] == classes).to(logits.dtype)
    likely = logits.softmax(dim=1) * known
    areas = true.sum(dim=(2, 3))
    losses = 1 - (2 * (likely * true).sum(dim=(2, 3)) + 1) / (likely.sum(dim=(2, 3)) + areas + 1)
    present = areas > 0
    return (losses * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)


# Queries that predict masks (Mask2Former, 2112.01527, as EoMT, 2503.19108): each object, or each class of an image, is
# learned by one query, and the other queries learn "no object". Masks are compared at random points, most of which are
# those where the prediction is least certain.


CLASS_WEIGHT, ENTROPY_WEIGHT, DICE_WEIGHT = 2.0, 5.0, 5.0
"""Weights of the cross-entropy of classes, and of the cross-entropy and the Dice loss of masks."""

POINTS = 12_544
"""Number of points at which masks are compared."""

OVERSAMPLED = 3
"""Number of points from which the least certain ones are chosen, in units of `POINTS`."""

UNCERTAIN = 0.75
"""Fraction of the points that are the least certain ones. The others are random."""

POWER = 0.9
"""Exponent with which the probability of masked attention falls in the phase of a block."""


class QueryObjective(Objective):
    """The losses of the queries before each of the last blocks and after the last one.

    The masks are those of the objects of a batch with outlines, or else those of the classes of each image. The loss of
    classes is divided by the sum of the weights of all queries, and that of masks by the number of masks in all images,
    in all parts of a batch and in all processes. Queries attend only to the patches of their masks at first. One block
    after another is then trained without this, because predictions do not mask attention.
    """

    def __init__(self, network: nn.Module, task: Task) -> None:
        super().__init__(network)
        self.chances = (1.0,) * self.network.config.query_blocks

    def before_step(self, position: Position) -> None:
        self.chances = masking_chances(position.step / max(1, position.steps), len(self.chances))

    def forward(self, batch: Batch) -> LossOutput:
        """Return the losses of classes and of masks. To match queries and masks, this method waits for the device."""
        predictions = self.network.deep_outputs(batch.images, self.chances)
        height, width = batch.images.shape[2:]
        grid = self.network.config.grid_of(height, width)
        sums = torch.zeros(2, device=batch.images.device)
        for row, is_valid in enumerate(batch.valid):
            truth = segments_of(batch, row)
            for outputs in predictions:
                sums = sums + query_losses(outputs[row].float(), truth, grid) * is_valid
        losses = sums / self.counted(batch).sum(dim=0).clamp(min=1)
        class_part, mask_part = torch.diag(losses.detach())
        return LossOutput(losses, {"class_loss": class_part, "mask_loss": mask_part})

    def counted(self, batch: Batch) -> Float[Tensor, "b 2"]:
        """Return the sum of the weights of the queries of each image, and its number of masks. Both are 0 for an image
        that cannot be decoded."""
        if batch.masks is not None:
            counts = torch.stack([present_in(truth).sum() for truth in batch.masks])
        else:
            assert batch.box_labels is not None, "the task checks that the data has objects or masks"
            counts = (batch.box_labels >= 0).sum(dim=1)
        return token_amounts(counts, self.network.config.queries) * batch.valid[:, None]


def masking_chances(progress: float, blocks: int) -> tuple[float, ...]:
    """Return the probability of masked attention in each of the last blocks, at a fraction of the run.

    It falls from 1 to 0 in two of the 3 `blocks` + 3 parts of a run, one block after another with a part between.
    """
    part = progress * (3 * blocks + 3)
    return tuple((1 - min(max((part - 2 - 3 * block) / 2, 0), 1)) ** POWER for block in range(blocks))


def present_in(truth: UInt8[Tensor, "h w"]) -> Bool[Tensor, " 255"]:
    """Return True for each index of a class that a mask has."""
    return torch.bincount(truth.flatten().long(), minlength=IGNORED + 1)[:IGNORED] > 0


class Segments(NamedTuple):
    """The true masks of one image: those of its objects, or of its classes."""

    labels: Int64[Tensor, " m"]
    masks: Bool[Tensor, "m h w"]
    known: Bool[Tensor, "1 h w"]
    """False for pixels that do not count."""


def segments_of(batch: Batch, row: int) -> Segments:
    """Return the true masks of an image of a batch."""
    if batch.masks is not None:
        truth = batch.masks[row]
        labels = present_in(truth).nonzero()[:, 0]
        return Segments(labels, truth == labels[:, None, None], (truth != IGNORED)[None])
    assert batch.box_labels is not None and batch.outlines is not None, "the task reads the outlines"
    learned = (batch.box_labels[row] >= 0).nonzero()[:, 0]
    bits = (learned % 8).to(torch.uint8)[:, None, None]
    masks = (batch.outlines[row][learned // 8] >> bits) & 1 > 0
    return Segments(batch.box_labels[row][learned], masks, torch.ones_like(batch.images[row, :1], dtype=torch.bool))


def query_losses(
    outputs: Float[Tensor, "queries outputs"], truth: Segments, grid: tuple[int, int]
) -> Float[Tensor, " 2"]:
    """Return the loss of classes, as a sum over queries with the weights of `token_amounts`, and that of masks, as a
    sum over the masks of one image. `outputs` are those of a head of queries."""
    size = CELLS * grid[0], CELLS * grid[1]
    cells = math.prod(size)
    logits, masks = outputs[:, :-cells], outputs[:, -cells:].reshape(-1, *size)
    labels, true, known = truth.labels, truth.masks.to(masks.dtype), truth.known
    if not len(labels):
        nothing = labels.new_zeros(0)
        return torch.stack([CLASS_WEIGHT * class_loss(logits, nothing, nothing), masks.sum() * 0])
    with torch.no_grad():
        points = torch.rand(1, POINTS, 2, device=masks.device)
        costs = match_costs(at(masks, points), at(true, points), known_at(known, points))
        queries, found = match(costs - CLASS_WEIGHT * logits.softmax(dim=1)[:, labels])
        order = queries.argsort()  # as in the published code, so that masks have the same random points
        queries, found = queries[order], found[order]
    chosen, true = masks[queries], true[found]
    with torch.no_grad():
        points = uncertain_points(chosen)
        targets, counted = at(true, points), known_at(known, points)
    entropy, dice = mask_losses(at(chosen, points), targets, counted)
    mask_loss = ENTROPY_WEIGHT * entropy.sum() + DICE_WEIGHT * dice.sum()
    return torch.stack([CLASS_WEIGHT * class_loss(logits, queries, labels[found]), mask_loss])


def at(maps: Float[Tensor, "n h w"], points: Float[Tensor, "m points 2"]) -> Float[Tensor, "n points"]:
    """Return the values of maps at points (x, y), which are fractions of the input, by linear interpolation. All maps
    have the same points if m is 1, and one map has all points if n is 1."""
    count = max(len(maps), len(points))
    places = (2 * points - 1)[:, :, None].expand(count, -1, -1, -1)
    return F.grid_sample(maps.expand(count, -1, -1)[:, None], places, align_corners=False)[:, 0, :, 0]


def known_at(known: Bool[Tensor, "1 h w"], points: Float[Tensor, "m points 2"]) -> Bool[Tensor, "m points"]:
    """Return True for points (x, y) whose pixels have a class."""
    rows, columns = known.shape[1:]
    across, down = (points * points.new_tensor([columns, rows])).long().unbind(dim=2)
    return known[0, down.clamp(max=rows - 1), across.clamp(max=columns - 1)]


@torch.no_grad()
def uncertain_points(masks: Float[Tensor, "n h w"]) -> Float[Tensor, "n points 2"]:
    """Return random points for each mask, most of which are those whose logits are nearest to 0."""
    drawn = torch.rand(len(masks), OVERSAMPLED * POINTS, 2, device=masks.device)
    count = int(UNCERTAIN * POINTS)
    best = (-at(masks, drawn).abs()).topk(count, dim=1).indices
    others = torch.rand(len(masks), POINTS - count, 2, device=masks.device)
    return torch.cat([drawn.gather(1, best[:, :, None].expand(-1, -1, 2)), others], dim=1)


def match_costs(
    masks: Float[Tensor, "queries points"], true: Float[Tensor, "m points"], known: Bool[Tensor, "1 points"]
) -> Float[Tensor, "queries m"]:
    """Return the cross-entropy and the Dice loss of each pair of a predicted and a true mask, with their weights."""
    masks, true = masks[:, known[0]], true[:, known[0]]
    count = max(1, masks.shape[1])
    entropy = (F.softplus(masks).sum(dim=1, keepdim=True) - masks @ true.t()) / count
    likely = masks.sigmoid()
    dice = 1 - (2 * likely @ true.t() + 1) / (likely.sum(dim=1)[:, None] + true.sum(dim=1)[None] + 1)
    return ENTROPY_WEIGHT * entropy + DICE_WEIGHT * dice


def mask_losses(
    masks: Float[Tensor, "n points"], true: Float[Tensor, "n points"], known: Bool[Tensor, "n points"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the mean cross-entropy and the Dice loss of each mask over its known points."""
    entropy = F.binary_cross_entropy_with_logits(masks, true, reduction="none") * known
    likely, true = masks.sigmoid() * known, true * known
    dice = 1 - (2 * (likely * true).sum(dim=1) + 1) / (likely.sum(dim=1) + true.sum(dim=1) + 1)
    return entropy.sum(dim=1) / known.sum(dim=1).clamp(min=1), dice
