"""Mixup and CutMix: an image and its target become a mixture of two samples of the batch.

The partner of a sample is the next sample of the batch. The partner of the last sample is the first sample. A view is
mixed with the same view of the partner. The partner depends on the batch, but the mixing weight and the CutMix box
depend only on the sample, unless one mixup weight is drawn for the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from vitrail.data.augmentation.draws import symmetric_beta
from vitrail.data.augmentation.operations import box_mask, on_device
from vitrail.data.batch import Batch
from vitrail.errors import ConfigError

__all__ = ["DRAWS", "MixupPer", "cut_boxes", "mix", "mixup_shares"]

MixupPer = Literal["sample", "batch"]

DRAWS = 5
"""Random numbers per image: one chooses mixup or CutMix, two give the mixing weight, and two give the centre of the
CutMix box (y, x)."""

WHOLE = 1 << 16
"""Denominator of the mixing weights. Integer weights make mixing exact."""


def mix(
    batch: Batch,
    draws: Float32[np.ndarray, "b 5"],
    *,
    mixup: float,
    cutmix: float,
    classes: int,
    mixup_per: MixupPer = "sample",
    first: Float32[np.ndarray, "1 5"] | None = None,
) -> Batch:
    """Return the batch with each sample mixed with the next one, and with `targets` that hold the amount of each class.

    `mixup` and `cutmix` are the values of alpha; 0 turns a method off. If both are on, a random number chooses the
    method for each image. Images are rounded to uint8. If the batch has no targets, they are made from the labels, with
    `classes` columns. A partner that could not be decoded or has no target is not mixed in. For regression, mixup mixes
    the target numbers with the same weights as the images. If `mixup_per` is "batch", the random numbers of the first
    row determine one mixup weight for the whole batch, as in big_vision. CutMix still has one weight per sample. If
    several processes share a batch, `first` has the random numbers of the batch's first row.

    Raise `ConfigError` if the batch has no targets and `classes` is missing, or if CutMix is on for regression.
    """
    views = batch.views_per_sample
    if batch.target_kind == "numbers" and cutmix:
        raise ConfigError(
            f"cutmix={cutmix} pastes a part of another image, and no rule says how that changes a number; use mixup, "
            "which blends images and numbers alike, or set cutmix to 0"
        )
    if batch.targets is None and not classes:
        raise ConfigError("mixup and cutmix need the number of classes, or a batch with targets")
    weights = draws[:, 1:3]
    if mixup_per == "batch":
        weights = (draws[:1] if first is None else first)[:, 1:3].repeat(len(batch), 0)
    cut = draws[:, 0] < (0.5 if mixup and cutmix else float(bool(cutmix)))
    device, (height, width) = batch.images.device, batch.images.shape[2:]
    usable = batch.counted.roll(-views)
    targets = _one_hot(batch.labels, classes) if batch.targets is None else batch.targets

    images, shares = batch.images.clone(), torch.ones(len(batch), device=device)
    if not cut.all():
        places = np.flatnonzero(~cut)
        index, partner = on_device(places, device), on_device((places + views) % len(batch), device)
        kept = on_device(mixup_shares(weights[places], mixup), device)
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
    if batch.target_kind == "numbers":  # 0 x NaN is NaN, so the NaN of a partner that is not mixed in would spread
        mixed = torch.where(share == 1, targets, mixed)
    return replace(batch, images=images, targets=mixed, valid=batch.counted)


def mixup_shares(uniform: Float32[np.ndarray, "n 2"], alpha: float) -> Int64[np.ndarray, " n"]:
    """Return the weight of each image in its mixture, in units of 1 / 65536: max(x, 1 - x) with x from Beta(alpha,
    alpha).

    The image has the larger weight and its partner the smaller one, as in big_vision. This does not change the method,
    because labels are mixed with the same weights.
    """
    share = symmetric_beta(uniform, alpha)
    return np.rint(np.maximum(share, 1 - share) * WHOLE).astype(np.int64)


def cut_boxes(
    uniform: Float32[np.ndarray, "n 4"], alpha: float, height: int, width: int
) -> tuple[Bool[np.ndarray, "n h"], Bool[np.ndarray, "n w"]]:
    """Return masks of the rows and of the columns of the CutMix boxes, which are copied from the partner (1905.04899).

    A box has the aspect ratio of the image. Its area is the fraction 1 - lambda of the image's area, with lambda from
    Beta(alpha, alpha). The centre of the box is uniform in the image. The box is clipped to the image.
    """
    side_share = np.sqrt(1 - symmetric_beta(uniform[:, :2], alpha))
    inside = []
    for number, side in enumerate((height, width)):
        length = (side_share * side).astype(np.int64)
        first = ((uniform[:, 2 + number] * side).astype(np.int64) - length // 2)[:, None]
        inside.append((np.arange(side) >= first) & (np.arange(side) < first + length[:, None]))
    return inside[0], inside[1]


def _one_hot(labels: Int64[Tensor, " b"], classes: int) -> Float[Tensor, "b classes"]:
    """Return the labels as one-hot vectors. The range of the labels is not checked, because the CPU would have to wait
    for the device."""
    targets = torch.zeros(len(labels), classes, device=labels.device)
    return targets.scatter_(1, labels.clamp(min=0)[:, None], 1.0)
