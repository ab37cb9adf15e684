"""The task segmentation: a class for every pixel, which a head learns by the cross-entropy of the known pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.objects import IGNORED
from vitrail.data.splits import Splits, one_class
from vitrail.errors import DataError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.segmentation import ByMasks
from vitrail.registry import Registry
from vitrail.settings import setting
from vitrail.tasks.dense_objective import DenseObjective, DenseTask
from vitrail.tasks.task import LossOutput, Objective, TaskMetric


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
            "queries": "vitrail.tasks.mask_loss:QueryObjective",
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
