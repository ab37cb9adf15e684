"""The task detection: boxes or masks, and classes, of the objects in an image.

A head of the kind "pyramid" predicts one box and the scores of all classes for each cell of its feature maps. Cells
learn from objects by task alignment (TOOD, 2108.07755): the best cells of an object are those whose score and whose
box both fit it already, and the score that they learn is the quality of their box. Detection tokens have the losses of
`SetObjective`, and queries, which learn the outlines of objects, those of `segmentation.QueryObjective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.evaluation.detection import ByDetection
from vitrail.evaluation.evaluators import Evaluator
from vitrail.models.heads.boxes import cells_of, overlaps
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
            "detection-tokens": "vitrail.tasks.detection:SetObjective",
            "queries": "vitrail.tasks.segmentation:QueryObjective",
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

    box_weight: float = setting(2.0, above=0)
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


# Detection tokens: each object is learned by one token, and the other tokens learn "no object". Tokens and objects are
# matched so that the sum of their costs is smallest (DETR, 2005.12872, as YOLOS, 2106.00666). The loss of queries
# matches them in the same way.


NO_OBJECT = 0.1
"""Weight of a token without an object in the loss of classes."""

SIDES = 2.5
"""Weight of the distance between centres and sizes of boxes beside that of their overlap: 5 and 2 in the
publications."""


class SetObjective(Objective):
    """The cross-entropy of the classes of all tokens, and the distance and the generalised intersection over union
    (1902.09630) of the boxes of those that learn an object.

    The first loss is divided by the sum of the weights of all tokens, and the others by the number of objects, in all
    parts of a batch and in all processes. Crowds and objects that are hardly seen are not learned.
    """

    def __init__(self, network: nn.Module, task: Detection) -> None:
        super().__init__(network)
        self.task = task

    def forward(self, batch: Batch) -> LossOutput:
        """Return the losses of classes and of boxes. To match tokens and objects, this method waits for the device."""
        assert batch.boxes is not None and batch.box_labels is not None, "the task checks that the data has boxes"
        outputs = self.network(batch.images).float()
        height, width = batch.images.shape[2:]
        truths = batch.boxes / batch.boxes.new_tensor([width, height, width, height])
        sums = torch.zeros(2, device=outputs.device)
        for row, labels in enumerate(batch.box_labels):
            learned = labels >= 0
            both = set_losses(outputs[row], truths[row][learned], labels[learned], self.task.box_weight)
            sums = sums + both * batch.valid[row]
        losses = sums / self.counted(batch).sum(dim=0).clamp(min=1)
        class_loss, box_loss = torch.diag(losses.detach())
        return LossOutput(losses, {"class_loss": class_loss, "box_loss": box_loss / self.task.box_weight})

    def counted(self, batch: Batch) -> Float[Tensor, "b 2"]:
        """Return the sum of the weights of the tokens of each image, and its number of objects. Both are 0 for an image
        that cannot be decoded."""
        assert batch.box_labels is not None
        objects = (batch.box_labels >= 0).sum(dim=1)
        return token_amounts(objects, self.network.config.registers) * batch.valid[:, None]


def set_losses(
    outputs: Float[Tensor, "tokens outputs"],
    truths: Float[Tensor, "m 4"],
    labels: Int64[Tensor, " m"],
    box_weight: float,
) -> Float[Tensor, " 2"]:
    """Return the loss of classes, as a sum over tokens with the weights of `token_amounts`, and that of boxes, as a sum
    over objects, of one image. Its true boxes are fractions of the input."""
    boxes, logits = outputs[:, :4], outputs[:, 4:]
    with torch.no_grad():
        pairs = boxes.repeat_interleave(len(truths), dim=0), truths.repeat(len(boxes), 1)
        costs = box_losses(*pairs, box_weight).view(len(boxes), len(truths)) - logits.softmax(dim=1)[:, labels]
    tokens, objects = match(costs)
    matched_boxes = box_losses(boxes[tokens], truths[objects], box_weight)
    return torch.stack([class_loss(logits, tokens, labels[objects]), matched_boxes.sum()])


def token_amounts(objects: Int64[Tensor, " b"], tokens: int) -> Float[Tensor, "b 2"]:
    """Return the sum of the weights of the tokens of each image, in units of `NO_OBJECT`, and its number of objects."""
    weights = tokens + objects.clamp(max=tokens) * (1 / NO_OBJECT - 1)
    return torch.stack([weights, objects.to(weights.dtype)], dim=1)


def class_loss(
    logits: Float[Tensor, "tokens classes"], matched: Int64[Tensor, " k"], labels: Int64[Tensor, " k"]
) -> Float[Tensor, ""]:
    """Return the cross-entropy of the classes of an image's tokens, as a sum with the weights of `token_amounts`. The
    last class is "no object", which the tokens learn that are not `matched`."""
    nothing = logits.shape[1] - 1
    targets = torch.full_like(logits[:, 0], nothing, dtype=torch.int64)
    targets[matched] = labels
    weights = torch.where(targets == nothing, 1.0, 1 / NO_OBJECT)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def box_losses(first: Float[Tensor, "n 4"], second: Float[Tensor, "n 4"], weight: float) -> Float[Tensor, " n"]:
    """Return the loss of the boxes of each row. `weight` is that of their overlap."""
    centres = (first[:, :2] + first[:, 2:] - second[:, :2] - second[:, 2:]).abs().sum(dim=1) / 2
    sizes = (first[:, 2:] - first[:, :2] - second[:, 2:] + second[:, :2]).abs().sum(dim=1)
    return weight * (SIDES * (centres + sizes) + giou_loss(first, second))


# The matching of predictions and objects with the smallest sum of costs (the assignment problem).


WORST = 1e9
"""Cost of a pair whose cost is not finite, so that it is matched only if no other pair is left."""


def match(costs: Float[Tensor, "n m"]) -> tuple[Int64[Tensor, " k"], Int64[Tensor, " k"]]:
    """Return the rows and the columns of the min(n, m) pairs with the smallest sum of costs. No row and no column is
    in two pairs.

    Rows are matched one after another by shortest augmenting paths (Jonker and Volgenant, 1987), as
    `scipy.optimize.linear_sum_assignment` does. The costs are read on the CPU, so this function waits for the device.
    """
    table = np.nan_to_num(costs.detach().cpu().double().numpy(), nan=WORST, posinf=WORST, neginf=WORST)
    is_tall = table.shape[0] > table.shape[1]
    columns = _columns(table.T if is_tall else table)
    pairs = torch.from_numpy(np.stack([np.arange(len(columns)), columns])).to(costs.device)
    return (pairs[1], pairs[0]) if is_tall else (pairs[0], pairs[1])


def _columns(table: Float[np.ndarray, "n m"]) -> Int64[np.ndarray, " n"]:
    """Return the column of each row. There are at least as many columns as rows."""
    rows, count = table.shape
    prices, values = np.zeros(rows), np.zeros(count)  # of rows and columns: no cost is below the sum of both
    column_of, row_of = np.full(rows, -1), np.full(count, -1)
    for start in range(rows):
        distances, before, is_done = np.full(count, np.inf), np.full(count, -1), np.zeros(count, bool)
        row, lowest = start, 0.0
        while True:  # the shortest path from `start` to a column without a row
            reached = np.where(is_done, np.inf, lowest + table[row] - prices[row] - values)
            before[reached < distances] = row
            distances = np.minimum(distances, reached)
            column = int(np.where(is_done, np.inf, distances).argmin())
            lowest, is_done[column] = distances[column], True
            if row_of[column] < 0:
                break
            row = row_of[column]
        others = is_done & (row_of >= 0)
        prices[start] += lowest
        prices[row_of[others]] += lowest - distances[others]
        values[others] -= lowest - distances[others]
        row = -1
        while row != start:  # every row on the path takes the column after it
            row = before[column]
            row_of[column] = row
            column, column_of[row] = column_of[row], column
    return column_of
