"""The loss of detection tokens: each object is learned by one token, and the other tokens learn "no object".

Tokens and objects are matched so that the sum of their costs is smallest (DETR, 2005.12872, as YOLOS, 2106.00666). The
loss of queries matches them in the same way.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.tasks.detection import Detection, giou_loss
from vitrail.tasks.task import LossOutput, Objective

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
