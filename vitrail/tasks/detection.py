"""The task detection: boxes or masks, and classes, of the objects in an image.

A head of the kind "pyramid" predicts one box and the scores of all classes for each cell of its feature maps. Cells
learn from objects by task alignment (TOOD, 2108.07755): the best cells of an object are those whose score and whose
box both fit it already, and the score that they learn is the quality of their box. Detection tokens have the losses of
`set_loss`, and queries, which learn the outlines of objects, those of `mask_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.evaluation.detection import ByDetection
from vitrail.evaluation.evaluators import Evaluator
from vitrail.models.heads.pyramid import cells_of, overlaps
from vitrail.models.variants import AnyConfig
from vitrail.registry import Registry
from vitrail.settings import setting
from vitrail.tasks.dense_objective import DenseObjective, DenseTask
from vitrail.tasks.task import LossOutput, Objective, TaskMetric

SCORE_POWER, OVERLAP_POWER = 1.0, 6.0
"""Exponents of the score and of the intersection over union in the alignment of a cell with an object (TOOD)."""

FOCUS = 2.0
"""Exponent by which scores that are nearly right count less (quality focal loss, 2006.04388)."""


@dataclass(frozen=True, kw_only=True)
class Detection(DenseTask):
    """Find objects: their classes, and their boxes or masks."""

    name = "detection"
    targets = ("boxes",)
    targets_noun = "boxes of objects"
    output = "boxes"
    objectives = Registry[Callable[[nn.Module, Any], Objective]](
        {
            "pyramid": "vitrail.tasks.detection:DetectionObjective",
            "detection-tokens": "vitrail.tasks.set_loss:SetObjective",
            "queries": "vitrail.tasks.mask_loss:QueryObjective",
        }
    )
    head_kinds = tuple(objectives)
    unread = MappingProxyType(
        {"detection-tokens": ("cells_per_object",), "queries": ("cells_per_object", "box_weight")}
    )
    metrics = (
        TaskMetric("average_precision", is_fraction=True, label="AP"),
        TaskMetric("average_precision_50", is_fraction=True, label="AP50"),
        TaskMetric("average_precision_75", is_fraction=True, label="AP75"),
        TaskMetric("score_threshold", label="score threshold"),
    )
    loss_metric = "average_precision"

    box_weight: float = setting(2.0, above=0, below=math.inf)
    """Weight of the overlap of boxes in the loss, beside that of classes."""
    cells_per_object: int = setting(13, least=1)
    """Number of cells that learn from an object. Only heads of the kind "pyramid" have cells."""

    def reads_outlines(self, network: AnyConfig | None) -> bool:
        return getattr(network, "head_kind", None) == "queries"

    def evaluator(self, objective: Objective) -> Evaluator:
        return ByDetection(bootstrap=0)


class DetectionObjective(DenseObjective):
    """The losses of a dense head, summed over all cells and divided by the number of objects and images.

    The loss of the classes is the quality focal loss of all cells, and that of the boxes the generalised intersection
    over union (1902.09630) of those that learn from an object. Cells of objects that are neither learned nor wrong to
    find, such as crowds, have no loss.
    """

    def forward(self, batch: Batch) -> LossOutput:
        assert batch.boxes is not None and batch.box_labels is not None, "the task checks that the data has boxes"
        outputs = self.outputs(batch.images)
        height, width = batch.images.shape[2:]
        truths = batch.boxes / batch.boxes.new_tensor([width, height, width, height])
        places, _ = cells_of(self.network.config.grid_of(height, width), outputs.device)
        boxes, logits = outputs[..., :4], outputs[..., 4:]
        class_loss = box_loss = outputs.new_zeros(())
        for row in range(len(outputs)):
            learned = assign(boxes[row], logits[row].sigmoid(), places, truths[row], batch.box_labels[row], self.task)
            wrong = focal(logits[row], learned.scores) * learned.counted[:, None]
            class_loss = class_loss + wrong.sum() * batch.valid[row]
            misplaced = giou_loss(boxes[row], learned.boxes) * learned.quality
            box_loss = box_loss + misplaced.sum() * batch.valid[row]
        amounts = self.counted(batch).sum().clamp(min=1)
        loss = (class_loss + self.task.box_weight * box_loss) / amounts
        return LossOutput(
            loss,
            {"class_loss": class_loss.detach() / amounts, "box_loss": box_loss.detach() / amounts},
        )

    def counted(self, batch: Batch) -> Float[Tensor, " b"]:
        """Return the number of objects of each image plus one, and 0 for an image that cannot be decoded."""
        assert batch.box_labels is not None
        return batch.valid * (1.0 + (batch.box_labels >= 0).sum(dim=1))


class Assigned(NamedTuple):
    """The targets of the cells of an image."""

    scores: Float[Tensor, "cells classes"]
    boxes: Float[Tensor, "cells 4"]
    """The box of each cell that learns from an object."""
    quality: Float[Tensor, " cells"]
    """Weight of the box of each cell: 0 for a cell that learns from no object."""
    counted: Bool[Tensor, " cells"]
    """False for cells whose scores have no loss."""


@torch.no_grad()
def assign(
    boxes: Float[Tensor, "cells 4"],
    scores: Float[Tensor, "cells classes"],
    places: Float[Tensor, "cells 2"],
    truths: Float[Tensor, "m 4"],
    labels: Int64[Tensor, " m"],
    task: Detection,
) -> Assigned:
    """Return what the cells of one image learn, from the boxes and scores that they predict now.

    All boxes are fractions of the input. `places` are the centres of the cells. `labels` has -1 where there is no
    object and -2 for an object that is not learned (`Batch.box_labels`).
    """
    count = len(boxes)
    truths, ignored = truths[labels >= 0], truths[labels == -2]
    labels = labels[labels >= 0]
    counted = ~_inside(places, ignored).any(dim=0)
    learned = torch.zeros_like(scores)
    if not len(labels):
        return Assigned(learned, boxes, boxes.new_zeros(count), counted)
    found = overlaps(truths, boxes)  # m cells
    alignment = scores.t()[labels].clamp(min=1e-9) ** SCORE_POWER * found.clamp(min=1e-3) ** OVERLAP_POWER
    inside = _inside(places, truths)
    # An object that contains no centre of a cell is learned by the cell that is nearest to it.
    distance = (places[None] - (truths[:, None, :2] + truths[:, None, 2:]) / 2).square().sum(dim=2)
    inside[torch.arange(len(labels)), distance.argmin(dim=1)] = True
    alignment = alignment * inside
    best = alignment.topk(min(task.cells_per_object, count), dim=1).indices
    chosen = torch.zeros_like(inside).scatter_(1, best, value=True) & inside
    owner = found.masked_fill(~chosen, -1).argmax(dim=0)  # an overlap of several objects goes to the best fitting one
    chosen &= owner[None] == torch.arange(len(labels), device=owner.device)[:, None]
    alignment = alignment * chosen
    most, fit = alignment.amax(dim=1, keepdim=True).clamp(min=1e-30), (found * chosen).amax(dim=1, keepdim=True)
    quality = (alignment / most * fit).sum(dim=0)
    takes = chosen.any(dim=0)
    learned[takes, labels[owner[takes]]] = quality[takes]
    return Assigned(learned, torch.where(takes[:, None], truths[owner], boxes), quality, counted | takes)


def focal(logits: Float[Tensor, "n classes"], targets: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
    """Return the quality focal loss of each logit, whose target is a quality in [0, 1]."""
    weight = (logits.sigmoid() - targets).abs() ** FOCUS
    return weight * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def _inside(places: Float[Tensor, "cells 2"], boxes: Float[Tensor, "m 4"]) -> Bool[Tensor, "m cells"]:
    return ((places[None] > boxes[:, None, :2]) & (places[None] < boxes[:, None, 2:])).all(dim=2)


def giou_loss(first: Float[Tensor, "n 4"], second: Float[Tensor, "n 4"]) -> Float[Tensor, " n"]:
    """Return 1 minus the generalised intersection over union (1902.09630) of the boxes of each row. Boxes without an
    area are allowed."""
    areas = [(each[:, 2:] - each[:, :2]).clamp(min=0).prod(dim=1) for each in (first, second)]
    ends, starts = torch.minimum(first[:, 2:], second[:, 2:]), torch.maximum(first[:, :2], second[:, :2])
    common = (ends - starts).clamp(min=0).prod(dim=1)
    union = areas[0] + areas[1] - common
    outer = (torch.maximum(first[:, 2:], second[:, 2:]) - torch.minimum(first[:, :2], second[:, :2])).prod(dim=1)
    return 1 - common / union.clamp(min=1e-12) + (outer - union) / outer.clamp(min=1e-12)
