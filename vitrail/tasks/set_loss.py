"""The loss of detection tokens: each object is learned by one token, and the other tokens learn "no object".

Tokens and objects are matched so that the sum of their costs is smallest (DETR, 2005.12872, as YOLOS, 2106.00666).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.tasks.detection import Detection, giou_loss
from vitrail.tasks.matching import match
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
            sums = sums + torch.stack(both) * batch.valid[row]
        losses = sums / self.counted(batch).sum(dim=0).clamp(min=1)
        class_loss, box_loss = torch.diag(losses.detach())
        return LossOutput(losses, {"class_loss": class_loss, "box_loss": box_loss / self.task.box_weight})

    def counted(self, batch: Batch) -> Float[Tensor, "b 2"]:
        """Return the sum of the weights of the tokens of each image, and its number of objects. Both are 0 for an image
        that cannot be decoded."""
        assert batch.box_labels is not None
        objects = (batch.box_labels >= 0).sum(dim=1)
        return token_amounts(objects, self.network.config.registers) * batch.valid[:, None]


class SetLosses(NamedTuple):
    """The losses of one image, as sums over tokens and over objects."""

    classes: Float[Tensor, ""]
    """In units of `NO_OBJECT`, so that a token without an object has the weight 1."""
    boxes: Float[Tensor, ""]


def set_losses(
    outputs: Float[Tensor, "tokens outputs"],
    truths: Float[Tensor, "m 4"],
    labels: Int64[Tensor, " m"],
    box_weight: float,
) -> SetLosses:
    """Return the losses of one image from its true objects, whose boxes are fractions of the input."""
    boxes, logits = outputs[:, :4], outputs[:, 4:]
    with torch.no_grad():
        pairs = boxes.repeat_interleave(len(truths), dim=0), truths.repeat(len(boxes), 1)
        costs = box_losses(*pairs, box_weight).view(len(boxes), len(truths)) - logits.softmax(dim=1)[:, labels]
    tokens, objects = match(costs)
    return SetLosses(
        class_loss(logits, tokens, labels[objects]), box_losses(boxes[tokens], truths[objects], box_weight).sum()
    )


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
