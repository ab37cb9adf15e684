"""Random changes to a training batch, made all at once on the training device.

Every random number is a pure function of (seed, epoch, sample, view, draw). In a given epoch of a run, a view of a
sample is therefore always changed in the same way. Batch size, workers, accumulation and resuming make no difference.
Mixup and CutMix are exceptions: they mix samples of the same batch, so they depend on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8
from torch import Tensor

from vitrail.data.augment import operations
from vitrail.data.augment.draws import CROPS, CropRule, Slot, erased_box, jitter, keyed_uniform, normal, symmetric_beta
from vitrail.data.augment.operations import (
    JITTER_DRAWS,
    RANDAUGMENT_DRAWS,
    RandAugmentRule,
    box_mask,
    colour_jitter,
    on_device,
    randaugment,
)
from vitrail.data.batch import SEEN, Batch, Crop
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.settings import Checked, Effect, problems, setting

Preset = Literal[
    "none", "light1", "light2", "medium1", "medium2", "strong1", "strong2", "bp",
    "augreg-none", "augreg-light1", "augreg-light2", "augreg-medium1", "augreg-medium2", "augreg-strong1",
    "augreg-strong2",
]  # fmt: skip

MixupPer = Literal["sample", "batch", "timm-batch"]


@dataclass(frozen=True)
class Settings:
    """Settings of a preset. Each field is described by the field of the same name in `Augment`."""

    randaugment_layers: int = 0
    randaugment_magnitude: float = 10.0
    mixup: float = 0.0
    crop_area: tuple[float, float] | None = None
    crop_rule: CropRule = "torchvision"
    randaugment_rule: RandAugmentRule = "pillow"
    mixup_per: MixupPer = "sample"


def _original(layers: int = 0, magnitude: float = 10.0, mixup: float = 0.0) -> Settings:
    """Return settings that change images exactly as big_vision does."""
    return Settings(layers, magnitude, mixup, (0.05, 1.0), "tensorflow", "big-vision", "batch")


PRESETS: dict[Preset, Settings] = {
    "none": Settings(),
    "light1": Settings(2, 0.0),
    "light2": Settings(2, 10.0, 0.2),
    "medium1": Settings(2, 15.0, 0.2),
    "medium2": Settings(2, 15.0, 0.5),
    "strong1": Settings(2, 20.0, 0.5),
    "strong2": Settings(2, 20.0, 0.8),
    "bp": Settings(2, 10.0, 0.2, (0.05, 1.0)),
    "augreg-none": _original(),
    "augreg-light1": _original(2, 0.0),
    "augreg-light2": _original(2, 10.0, 0.2),
    "augreg-medium1": _original(2, 15.0, 0.2),
    "augreg-medium2": _original(2, 15.0, 0.5),
    "augreg-strong1": _original(2, 20.0, 0.5),
    "augreg-strong2": _original(2, 20.0, 0.8),
}
"""Settings by preset name. The amounts come from AugReg (2106.10270, section 3.3) and, for `bp`, from "Better plain ViT
baselines" for ViT-S/16 (2205.01580). The presets `augreg-...` also crop, and change images exactly as the original code
does. Apart from mirroring, `augreg-light2` is the complete augmentation of the ViT-S/16 in 2205.01580."""


CUTS = ("crop_from", "crop_area", "scale_jitter")
"""Settings that choose what is seen of an image."""

VIEW_DRAWS = 5
"""Random numbers per image: one each to choose colour jitter, grey, blur and solarisation, and one for the standard
deviation of the blur."""


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random changes to training images before normalisation. Raise `ConfigError` if a field is out of its range."""

    preset: Preset = "none"
    """Preset for the options of crops, RandAugment and mixup. An option that is set replaces the preset's value. The
    presets augreg-none to augreg-strong2 are exactly AugReg's; the others use torchvision's and Pillow's rules."""
    crop_area: tuple[float, float] | None = None
    """Smallest and largest fraction of the image's area that a random crop keeps; 1 1 keeps the whole image."""
    crop_rule: CropRule | None = setting(
        None, effect=Effect(lambda own: own.settings.crop_area is not None, "with --crop-area")
    )
    """Rule that draws the box of a random crop: torchvision (the default) or tensorflow, the rule of the papers' code.
    With torchvision, bilinear scaling of boxes follows its code for tensors, whose levels differ from Pillow's by at
    most 1. tensorflow draws smaller boxes, which are scaled bilinearly without antialiasing."""
    crop_from: tuple[int, int] | None = setting(None, least=1, most=2**15)
    """Height and width in pixels to which whole training images are scaled, before a random box of the network's image
    size is cut out of each (BiT, 1912.11370). By default no such box is cut."""
    scale_jitter: tuple[float, float] | None = None
    """Smallest and largest scale of whole images beside the one at which they just fit (large-scale jitter,
    2012.07177), such as 0.5 2 for boxes and masks. Larger images are cut, and smaller ones are padded."""
    flip: bool = True
    """Mirror half of the images left to right."""
    shift: int = setting(0, least=0, most=2**15, advice="0 means none")
    """Largest random shift in pixels, horizontally and vertically. Empty borders repeat the nearest pixel of the
    image."""
    colour_jitter: tuple[float, float, float, float] = setting(
        (0.0, 0.0, 0.0, 0.0),
        effect=Effect(
            lambda run: run.images.channels > 1 or not any(run.augment.colour_jitter[2:]),
            "with a saturation and a hue of 0 on grey images",
            of_run=True,
        ),
    )
    """Strength of the random changes of brightness, contrast, saturation and hue. The first three are fractions from 0
    to 1. The fourth, from 0 to 0.5, is the largest rotation of the hue as a fraction of the colour circle."""
    colour_jitter_probability: float = setting(
        1.0, least=0, most=1, effect=Effect(lambda own: any(own.colour_jitter), "with --colour-jitter")
    )
    """Fraction of the images whose brightness, contrast, saturation and hue are changed."""
    grey: float = setting(
        0.0,
        effect=Effect(lambda run: run.images.channels > 1, "on images with --channels 3", of_run=True),
        least=0,
        most=1,
    )
    """Probability that an image loses its colours."""
    blur: tuple[float, ...] = setting((), least=0, most=1)
    """Probability that an image is blurred: of the first view, the second view and so on. The last number also holds
    for all further views, such as local views."""
    blur_sigma: tuple[float, float] = setting(
        (0.1, 2.0), least=0, below=math.inf, effect=Effect(lambda own: any(own.blur), "with --blur")
    )
    """Smallest and largest standard deviation of the blur in pixels."""
    solarise: tuple[float, ...] = setting((), least=0, most=1)
    """Probability that the values from 128 on are inverted, for each view as in `blur`."""
    randaugment_layers: int | None = setting(None, least=0, most=100, advice="0 means none")
    """Number of RandAugment operations per image; 0 turns RandAugment off."""
    randaugment_magnitude: float | None = setting(
        None,
        effect=Effect(lambda own: own.settings.randaugment_layers > 0, "with --randaugment-layers"),
        least=0,
        most=30,
    )
    """Strength of the RandAugment operations, 0 to 30. By default 10."""
    randaugment_rule: RandAugmentRule | None = setting(
        None, effect=Effect(lambda own: own.settings.randaugment_layers > 0, "with --randaugment-layers")
    )
    """Code that RandAugment's operations follow. pillow (the default): shifts and boxes are proportional to the image.
    big-vision: exactly as in big_vision, with shifts and boxes of a fixed number of pixels."""
    erase: float = setting(0.0, least=0, most=1)
    """Probability that a random box of the image is erased (random erasing, 1708.04896)."""
    erase_by: Literal["grey", "noise"] = setting("grey", effect=Effect(lambda own: own.erase > 0, "with --erase"))
    """grey: a grey box, whose sides are 10 to 40 % of the image's sides. noise: as in timm, a box of 2 to 33 % of the
    image's area becomes noise with the mean and the deviation of the normalisation."""
    mixup: float | None = setting(None, least=0, below=math.inf, advice="0 turns it off")
    """Alpha of the Beta(alpha, alpha) distribution of the mixup weights; 0 turns mixup off."""
    mixup_per: MixupPer | None = setting(
        None,
        effect=Effect(
            lambda own: own.settings.mixup > 0 or (own.cutmix > 0 and own.mixup_per != "batch"),
            "with --mixup, or with --cutmix and another value than batch",
        ),
    )
    """Draw one mixup weight per sample (the default) or, as in the papers' code, one per batch. timm-batch: one choice
    of mixup or CutMix, one weight and one box per batch, which is mixed with its reverse order (DeiT, MAE, BEiT)."""
    cutmix: float = setting(0.0, least=0, below=math.inf, advice="0 turns it off")
    """Alpha of CutMix, which pastes a box of another image; 0 turns it off. If mixup is on too, each image gets mixup
    or CutMix with equal probability."""

    def _problems(self) -> Iterator[str]:
        yield from problems(self)
        if self.crop_area is not None and not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            yield f"crop_area={self.crop_area} is not two fractions in (0, 1], the smaller first"
        known = self if self.preset not in PRESETS else self.settings
        cuts = {name: getattr(known if name == "crop_area" else self, name) for name in CUTS}
        if len(given := [f"{name}={value}" for name, value in cuts.items() if value is not None]) > 1:
            yield f"{' and '.join(given)} choose what is seen of an image in different ways; choose one"
        if self.scale_jitter is not None and not 0 < self.scale_jitter[0] <= self.scale_jitter[1] <= 100:
            yield f"scale_jitter={self.scale_jitter} is not two numbers in (0, 100], the smaller first"
        if len(self.colour_jitter) != 4 or not (
            all(0 <= strength <= 1 for strength in self.colour_jitter) and self.colour_jitter[3] <= 0.5
        ):
            yield (
                f"colour_jitter={self.colour_jitter} is not brightness, contrast and saturation in [0, 1] and hue in "
                "[0, 0.5]"
            )
        if not self.blur_sigma[0] <= self.blur_sigma[1]:
            yield f"blur_sigma={self.blur_sigma} is not two numbers, the smaller first"

    @functools.cached_property
    def settings(self) -> Settings:
        """The fields of this object, with the preset's value for each field that is None. `crop_area` is None if no
        crop is made."""
        given = {item.name: getattr(self, item.name) for item in fields(Settings)}
        chosen = replace(PRESETS[self.preset], **{name: value for name, value in given.items() if value is not None})
        return replace(chosen, crop_area=None) if chosen.crop_area == (1, 1) else chosen

    def is_random_for(self, images: Preprocess) -> bool:
        """Return True if an image can look different from epoch to epoch. `images` is the preprocessing of the network.
        An image of one channel has no colours that change."""
        chosen, has_colours = self.settings, images.channels > 1
        cuts = self.crop_from not in (None, images.image_size), self.scale_jitter, chosen.crop_area
        jitter = self.colour_jitter_probability and any(self.colour_jitter[: 4 if has_colours else 2])
        changes = self.flip, self.shift, jitter, self.grey and has_colours, any(self.blur), any(self.solarise)
        return any((*cuts, *changes, chosen.randaugment_layers, self.erase, chosen.mixup, self.cutmix))

    def __call__(self, batch: Batch, *, seed: int, classes: int = 0, preprocess: Preprocess | None = None) -> Batch:
        """Return the batch with augmented images. If mixup or CutMix is on, the batch also has `targets`.

        `preprocess` is that of the network. If `crop_from` is set, boxes of its image size are cut out. Its mean
        and deviation are those of the noise of `erase_by`, which are 1/2 without it.

        `batch.epochs`, `batch.samples` and `batch.views` are on the CPU and determine the random numbers. The images
        are uint8, on any device. They become float32 if noise or mixing as in timm makes levels that are not whole. If
        the batch has labels but no targets, `classes` sets the number of columns of the
        new targets.
        """
        chosen, images = self.settings, batch.images

        def draw(first: Slot, draws: int) -> Float32[np.ndarray, "b draws"]:
            # DLPack shares memory on the CPU only, so it cannot wait for a device.
            key = np.from_dlpack(batch.epochs), np.from_dlpack(batch.samples), np.from_dlpack(batch.views)
            return keyed_uniform(seed, *key, draws=draws, first=first)

        if self.crop_from is not None and preprocess is not None:
            spare = np.subtract(self.crop_from, preprocess.image_size)  # all positions have the same probability
            corners = (draw(Slot.WINDOW, 2) * (spare + 1)).astype(np.int64)
            images = operations.window(images, corners, preprocess.image_size)
        if self.flip or self.shift:
            images = self._move(images, draw(Slot.MOVE, 3))
            batch = self._with_moved_targets(batch, draw(Slot.MOVE, 3))
        if any((*self.colour_jitter, self.grey, *self.blur, *self.solarise)):
            views, jitter = np.from_dlpack(batch.views), draw(Slot.JITTER, JITTER_DRAWS)
            images = self._view_changes(images, views, jitter, draw(Slot.VIEW, VIEW_DRAWS))
        if layers := chosen.randaugment_layers:
            numbers = draw(Slot.RANDAUGMENT, RANDAUGMENT_DRAWS * layers).reshape(len(batch), layers, -1)
            images = randaugment(images, numbers, magnitude=chosen.randaugment_magnitude, rule=chosen.randaugment_rule)
        if self.erase and self.erase_by == "grey":
            images = self._erase_grey(images, draw(Slot.ERASE, 5))
        elif self.erase:
            is_erased = draw(Slot.ERASE, 1)[:, 0] < self.erase
            images = self._erase_by_noise(replace(batch, images=images), seed, is_erased, preprocess)
        batch = replace(batch, images=images)
        if self.mixes:
            numbers = draw(Slot.MIX, MIX_DRAWS)
            first = None
            if batch.first_key is not None:
                key = (np.array([value]) for value in batch.first_key)
                first = keyed_uniform(seed, *key, draws=MIX_DRAWS, first=Slot.MIX)
            return mix(
                batch, numbers, mixup=chosen.mixup, cutmix=self.cutmix, classes=classes, mixup_per=chosen.mixup_per,
                first=first,
            ).without_partners()  # fmt: skip
        return batch

    @property
    def mixes(self) -> bool:
        """True if samples of a batch are mixed with each other."""
        return bool(self.settings.mixup or self.cutmix)

    def crop(self, seed: int) -> Crop | None:
        """Return the function that draws the box or the scale of an image, or None if whole images are seen."""
        if self.scale_jitter is not None:
            return functools.partial(jitter, seed, scale=self.scale_jitter)
        area = self.settings.crop_area
        return None if area is None else self.crop_of(seed, area)

    def crop_of(self, seed: int, area: tuple[float, float]) -> Crop:
        """Return the function that draws a box of an image, which covers a fraction of the image within `area`."""
        return functools.partial(CROPS[self.settings.crop_rule], seed, area=area)

    def training_preprocess(self, preprocess: Preprocess) -> Preprocess:
        """Return the preprocessing of training images, which differs from the preprocessing of other images in three
        cases.

        If `crop_from` is set, whole images are scaled to the size `crop_from`. If `crop_rule` is "torchvision" and
        boxes are scaled bilinearly with antialiasing, PyTorch scales them instead of Pillow, in a third of the time. If
        `crop_rule` is "tensorflow", boxes are scaled bilinearly without antialiasing, as vision_transformer and
        big_vision do. Raise `ConfigError` if `preprocess.scaled_decode` is on, which does not work with "tensorflow",
        or if `crop_from` is smaller than the network's images.
        """
        if self.crop_from is not None:
            if any(big < small for big, small in zip(self.crop_from, preprocess.image_size, strict=True)):
                raise ConfigError(
                    f"crop_from={self.crop_from} is smaller than image_size={preprocess.image_size}, but boxes of "
                    "this size are cut out of the scaled images; choose a larger crop_from"
                )
            return replace(preprocess, image_size=self.crop_from, resize="squash", crop_share=1.0)
        if self.settings.crop_area is None:
            return preprocess
        if self.settings.crop_rule == "torchvision":
            differs_by_1_level = preprocess.antialias and preprocess.interpolation == "bilinear"
            is_replaced = preprocess.resampler == "pillow" and differs_by_1_level
            return replace(preprocess, resampler="torch") if is_replaced else preprocess
        if preprocess.scaled_decode:
            raise ConfigError(
                "scaled_decode=True averages pixels, and crop_rule='tensorflow' scales without averaging; leave out "
                "scaled_decode, or choose crop_rule='torchvision'"
            )
        resampler = "pillow" if preprocess.resampler == "torch" else preprocess.resampler
        return replace(preprocess, interpolation="bilinear", antialias=False, resampler=resampler)

    def _move(self, images: UInt8[Tensor, "b c h w"], draws: Float32[np.ndarray, "b 3"]) -> UInt8[Tensor, "b c h w"]:
        b, _, height, width = images.shape
        flip, down, across = draws.T
        if not self.shift and images.device.type == "cpu":  # `torch.where` takes 20 times as long
            moved, mirrored = np.from_dlpack(images).copy(), np.flatnonzero(flip < 0.5)
            moved[mirrored] = np.from_dlpack(torch.from_numpy(moved[mirrored]).flip(3))
            return torch.from_numpy(moved)
        reach = 2 * self.shift + 1
        rows = (np.arange(height) + (down * reach).astype(np.int64)[:, None] - self.shift).clip(0, height - 1)
        columns = (np.arange(width) + (across * reach).astype(np.int64)[:, None] - self.shift).clip(0, width - 1)
        if self.flip:
            columns = np.where(flip[:, None] < 0.5, width - 1 - columns, columns)
        batch = torch.arange(b, device=images.device)[:, None, None]
        down_to, across_to = on_device(rows, images.device), on_device(columns, images.device)
        picked = images.permute(0, 2, 3, 1)[batch, down_to[:, :, None], across_to[:, None, :]]  # b h w c
        return picked.permute(0, 3, 1, 2)

    def _with_moved_targets(self, batch: Batch, draws: Float32[np.ndarray, "b 3"]) -> Batch:
        """Return the batch with its boxes, outlines and masks at the places of the moved images. Objects that are
        hardly seen any more are not learned."""
        if batch.masks is not None:
            batch = replace(batch, masks=self._move(batch.masks[:, None], draws)[:, 0])
        if batch.outlines is not None:
            batch = replace(batch, outlines=self._move(batch.outlines, draws))
        if batch.boxes is None or batch.box_labels is None:
            return batch
        height, width = batch.images.shape[2:]
        boxes, device = batch.boxes, batch.boxes.device
        if self.flip:
            left, top, right, bottom = boxes.unbind(dim=2)
            mirrored = torch.stack([width - right, top, width - left, bottom], dim=2)
            boxes = torch.where(on_device(draws[:, :1, None] < 0.5, device), mirrored, boxes)
        down, across = ((draws[:, 1:] * (2 * self.shift + 1)).astype(np.int64) - self.shift).T
        moves = np.stack([across, down, across, down], axis=1)[:, None].astype(np.float32)
        limits = torch.tensor([width, height, width, height], dtype=torch.float32, device=device)
        moved = (boxes - on_device(moves, device)).clamp(min=0).minimum(limits)
        before, after = ((each[..., 2:] - each[..., :2]).prod(dim=2) for each in (boxes, moved))
        return replace(batch, boxes=moved, box_labels=batch.box_labels.where(after >= SEEN * before, -2))

    def _view_changes(
        self,
        images: UInt8[Tensor, "b c h w"],
        views: Int64[np.ndarray, " b"],
        jitter: Float32[np.ndarray, "b 8"],
        draws: Float32[np.ndarray, "b 5"],
    ) -> UInt8[Tensor, "b c h w"]:
        """Change the colours of the images, turn them grey, blur them and solarise them, each with its probability for
        the image's view."""
        low, high = self.blur_sigma
        sigmas = (low + (high - low) * draws[:, 4]).astype(np.float32)
        jitter_chance = self.colour_jitter_probability if any(self.colour_jitter) else 0.0
        changes: tuple[tuple[tuple[float, ...], Callable[[Tensor, np.ndarray], Tensor]], ...] = (
            ((jitter_chance,), lambda part, places: colour_jitter(part, jitter[places], self.colour_jitter)),
            ((self.grey,), lambda part, places: operations.grey(part)),
            (self.blur, lambda part, places: operations.blur(part, sigmas[places])),
            (self.solarise, lambda part, places: operations.solarise(part)),
        )
        for number, (chances, change) in enumerate(changes):
            chance = np.array(chances or (0.0,))[np.minimum(views, max(len(chances) - 1, 0))]
            images = operations.changed(images, np.flatnonzero(draws[:, number] < chance), change)
        return images

    def _erase_by_noise(
        self,
        batch: Batch,
        seed: int,
        is_erased: Bool[np.ndarray, " b"],
        preprocess: Preprocess | None,
    ) -> Float32[Tensor, "b c h w"]:
        """Replace random boxes by noise, whose values after normalisation are from the standard normal distribution."""
        erased = batch.images.float()
        channels, height, width = erased.shape[1:]
        facts = ((0.5,), (0.5,)) if preprocess is None else (preprocess.mean, preprocess.std)
        mean, std = (255 * np.array(fact, np.float32)[:, None, None] for fact in facts)
        for row in np.flatnonzero(is_erased):
            key = [np.from_dlpack(each)[row : row + 1] for each in (batch.epochs, batch.samples, batch.views)]
            box = erased_box(keyed_uniform(seed, *key, draws=40, first=Slot.ERASED_BOX).reshape(10, 4), height, width)
            if box is not None:
                top, left, h, w = box
                count = channels * h * w
                noise = normal(keyed_uniform(seed, *key, draws=count + count % 2, first=Slot.ERASED_PIXELS)[0])
                levels = noise[:count].reshape(channels, h, w) * std + mean
                erased[row, :, top : top + h, left : left + w] = on_device(levels, erased.device)
        return erased

    def _erase_grey(
        self, images: UInt8[Tensor, "b c h w"], draws: Float32[np.ndarray, "b 5"]
    ) -> UInt8[Tensor, "b c h w"]:
        """Turn random boxes grey. The centre of a box can be anywhere in the image. A box is cut off at the border of
        the image."""
        chance, centre_y, centre_x, size_y, size_x = draws.T[:, :, None]  # each b 1
        height, width = images.shape[2:]
        y = (np.arange(height, dtype=np.float32) + np.float32(0.5)) / np.float32(height)  # in fractions of the side
        x = (np.arange(width, dtype=np.float32) + np.float32(0.5)) / np.float32(width)
        rows = np.abs(y - centre_y) < (np.float32(0.1) + np.float32(0.3) * size_y) / 2  # b h
        columns = np.abs(x - centre_x) < (np.float32(0.1) + np.float32(0.3) * size_x) / 2
        return operations.fill(images, rows & (chance < self.erase), columns)


# Mixup and CutMix: an image and its target become a mixture of two samples of the batch.
#
# The partner of a sample is the next sample of the batch. The partner of the last sample is the first sample. A view is
# mixed with the same view of the partner. The partner depends on the batch, but the mixing weight and the CutMix box
# depend only on the sample, unless one mixup weight is drawn for the whole batch. The rule of timm is different: the
# partners are the batch in reverse order, and all samples have the same method, weight and box.


MIX_DRAWS = 5
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
