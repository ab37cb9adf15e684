"""Mixup and CutMix: an image and its target become a mixture of two samples of the batch.

The partner of a sample is the next sample of the batch, and that of the last sample is the first. A view is mixed with
the same view of the partner. The partner depends on the batch; how much of it is taken, and which part, depends on the
sample alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from vitrail.data.augmentation.draws import symmetric_beta
from vitrail.data.augmentation.operations import box_mask, on_device
from vitrail.data.pipeline import Batch
from vitrail.errors import ConfigError

__all__ = ["DRAWS", "cut_boxes", "mix", "mixup_shares"]

DRAWS = 5
"""Numbers in [0, 1) per image: one chooses mixup or CutMix, two give the amount, two the centre of the box (y, x)."""

WHOLE = 1 << 16
"""Amounts are multiples of 1 / WHOLE, so that mixing is exact in integers."""


def mix(batch: Batch, draws: Float32[np.ndarray, "b 5"], *, mixup: float, cutmix: float, classes: int) -> Batch:
    """Return the batch mixed with itself, moved by one sample, with `targets` that hold the amount of each class.

    `mixup` and `cutmix` are the alpha of each; 0 turns it off. With both, each image draws which one it gets. Images
    stay uint8, rounded. If the batch has no targets, they are made from the labels, with `classes` columns. A partner
    that could not be decoded, or of which nothing is known, is not mixed in. Mixup blends numbers as it blends images.
    Raise `ConfigError` without targets and classes, and for CutMix of numbers.
    """
    views = batch.views_per_sample
    if batch.target_kind == "numbers" and cutmix:
        raise ConfigError(
            f"cutmix={cutmix} pastes a part of another image, and no rule says how that changes a number; use mixup, "
            "which blends images and numbers alike, or set cutmix to 0"
        )
    if batch.targets is None and not classes:
        raise ConfigError("mixup and cutmix need the number of classes, or a batch with targets")
    cut = draws[:, 0] < (0.5 if mixup and cutmix else float(bool(cutmix)))
    device, (height, width) = batch.images.device, batch.images.shape[2:]
    usable = batch.counted.roll(-views)
    targets = _one_hot(batch.labels, classes) if batch.targets is None else batch.targets

    images, shares = batch.images.clone(), torch.ones(len(batch), device=device)
    if not cut.all():
        places = np.flatnonzero(~cut)
        index, partner = on_device(places, device), on_device((places + views) % len(batch), device)
        kept = on_device(mixup_shares(draws[places, 1:3], mixup), device)
        kept = torch.where(usable[index], kept, WHOLE)
        weight = kept.int()[:, None, None, None]
        own, other = batch.images[index].int(), batch.images[partner].int()
        images[index] = ((own * weight + other * (WHOLE - weight) + WHOLE // 2) >> 16).to(torch.uint8)
        shares[index] = kept.float() / WHOLE
    if cut.any():
        places = np.flatnonzero(cut)
        index, partner = on_device(places, device), on_device((places + views) % len(batch), device)
        rows, columns = cut_boxes(draws[places, 1:5], cutmix, height, width)
        taken = usable[index]
        mask = box_mask(rows, columns, device) & taken[:, None, None, None]
        images[index] = torch.where(mask, batch.images[partner], batch.images[index])
        area = (rows.sum(1) * columns.sum(1)).astype(np.float32)
        shares[index] = 1 - on_device(area, device) / (height * width) * taken
    share = shares[:, None]
    mixed = targets * share + targets.roll(-views, 0) * (1 - share)
    if batch.target_kind == "numbers":  # an unknown number of a partner that is not mixed in must not spread
        mixed = torch.where(share == 1, targets, mixed)
    return replace(batch, images=images, targets=mixed, valid=batch.counted)


def mixup_shares(uniform: Float32[np.ndarray, "n 2"], alpha: float) -> Int64[np.ndarray, " n"]:
    """Return how much each image keeps of itself, in units of 1 / 65536: the larger of x and 1 - x, x from Beta.

    The image itself keeps the larger part, as in big_vision. This makes no other difference, because labels are mixed
    alike.
    """
    share = symmetric_beta(uniform, alpha)
    return np.rint(np.maximum(share, 1 - share) * WHOLE).astype(np.int64)


def cut_boxes(
    uniform: Float32[np.ndarray, "n 4"], alpha: float, height: int, width: int
) -> tuple[Bool[np.ndarray, "n h"], Bool[np.ndarray, "n w"]]:
    """Return the rows and columns of the boxes that come from the partner (CutMix, 1905.04899).

    A box has the image's shape and 1 - lambda of its area, with lambda from Beta(alpha, alpha). Its centre is uniform,
    and the part outside the image is lost.
    """
    side_share = np.sqrt(1 - symmetric_beta(uniform[:, :2], alpha))
    inside = []
    for number, side in enumerate((height, width)):
        length = (side_share * side).astype(np.int64)
        first = ((uniform[:, 2 + number] * side).astype(np.int64) - length // 2)[:, None]
        inside.append((np.arange(side) >= first) & (np.arange(side) < first + length[:, None]))
    return inside[0], inside[1]


def _one_hot(labels: Int64[Tensor, " b"], classes: int) -> Float[Tensor, "b classes"]:
    """Return the labels as amounts of each class. Their range is not checked, because the CPU would have to wait."""
    targets = torch.zeros(len(labels), classes, device=labels.device)
    return targets.scatter_(1, labels.clamp(min=0)[:, None], 1.0)
