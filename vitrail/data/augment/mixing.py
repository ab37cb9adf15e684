"""Mixup and CutMix: an image and its target become a mixture of two samples of the batch.

The partner of a sample is the next sample of the batch. The partner of the last sample is the first sample. A view is
mixed with the same view of the partner. The partner depends on the batch, but the mixing weight and the CutMix box
depend only on the sample, unless one mixup weight is drawn for the whole batch. The rule of timm is different: the
partners are the batch in reverse order, and all samples have the same method, weight and box.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from vitrail.data.augment.draws import symmetric_beta
from vitrail.data.augment.operations import box_mask, on_device
from vitrail.data.batch import Batch
from vitrail.errors import ConfigError

MixupPer = Literal["sample", "batch", "timm-batch"]

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

    If `mixup_per` is "timm-batch", the first row determines everything for the whole batch, as in timm (DeiT, MAE,
    BEiT). The weight of an image can then be the smaller one, images are not rounded, and each process mixes its own
    samples.

    Raise `ConfigError` if the batch has no targets and `classes` is missing, or if CutMix is on for regression.
    """
    if batch.target_kind == "numbers" and cutmix:
        raise ConfigError(
            f"cutmix={cutmix} pastes a part of another image, and its effect on a number is not defined; use mixup, "
            "which blends images and numbers alike, or set cutmix to 0"
        )
    if batch.targets is None and not classes:
        raise ConfigError("mixup and cutmix need the number of classes, or a batch with targets")
    as_timm = mixup_per == "timm-batch"
    if as_timm:
        batch = batch.without_partners()
        batch = replace(batch, images=batch.images.float())
        draws = draws[:1].repeat(len(batch), 0)
    weights = draws[:, 1:3]
    if mixup_per == "batch":
        weights = (draws[:1] if first is None else first)[:, 1:3].repeat(len(batch), 0)
    cut = draws[:, 0] < (0.5 if mixup and cutmix else float(bool(cutmix)))
    mixture = _Mixture(batch, is_reversed=as_timm)
    if not cut.all():
        blended = np.flatnonzero(~cut)
        mixture.blend(blended, mixup_shares(weights[blended], mixup, keep_larger=not as_timm))
    if cut.any():
        pasted = np.flatnonzero(cut)
        mixture.paste(pasted, *cut_boxes(draws[pasted, 1:5], cutmix, *batch.images.shape[2:], even=as_timm))
    targets = batch.targets
    if targets is None:  # `F.one_hot` checks the range of the labels, for which the CPU has to wait for the device
        targets = (batch.labels.clamp(min=0)[:, None] == torch.arange(classes, device=batch.labels.device)).float()
    return replace(batch, images=mixture.images, targets=mixture.mixed(targets), valid=batch.counted)


class _Mixture:
    """The images of a batch while they are mixed with their partners, and the fraction that each image keeps of its
    target."""

    def __init__(self, batch: Batch, *, is_reversed: bool) -> None:
        self.batch = batch
        self.device = batch.images.device
        rows, views = np.arange(len(batch)), batch.views_per_sample
        self.partners = rows.reshape(-1, views)[::-1].flatten() if is_reversed else np.roll(rows, -views)
        self.usable = batch.counted[on_device(self.partners, self.device)]
        """True for each image whose partner can be mixed in."""
        self.images = batch.images.clone()
        self.shares = torch.ones(len(batch), device=self.device)

    def blend(self, places: Int64[np.ndarray, " n"], weights: Float64[np.ndarray, " n"]) -> None:
        """Mix the images at these places by mixup. Images of whole levels are mixed in units of 1 / 65536."""
        index, partner = self._pairs(places)
        usable, own, other = self.usable[index], self.batch.images[index], self.batch.images[partner]
        if self.images.dtype == torch.float32:
            share = torch.where(usable, on_device(weights.astype(np.float32), self.device), 1)
            self.images[index] = torch.lerp(other, own, share[:, None, None, None])
        else:
            whole = on_device(np.rint(weights * WHOLE).astype(np.int64), self.device)
            kept = torch.where(usable, whole, WHOLE).int()[:, None, None, None]
            self.images[index] = ((own.int() * kept + other.int() * (WHOLE - kept) + WHOLE // 2) >> 16).to(torch.uint8)
            share = kept.flatten().float() / WHOLE
        self.shares[index] = share

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
        self.images[index] = torch.where(mask, self.batch.images[partner], self.batch.images[index]).to(
            self.images.dtype
        )
        area = on_device((rows.sum(1) * columns.sum(1)).astype(np.float32), self.device)
        self.shares[index] = 1 - area / (rows.shape[1] * columns.shape[1]) * taken

    def mixed(self, targets: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """Return the targets, mixed like the images."""
        share = self.shares[:, None]
        mixed = targets * share + targets[on_device(self.partners, self.device)] * (1 - share)
        if self.batch.target_kind != "numbers":
            return mixed
        # 0 x NaN is NaN, so the NaN of a partner that is not mixed in would spread
        return torch.where(share == 1, targets, mixed)

    def _pairs(self, places: Int64[np.ndarray, " n"]) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Return the indices of images and of their partners, on the device."""
        return on_device(places, self.device), on_device(self.partners[places], self.device)


def mixup_shares(
    uniform: Float32[np.ndarray, "n 2"], alpha: float, *, keep_larger: bool = True
) -> Float64[np.ndarray, " n"]:
    """Return the weight of each image in its mixture: x from Beta(alpha, alpha), or max(x, 1 - x) with `keep_larger`.

    With `keep_larger`, the image has the larger weight and its partner the smaller one, as in big_vision. This does not
    change the method, because labels are mixed with the same weights.
    """
    share = symmetric_beta(uniform, alpha)
    return np.maximum(share, 1 - share) if keep_larger else share


def cut_boxes(
    uniform: Float32[np.ndarray, "n 4"], alpha: float, height: int, width: int, *, even: bool = False
) -> tuple[Bool[np.ndarray, "n h"], Bool[np.ndarray, "n w"]]:
    """Return masks of the rows and of the columns of the CutMix boxes, which are copied from the partner (1905.04899).

    A box has the aspect ratio of the image. Its area is the fraction 1 - lambda of the image's area, with lambda from
    Beta(alpha, alpha). The centre of the box is uniform in the image. The box is clipped to the image. With
    `even`, an odd side of a box is one pixel shorter, as in timm.
    """
    side_share = np.sqrt(1 - symmetric_beta(uniform[:, :2], alpha))
    inside = []
    for number, side in enumerate((height, width)):
        length = (side_share * side).astype(np.int64)
        length -= length % 2 if even else 0
        first = ((uniform[:, 2 + number] * side).astype(np.int64) - length // 2)[:, None]
        inside.append((np.arange(side) >= first) & (np.arange(side) < first + length[:, None]))
    return inside[0], inside[1]
