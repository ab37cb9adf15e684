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

from vitrail.data.augment.draws import symmetric_beta
from vitrail.data.augment.operations import box_mask, on_device
from vitrail.data.batch import Batch
from vitrail.errors import ConfigError

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
    if batch.target_kind == "numbers" and cutmix:
        raise ConfigError(
            f"cutmix={cutmix} pastes a part of another image, and its effect on a number is not defined; use mixup, "
            "which blends images and numbers alike, or set cutmix to 0"
        )
    if batch.targets is None and not classes:
        raise ConfigError("mixup and cutmix need the number of classes, or a batch with targets")
    weights = draws[:, 1:3]
    if mixup_per == "batch":
        weights = (draws[:1] if first is None else first)[:, 1:3].repeat(len(batch), 0)
    cut = draws[:, 0] < (0.5 if mixup and cutmix else float(bool(cutmix)))
    mixture = _Mixture(batch)
    if not cut.all():
        blended = np.flatnonzero(~cut)
        mixture.blend(blended, mixup_shares(weights[blended], mixup))
    if cut.any():
        pasted = np.flatnonzero(cut)
        mixture.paste(pasted, *cut_boxes(draws[pasted, 1:5], cutmix, *batch.images.shape[2:]))
    targets = _one_hot(batch.labels, classes) if batch.targets is None else batch.targets
    return replace(batch, images=mixture.images, targets=mixture.mixed(targets), valid=batch.counted)


class _Mixture:
    """The images of a batch while they are mixed with their partners, and the fraction that each image keeps of its
    target."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.device = batch.images.device
        self.views = batch.views_per_sample
        self.usable = batch.counted.roll(-self.views)
        """True for each image whose partner can be mixed in."""
        self.images = batch.images.clone()
        self.shares = torch.ones(len(batch), device=self.device)

    def blend(self, places: Int64[np.ndarray, " n"], weights: Int64[np.ndarray, " n"]) -> None:
        """Mix the images at these places by mixup. `weights` are in units of 1 / 65536."""
        index, partner = self._pairs(places)
        kept = torch.where(self.usable[index], on_device(weights, self.device), WHOLE)
        weight = kept.int()[:, None, None, None]
        own, other = self.batch.images[index].int(), self.batch.images[partner].int()
        self.images[index] = ((own * weight + other * (WHOLE - weight) + WHOLE // 2) >> 16).to(torch.uint8)
        self.shares[index] = kept.float() / WHOLE

    def paste(
        self,
        places: Int64[np.ndarray, " n"],
        rows: Bool[np.ndarray, "n h"],
        columns: Bool[np.ndarray, "n w"],
    ) -> None:
        """Mix the images at these places by CutMix: copy a box of rows and columns from the partner."""
        index, partner = self._pairs(places)
        taken = self.usable[index]
        mask = box_mask(rows, columns, self.device) & taken[:, None, None, None]
        self.images[index] = torch.where(mask, self.batch.images[partner], self.batch.images[index])
        area = on_device((rows.sum(1) * columns.sum(1)).astype(np.float32), self.device)
        self.shares[index] = 1 - area / (rows.shape[1] * columns.shape[1]) * taken

    def mixed(self, targets: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """Return the targets, mixed like the images."""
        share = self.shares[:, None]
        mixed = targets * share + targets.roll(-self.views, 0) * (1 - share)
        if self.batch.target_kind != "numbers":
            return mixed
        # 0 x NaN is NaN, so the NaN of a partner that is not mixed in would spread
        return torch.where(share == 1, targets, mixed)

    def _pairs(self, places: Int64[np.ndarray, " n"]) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Return the indices of images and of their partners, on the device."""
        partners = (places + self.views) % len(self.batch)
        return on_device(places, self.device), on_device(partners, self.device)


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
