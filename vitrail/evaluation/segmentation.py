"""The evaluators of masks: those that a model predicts, and those that a linear layer of frozen patch tokens predicts.

The second one is the linear protocol of DINOv2 (2304.07193, section 7.4) without augmentation. The tokens of two
blocks, the last one and the one in the middle, are normalised by the mean and the standard deviation of the training
images, a tenth of their elements is dropped, and the logits of a linear layer are scaled up linearly for the
cross-entropy of all pixels. Each whole image is seen once, scaled to one size. The published protocol reads the last
block, or the last four. The middle one knows better where an edge is (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Float64, Int64, UInt8
from torch import Tensor, nn

from vitrail.data.batch import Skipped
from vitrail.data.objects import IGNORED, Mask
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import LARGEST_SCALE, Source, evenly, image_of, subset, target_kind, typical_size
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError, UndecodableImage, listed, plural
from vitrail.evaluation.evaluators import Bootstrapped, check_head
from vitrail.evaluation.metrics.intervals import Metric, interval_or_wilson, resampled_means, with_intervals
from vitrail.evaluation.outputs import Outputs
from vitrail.models.predictor import Predictor
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import Checked, setting
from vitrail.weights.answers import AnyPrediction, MaskPrediction

LOOKED_AT = 50
"""Number of training images whose aspect ratios decide about that of the network's input."""

BATCH = 8
"""Images in a step."""

DROPOUT = 0.1
DECAY = 1e-4

CELLS = 4
"""Number of places per side of a patch at which the masks of training images are learned."""


