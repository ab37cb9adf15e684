"""Masked patch prediction, as in appendix B.1.2 of "An Image is Worth 16x16 Words" (2010.11929), and as in BEiT
(2106.08254).

A fraction of the patch embeddings of an image is corrupted, and the network predicts the colours, the pixels or the
discrete tokens of the corrupted patches from the others. No labels are needed. Colours are computed here, and tokens by
`vitrail.tasks.tokenizer`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import on_device
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.network import FootprintPrecision
from vitrail.models.tokens import Replace, cut_patches
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import setting
from vitrail.tasks.task import Objective, StepCost, TaskMetric
from vitrail.tasks.tokenizer import TokenizerTargets, check_grid, tokenizer_facts
from vitrail.tasks.unlabelled import (
    PatchObjective,
    PatchTask,
    Restored,
    batch_key,
    draw_order,
    tokens_at,
)

ACCURACY: dict[PatchTarget, str] = {
    "mean-colour": "colour_accuracy",
    "colours": "colour_accuracy",
    "tokens": "token_accuracy",
}
"""Metric of the fraction of right predictions, by the target."""


@dataclass(frozen=True, kw_only=True)
class MaskedPatches(PatchTask):
    """Predict the colours or the pixels of corrupted patches, which needs no labels.

    The saved model is the network without a head.
    """

    name = "masked-patches"
    metrics = (
        TaskMetric("patch_loss", higher_is_better=False),
        TaskMetric("colour_accuracy", is_fraction=True),
        TaskMetric("token_accuracy", is_fraction=True),
    )
    hidden = "corrupted"
    fraction = "corrupt_fraction"

    patch_target: PatchTarget = "mean-colour"
    """Prediction for a corrupted patch: its mean colour in 3 bits per channel (mean-colour), 4 x 4 such colours
    (colours), its normalised pixels with the squared error (pixels), or its token (tokens, with --tokenizer)."""
    tokenizer: str | None = None
    """Model whose tokens are predicted: a run of the task vqvae, or its model folder. It must divide images into as
    many patches as the network does."""
    corrupt_fraction: float = 0.5
    """Fraction of each image's patches that are corrupted. The loss counts only these patches."""
    corrupt_blocks: bool = False
    """True to corrupt rectangles of patches, as BEiT does, instead of patches one by one. If the rectangles have fewer
    patches than --corrupt-fraction requires, single patches are corrupted as well."""
    mask_fraction: float = setting(0.8, least=0, most=1)
    """Fraction of the corrupted patches whose embedding becomes the learned mask embedding."""
    swap_fraction: float = setting(0.1, least=0, most=1)
    """Fraction of the corrupted patches whose embedding becomes that of another patch of the image. The rest keep their
    own embedding."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.mask_fraction + self.swap_fraction > 1 + 1e-9:
            yield (
                f"mask_fraction={self.mask_fraction} and swap_fraction={self.swap_fraction} add up to more than 1; "
                "choose smaller fractions"
            )
        if self.patch_target == "tokens" and self.tokenizer is None:
            yield (
                "tokenizer: patch_target='tokens' needs a trained tokenizer; name a run of the task vqvae, such as "
                "runs/vqvae"
            )
        if self.patch_target != "tokens" and self.tokenizer is not None:
            yield (
                f"tokenizer={self.tokenizer!r} is not used with patch_target={self.patch_target!r}; choose "
                "patch_target='tokens', or leave it out"
            )
        unfit = {*ACCURACY.values()} - {ACCURACY.get(self.patch_target)}
        if self.select is not None and self.select in unfit:
            noun = self.select.removesuffix("_accuracy")
            yield (
                f"select={self.select!r} needs {noun}s, but patch_target={self.patch_target!r} predicts none; choose "
                "patch_loss"
            )

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` as `PatchTask.check_network`, and unless the tokenizer has a token for each patch."""
        super().check_network(network)
        if self.tokenizer is not None:
            check_grid(self.tokenizer, self.transformer(network))

    def models(self) -> dict[str, str]:
        return {} if self.tokenizer is None else {"tokenizer": tokenizer_facts(self.tokenizer).sha256}

    def outputs_of(self, network: ViTConfig) -> int:
        """Return the number of outputs of the decoder for one patch."""
        if self.tokenizer is not None:
            return tokenizer_facts(self.tokenizer).coder.codes
        if self.patch_target == "pixels":
            return network.channels * math.prod(network.patch_size)
        return CELLS[self.patch_target] ** 2 * colours(network.channels)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the network computes all tokens and the decoder the corrupted ones. A
        tokenizer computes the whole image.

        At the peak, the outputs of the decoder exist three times, or once beside the work of the tokenizer, or the
        levels of all pixels exist twice as whole numbers.
        """
        network = self.transformer(network)
        patches, outputs = self.hidden_of(math.prod(network.grid)), self.outputs_of(network)
        facts = None if self.tokenizer is None else tokenizer_facts(self.tokenizer)
        tokenizing = 0 if facts is None else 4 * patches * outputs + facts.image_bytes(precision)
        levels = 16 * network.channels * math.prod(network.image_size) if self.patch_target in CELLS else 0
        return StepCost(
            dataclasses.replace(network, pool="gap", class_token=network.has_class_token),
            parameters=network.width + outputs * (network.width + 1),
            fixed_bytes=0 if facts is None else facts.fixed_bytes(precision),
            image_bytes=max(12 * patches * outputs, levels, tokenizing),
            flops=6 * patches * outputs * network.width + (0 if facts is None else facts.flops),
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        targets = None if self.tokenizer is None else TokenizerTargets(self.tokenizer)
        return MaskedPatchesObjective(network, self, targets)


class Corruption(NamedTuple):
    """The corrupted patches of a batch, by their indices in row-major order of the grid. The three groups of an image
    have no patch in common. All images of a batch have groups of the same sizes."""

    masked: Int64[Tensor, "b m"]
    """Patches whose embedding becomes the mask embedding."""
    swapped: Int64[Tensor, "b s"]
    """Patches whose embedding becomes that of another patch."""
    sources: Int64[Tensor, "b s"]
    """Patch that provides the embedding of each swapped patch."""
    kept: Int64[Tensor, "b k"]
    """Patches that keep their own embedding, and are predicted all the same."""

    @property
    def patches(self) -> Int64[Tensor, "b c"]:
        """All corrupted patches: masked, swapped and kept ones, in this order."""
        return torch.cat([self.masked, self.swapped, self.kept], dim=1)

    def replacing(self, token: Float[Tensor, " width"]) -> Replace:
        """Return a function for `VisionTransformer.encode` that corrupts patch embeddings. `token` is the mask
        embedding. Swapped patches get embeddings from before the corruption."""

        def replace(embeddings: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
            width = embeddings.shape[2]
            others = tokens_at(embeddings, self.sources)
            masks = token.to(embeddings.dtype).expand(*self.masked.shape, -1)
            places = torch.cat([self.masked, self.swapped], dim=1)[:, :, None].expand(-1, -1, width)
            return embeddings.scatter(1, places, torch.cat([masks, others], dim=1))

        return replace


def draw_corruption(task: MaskedPatches, batch: Batch, grid: tuple[int, int], *, seed: int) -> Corruption:
    """Return the corrupted patches of a batch whose images have these numbers of rows and columns of patches.

    The corruption of an image is a pure function of the seed and of the image's epoch, sample and view. All images have
    exactly as many masked, swapped and kept patches as the fractions require, rounded to whole patches.
    """
    patches = math.prod(grid)
    corrupted = task.hidden_of(patches)
    if task.corrupt_blocks:
        order = draw_block_order(batch, grid, corrupted, seed=seed)
    else:
        order = draw_order(batch, patches, seed=seed)
    masked = round(task.mask_fraction * corrupted)
    swapped = min(round(task.swap_fraction * corrupted), corrupted - masked)
    places = order[:, masked : masked + swapped]
    uniform = keyed_uniform(seed, *batch_key(batch), draws=swapped, first=Slot.PATCH_SOURCE)
    sources = (uniform * (patches - 1)).astype(np.int64)
    sources += sources >= places  # any patch but the swapped one itself
    groups = order[:, :masked], places, sources, order[:, masked + swapped : corrupted]
    device = batch.images.device
    return Corruption(*(on_device(np.ascontiguousarray(group), device) for group in groups))


class MaskedPatchesObjective(PatchObjective):
    """A network that predicts corrupted patches through a linear decoder of their encoded tokens.

    The mask embedding is trained beside the network, as the decoder is. Tokens are those of the images without
    corruption.
    """

    def __init__(self, network: nn.Module, task: MaskedPatches, tokenizer: TokenizerTargets | None = None) -> None:
        super().__init__(network)
        self.task = task
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.provenance = {"tokenizer": task.tokenizer, "tokenizer_sha256": tokenizer.sha256}
        accuracy = ACCURACY.get(task.patch_target)
        self.measured = ("patch_loss",) if accuracy is None else ("patch_loss", accuracy)
        config: ViTConfig = self.network.config
        self.mask_embedding = nn.Parameter(torch.empty(config.width))
        self.decoder = nn.Linear(config.width, task.outputs_of(config))
        draws = INITIAL_WEIGHTS["beit"]
        draws.token(self.mask_embedding)
        draws.draw_dense(self.decoder)

    def begin(self, preprocess: Preprocess, seed: int) -> None:
        """Prepare as `Objective.begin`, and prepare the tokenizer for images with this preprocessing."""
        super().begin(preprocess, seed)
        if self.tokenizer is not None:
            self.tokenizer.begin(preprocess, self.mask_embedding.device)

    def losses(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> dict[str, Tensor]:
        """Return `patch_loss` and, unless pixels are predicted, `colour_accuracy` or `token_accuracy` of each image.

        The loss is the cross-entropy per predicted colour or token, in nats, or the squared error per predicted
        normalised pixel. The accuracy is the fraction of the predicted colours or tokens that are right.
        """
        config = cast(ViTConfig, network.config)
        places, predicted = self.predicted(network, batch, seed=seed)
        rows = torch.arange(len(places), device=places.device)[:, None]
        if self.task.patch_target == "pixels":
            pixels = cut_patches(batch.images, config.patch_size)[rows, places].flatten(2)
            return {"patch_loss": F.mse_loss(predicted, pixels, reduction="none").mean(dim=(1, 2))}
        if self.tokenizer is not None:
            classes = self.tokenizer.tokens(batch.images).gather(1, places)[:, :, None]
        else:
            levels = cut_patches(preprocess.levels(batch.images), config.patch_size)[rows, places]
            classes = colour_classes(levels, CELLS[self.task.patch_target])
        predicted = predicted.reshape(*classes.shape, -1)
        losses = F.cross_entropy(predicted.movedim(3, 1), classes, reduction="none")
        right = (predicted.detach().argmax(dim=3) == classes).float()
        return {"patch_loss": losses.mean(dim=(1, 2)), ACCURACY[self.task.patch_target]: right.mean(dim=(1, 2))}

    def predicted(
        self, network: Any, batch: Batch, *, seed: int
    ) -> tuple[Int64[Tensor, "b k"], Float[Tensor, "b k outputs"]]:
        """Return the corrupted patches of each image, and the outputs of the decoder for them."""
        grid = network.config.grid_of(*batch.images.shape[2:])
        corruption = draw_corruption(self.task, batch, grid, seed=seed)
        encoded = network.encode(batch.images, replace=corruption.replacing(self.mask_embedding)).patches
        return corruption.patches, self.decoder(tokens_at(encoded, corruption.patches)).float()

    def restored(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> Restored:
        """Return the predicted levels: those of pixels, the middle levels of the most likely colours, or what the
        tokenizer restores from the most likely tokens among the right tokens of the other patches."""
        config = cast(ViTConfig, network.config)
        places, predicted = self.predicted(network, batch, seed=seed)
        if self.tokenizer is not None:
            tokens = self.tokenizer.tokens(batch.images).scatter(1, places, predicted.argmax(dim=2))
            levels = preprocess.levels(self.tokenizer.restored(tokens))
            rows = torch.arange(len(places), device=places.device)[:, None]
            return places, cut_patches(levels, config.patch_size)[rows, places]
        if self.task.patch_target == "pixels":
            levels = preprocess.levels(predicted.reshape(-1, config.channels, *config.patch_size))
            return places, levels.view(*places.shape, *levels.shape[1:])
        cells = CELLS[self.task.patch_target]
        classes = predicted.reshape(*places.shape, cells**2, -1).argmax(dim=3)
        return places, colour_levels(classes, cells, config.channels, config.patch_size)


# Blocks of hidden patches: rectangles of random size, shape and place, as in BEiT (2106.08254, algorithm 1).


SMALLEST = 16 / 196
"""Smallest area of a block, as a fraction of the patches: 16 of 14 x 14 patches in the published code."""

ASPECT = 0.3
"""Smallest ratio of the sides of a block. The largest one is its reciprocal."""

TRIES, FAILURES = 200, 10
"""Numbers of blocks that are tried for an image, and of those that may fail in a row."""


def draw_block_order(batch: Batch, grid: tuple[int, int], count: int, *, seed: int) -> Int64[np.ndarray, "b n"]:
    """Return an order of the patches of each image whose first `count` patches consist of blocks.

    If the blocks have fewer patches, random ones follow. All patches of blocks are in a random order. The order is a
    pure function of the seed and of the image's epoch, sample and view.
    """
    order = draw_order(batch, math.prod(grid), seed=seed)
    is_hidden = draw_blocks(batch, grid, count, seed=seed).reshape(len(order), -1)
    later = ~np.take_along_axis(is_hidden, order, axis=1)
    return np.take_along_axis(order, later.argsort(axis=1, kind="stable"), axis=1)


def draw_blocks(
    batch: Batch,
    grid: tuple[int, int],
    count: int | Int64[np.ndarray, " b"],
    *,
    seed: int,
    smallest: int | None = None,
) -> Bool[np.ndarray, "b rows columns"]:
    """Return a mask of blocks of each image, which has at most `count` patches.

    The area of a block is uniform between the smallest one and the number of patches that are still missing, and the
    logarithm of its ratio of sides is uniform. A block that does not fit, that adds no patch, or that adds too many is
    not used. An image is complete after 10 such blocks in a row.
    """
    rows, columns = grid
    uniform = keyed_uniform(seed, *batch_key(batch), draws=4 * TRIES, first=Slot.PATCH_BLOCKS).astype(np.float64)
    hidden = np.zeros((len(uniform), rows, columns), bool)
    missing, failures = np.full(len(uniform), count), np.zeros(len(uniform), np.int64)
    least = SMALLEST * rows * columns if smallest is None else smallest
    for area, ratio, top, left in uniform.reshape(len(uniform), TRIES, 4).transpose(1, 2, 0):
        areas, ratios = least + area * (missing - least), ASPECT ** (1 - 2 * ratio)
        height, width = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        top, left = np.floor(top * (rows - height + 1)), np.floor(left * (columns - width + 1))
        is_inside = _between(rows, top, height)[:, :, None] & _between(columns, left, width)[:, None, :]
        new = is_inside & ~hidden
        added = new.sum(axis=(1, 2))
        is_used = (height < rows) & (width < columns) & (added > 0) & (added <= missing) & (failures < FAILURES)
        hidden |= new & is_used[:, None, None]
        missing -= np.where(is_used, added, 0)
        failures = np.where(is_used, 0, failures + 1)
        if ((missing == 0) | (failures >= FAILURES)).all():
            break
    return hidden


def _between(size: int, first: np.ndarray, length: np.ndarray) -> Bool[np.ndarray, "b size"]:
    """Return a mask of the indices below `size` from `first` on, of this length."""
    places = np.arange(size)
    return (places >= first[:, None]) & (places < (first + length)[:, None])


# Targets of masked patch prediction: the pixels of patches, their colours as classes, and their tokens. The levels 0
# to 255 of a channel are divided into 8 equal bins, which are 3 bits. The paper does not state its bins. A colour of
# three channels is one of 512 classes: 64 times the bin of red, plus 8 times the bin of green, plus the bin of blue.
# A grey image has one channel, so its levels are 8 classes. Grey images that are read as three equal channels use the
# 8 of the 512 classes that are grey. Tokens are those of a trained tokenizer (`vitrail.tasks.tokenizer`).


PatchTarget = Literal["mean-colour", "colours", "pixels", "tokens"]

CELLS: dict[PatchTarget, int] = {"mean-colour": 1, "colours": 4}
"""Rows and columns of cells of a patch whose mean colours are predicted."""

BINS = 8
"""Bins of the levels of a channel."""


def colours(channels: int) -> int:
    """Return the number of classes of a colour: 512 with three channels, 8 with one."""
    return BINS**channels


def colour_classes(patches: Int64[Tensor, "b n c ph pw"], cells: int) -> Int64[Tensor, "b n cells2"]:
    """Return the class of the mean colour of each of `cells` x `cells` cells of each patch, in row-major order.

    If the number of cells does not divide a side of the patch, neighbouring cells share pixels, as in adaptive average
    pooling. Means are computed in whole numbers, so a mean on the border of two bins belongs to the upper bin on every
    device.
    """
    height, width = patches.shape[3:]
    found = []
    for top, bottom in _windows(height, cells):
        for left, right in _windows(width, cells):
            sums = patches[:, :, :, top:bottom, left:right].sum(dim=(3, 4))
            bins = sums * BINS // (256 * (bottom - top) * (right - left))
            classes = torch.zeros_like(bins[:, :, 0])
            for channel in bins.unbind(dim=2):
                classes = classes * BINS + channel
            found.append(classes)
    return torch.stack(found, dim=2)


def colour_levels(
    classes: Int64[Tensor, "b n cells2"], cells: int, channels: int, patch_size: tuple[int, int]
) -> Int64[Tensor, "b n c ph pw"]:
    """Return patches whose cells have the middle levels of these colours. Pixels that cells share belong to the last
    one."""
    height, width = patch_size
    patches = classes.new_zeros(*classes.shape[:2], channels, height, width)
    places = [(rows, columns) for rows in _windows(height, cells) for columns in _windows(width, cells)]
    for number, ((top, bottom), (left, right)) in enumerate(places):
        for channel in range(channels):
            bins = classes[:, :, number] // BINS ** (channels - 1 - channel) % BINS
            levels = bins * (256 // BINS) + 128 // BINS
            patches[:, :, channel, top:bottom, left:right] = levels[:, :, None, None]
    return patches


def _windows(size: int, cells: int) -> list[tuple[int, int]]:
    """Return the first pixel of each cell along a side, and the pixel after the last one."""
    return [(number * size // cells, -(-(number + 1) * size // cells)) for number in range(cells)]