@dataclass(frozen=True)
class ByMasks(Bootstrapped):
    """Intersection over union of the masks that a model predicts, with intervals (`mask_metrics`)."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` if the model does not predict a mask of the whole image, and `DataError` if the data has
        no masks or has other classes."""
        check_head(
            "mask", outputs.bundle, held_out,
            lacks="masks needs images with masks, and this data has none; choose other data",
            other="masks measures masks, and this model predicts none; fine-tune it on data with masks (vitrail "
            "finetune), or measure its patch tokens by segmentation",
        )  # fmt: skip
        # A model that learned only the middle of an image (crop_share) is measured as it predicts.
        replace(outputs.bundle.preprocess, crop_share=1.0).check_whole("the model")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the `mean_iou` and the `pixel_accuracy` with their intervals, and the intersection over union of each
        class as `NAME:iou`. All pixels are counted at the size of their images."""
        self.check(outputs, train, held_out)
        seen = outputs.answered(held_out, confused_pixels)
        counts = {"images": float(len(seen.indices)), "skipped": float(len(held_out) - len(seen.indices))}
        if not seen.is_finite:
            return {"mean_iou": math.nan, **counts}
        outputs.check_usable(seen.judged, plural(len(held_out), "image"), "mask")
        return _values(np.stack(seen.judged), held_out.classes, self.bootstrap) | counts


def confused_pixels(target: Target, found: AnyPrediction) -> Int64[np.ndarray, "classes classes"] | None:
    """Return the number of pixels of an image by their true class (rows) and the class that a model predicts (columns),
    or None for an image without a mask or with a mask without any class. Raise `UndecodableImage` if the mask cannot be
    read."""
    assert isinstance(found, MaskPrediction)
    if not isinstance(target, Mask):
        return None
    height, width = found.indices.shape
    counts = pixel_confusion(target.indices((height, width)), found.indices.astype(np.int64), len(found.names))
    return counts if counts.any() else None


def _values(
    confusions: Int64[np.ndarray, "n classes classes"], classes: Sequence[str], resamples: int
) -> dict[str, float]:
    """Return the metrics of images with these confusions, with intervals, and those of each class."""
    values = with_intervals(mask_metrics(confusions, resamples=resamples))
    shares = zip(classes, intersection_over_union(confusions.sum(axis=0)).tolist(), strict=True)
    return values | {f"{name}:iou": share for name, share in shares if not math.isnan(share)}


@dataclass(frozen=True)
class BySegmentation(Checked):
    """A linear layer on frozen patch tokens that predicts a class for every pixel."""

    patches: int = setting(1_400, least=1)
    """Largest number of patches per image for segmentation. Images are scaled to fit, with the mean aspect ratio of the
    training images. More patches find smaller things and take longer."""
    most_images: int = setting(1_000, least=1)
    """Largest number of training images for segmentation. If there are more, evenly spaced ones are used."""
    learning_epochs: int = setting(20, least=1)
    """Number of epochs in which segmentation learns from the training images."""
    head_rate: float = setting(1e-2, above=0, below=math.inf)
    """First learning rate of segmentation, which falls along half a cosine wave."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` unless the targets are masks, and `ConfigError` for a network without patch tokens."""
        if not isinstance(outputs.bundle.network.config, ViTConfig):
            raise ConfigError("segmentation needs the patch tokens of a Vision Transformer, which this network lacks")
        for source in (train, held_out):
            if target_kind(source) != "mask":
                raise DataError("segmentation needs images with masks, and these have none; choose other data")
        if len(train.classes) < 2:
            raise DataError(f"segmentation needs masks of at least two classes, and these have {listed(train.classes)}")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the `mean_iou`, the `pixel_accuracy`, and the intersection over union of each class as `NAME:iou`.

        Raise `DataError` if none of the images can be used.
        """
        return outputs.processes.on_first(lambda: self._measure(outputs, train, held_out), is_long=True)

    def _measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        learned = subset(train, evenly(len(train), self.most_images))
        if len(learned) < len(train):
            outputs.note(f"segmentation learns from {len(learned):,} of {len(train):,} training images")
        tokens = Tokens(outputs, self._preprocess(outputs, learned))
        (height, width), (rows, columns) = tokens.preprocess.image_size, tokens.grid
        outputs.note(f"segmentation sees images with {height} x {width} pixels, in {rows} x {columns} patches")
        pairs = list(tokens.of(learned))
        outputs.check_usable(pairs, plural(len(learned), "training image"), "mask")
        head = self._fitted(tokens, pairs, len(train.classes))
        found = [
            pixel_confusion(mask, head(one[None], mask.shape)[0].argmax(dim=0).numpy(), len(train.classes))
            for one, mask in tokens.of(held_out)
        ]
        outputs.check_usable(found, plural(len(held_out), "image"), "mask")
        counts = {"training_images": len(pairs), "images": len(found), "skipped": len(held_out) - len(found)}
        values = _values(np.stack(found), train.classes, resamples=1000)
        return values | {name: float(count) for name, count in counts.items()}

    def _preprocess(self, outputs: Outputs, learned: Source) -> Preprocess:
        """Return the preprocessing of whole images."""
        height, width = typical_size(learned, LOOKED_AT)
        config: Any = outputs.bundle.network.config
        down, across = config.patch_pixels
        scale = min(LARGEST_SCALE, math.sqrt(self.patches * down * across / (height * width)))
        size = max(1, int(scale * height / down)) * down, max(1, int(scale * width / across)) * across
        return replace(outputs.bundle.preprocess, image_size=size, resize="squash", crop_share=1.0)

    def _fitted(self, tokens: Tokens, pairs: list[Pair], classes: int) -> SegmentationHead:
        """Return the head that learns the training images."""
        size = tokens.grid[0] * CELLS, tokens.grid[1] * CELLS
        coarse = replace(tokens.preprocess, image_size=size)
        found = [coarse.placement((mask.shape[0], mask.shape[1])).mask(mask) for _, mask in pairs]
        masks = torch.from_numpy(np.stack(found))
        head = SegmentationHead([one for one, _ in pairs], tokens.grid, classes)
        optimizer = torch.optim.AdamW(head.parameters(), lr=self.head_rate, weight_decay=DECAY)
        steps = self.learning_epochs * math.ceil(len(pairs) / BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        random = torch.Generator().manual_seed(0)
        for _ in range(self.learning_epochs):
            for rows in torch.split(torch.randperm(len(pairs), generator=random), BATCH):
                logits = head(torch.stack([pairs[row][0] for row in rows.tolist()]), size, random)
                loss = F.cross_entropy(logits, masks[rows].long(), ignore_index=IGNORED)
                if torch.isfinite(loss):  # it is not if no pixel of these images has a class
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                    optimizer.step()
                schedule.step()
        return head.requires_grad_(False)


Pair = tuple[Float16[Tensor, "n d"], UInt8[np.ndarray, "h w"]]
"""The patch tokens of an image, and its mask."""


class Tokens:
    """The frozen patch tokens of images."""

    def __init__(self, outputs: Outputs, preprocess: Preprocess) -> None:
        self.outputs = outputs
        self.preprocess = preprocess
        config: Any = outputs.bundle.network.config
        self.grid = config.grid_of(*preprocess.image_size)
        self.layers = tuple(dict.fromkeys((config.middle_block, config.num_blocks - 1)))

    def of(self, source: Source) -> Iterator[Pair]:
        """Yield the tokens and the mask of each image. Images that cannot be used with their masks are skipped."""
        outputs, done = self.outputs, 0
        predictor = Predictor(outputs.bundle.network, outputs.feature_precision or outputs.precision)
        size = outputs.batch_size or BATCH
        for batch in evaluation_batches(source, self.preprocess, batch_size=size, readers=outputs.readers):
            for skipped in batch.skipped:
                outputs.skip(skipped)
            images = self.preprocess.normalise(batch.images.to(predictor.device))
            parts = predictor.features(images, self.layers)
            found = torch.cat([part.patches for part in parts], dim=2).half().cpu()
            for row, index in enumerate(batch.samples.tolist()):
                if batch.valid[row] and (mask := self._mask(source, index)) is not None:
                    yield found[row], mask
            done += len(batch)
            outputs.progress(done, len(source))

    def _mask(self, source: Source, index: int) -> UInt8[np.ndarray, "h w"] | None:
        target = source.target(index)
        if not isinstance(target, Mask):
            return None
        try:
            return target.indices(image_size_of(image_of(source, index)))
        except UndecodableImage as error:
            self.outputs.skip(Skipped(source.key(index), str(error)))
            return None


class SegmentationHead(nn.Module):
    """A linear layer on tokens that are normalised by the mean and the standard deviation of those of the training."""

    mean: Tensor
    std: Tensor

    def __init__(self, tokens: Sequence[Float16[Tensor, "n d"]], grid: tuple[int, int], classes: int) -> None:
        super().__init__()
        spread = [torch.std_mean(one.float(), dim=0, correction=0) for one in tokens]
        mean = torch.stack([each for _, each in spread]).mean(dim=0)
        squares = torch.stack([std.square() + (each - mean).square() for std, each in spread]).mean(dim=0)
        self.register_buffer("mean", mean)
        self.register_buffer("std", squares.sqrt().clamp(min=1e-6))
        self.grid = grid
        self.layer = nn.Linear(len(mean), classes)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(
        self, tokens: Float16[Tensor, "b n d"], size: tuple[int, int], dropout: torch.Generator | None = None
    ) -> Float[Tensor, "b classes h w"]:
        """Return the logits of each pixel of an image of a height and width. With `dropout`, a tenth of the elements
        is dropped."""
        found = (tokens.float() - self.mean) / self.std
        if dropout is not None:
            found = found * (torch.rand(found.shape, generator=dropout) >= DROPOUT) / (1 - DROPOUT)
        maps = self.layer(found).transpose(1, 2).unflatten(2, self.grid)
        return F.interpolate(maps, size, mode="bilinear", align_corners=False)


# Metrics: intersection over union and pixel accuracy, from a confusion matrix for each image.


def pixel_confusion(
    truth: UInt8[np.ndarray, "h w"], predicted: Int64[np.ndarray, "h w"], classes: int
) -> Int64[np.ndarray, "classes classes"]:
    """Return the number of pixels of each true class (rows) and predicted class (columns). Pixels
    without a true class are not counted."""
    known = truth != IGNORED
    pairs = truth[known].astype(np.int64) * classes + predicted[known]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def intersection_over_union(
    confusion: Int64[np.ndarray, "*n k k"] | Float64[np.ndarray, "*n k k"],
) -> Float64[np.ndarray, "*n k"]:
    """Return the intersection over union of each class. It is NaN for a class that is neither true nor predicted in any
    pixel."""
    right = np.diagonal(confusion, axis1=-2, axis2=-1).astype(np.float64)
    union = confusion.sum(axis=-1) + confusion.sum(axis=-2) - right
    return np.divide(right, union, out=np.full(right.shape, np.nan), where=union > 0)


def mask_metrics(confusions: Int64[np.ndarray, "n k k"], *, resamples: int = 1000, seed: int = 0) -> dict[str, Metric]:
    """Return the mean intersection over union (`mean_iou`) and the pixel accuracy of n images, with bootstrap
    intervals over the images.

    All pixels of all images are counted together, as usual. Classes that are neither true nor predicted in a resample
    are skipped in that resample. If all resamples have the same value, such as for a single image, the interval is
    Wilson's for as many samples as images.
    """
    count, classes, _ = confusions.shape
    total = confusions.sum(axis=0)
    means = resampled_means(confusions.reshape(count, -1).astype(np.float64), resamples=resamples, seed=seed).reshape(
        -1, classes, classes
    )
    right, all_pixels = np.trace(total), max(1, total.sum())
    pixels = means.sum(axis=(1, 2))
    accuracies = np.divide(np.trace(means, axis1=1, axis2=2), pixels, out=np.zeros(len(means)), where=pixels > 0)
    return {
        "mean_iou": interval_or_wilson(_mean_iou(total[None]).item(), _mean_iou(means), count),
        "pixel_accuracy": interval_or_wilson(float(right / all_pixels), accuracies, count),
    }


def _mean_iou(
    confusions: Int64[np.ndarray, "n k k"] | Float64[np.ndarray, "n k k"],
) -> Float64[np.ndarray, " n"]:
    found = intersection_over_union(confusions)
    known = ~np.isnan(found)
    return np.where(known, found, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
