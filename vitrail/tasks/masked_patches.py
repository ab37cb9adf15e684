"""Masked patch prediction, as in appendix B.1.2 of "An Image is Worth 16x16 Words" (2010.11929).

A fraction of the patch embeddings of an image is corrupted, and the network predicts the colours or the pixels of the
corrupted patches from the others. No labels are needed. `vitrail.tasks.patch_targets` computes what is predicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.data.augmentation.draws import Slot, keyed_uniform
from vitrail.data.augmentation.operations import on_device
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Ranks, evaluation_batches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.patches import Replace, cut_patches
from vitrail.models.predictor import shared_copy
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import one_of, raise_problems
from vitrail.tasks.patch_targets import CELLS, PatchTarget, colour_classes, colours
from vitrail.tasks.task import LossOutput, Objective, StepCost, Task, TaskMetric, mean_of_counted
from vitrail.weights.bundle import OutputKind

__all__ = ["Corruption", "MaskedPatches", "MaskedPatchesObjective", "PatchErrors", "PatchLosses", "draw_corruption"]

EVALUATION_SEED = 0
"""Seed of the corrupted patches of held-out images. It is fixed, so that the losses of all runs can be compared."""


@dataclass(frozen=True, kw_only=True)
class MaskedPatches(Task):
    """Predict the colours or the pixels of corrupted patches, which needs no labels.

    The saved model is the network without a head. The constructor raises `ConfigError` if fields have invalid values.
    The message names all of them.
    """

    name = "masked-patches"
    targets = ("none", "class", "classes", "numbers")
    output_noun = "output"
    metrics = (
        TaskMetric("patch_loss", higher_is_better=False),
        TaskMetric("colour_accuracy", is_fraction=True),
    )
    loss_metric = "patch_loss"

    patch_target: PatchTarget = "mean-colour"
    """Prediction for a corrupted patch: its mean colour in 3 bits per channel (mean-colour), 4 x 4 such colours
    (colours), or its normalised pixels with the squared error (pixels)."""
    corrupt_fraction: float = 0.5
    """Fraction of each image's patches that are corrupted. The loss counts only these patches."""
    mask_fraction: float = 0.8
    """Fraction of the corrupted patches whose embedding becomes the learned mask embedding."""
    swap_fraction: float = 0.1
    """Fraction of the corrupted patches whose embedding becomes that of another patch of the image. The rest keep their
    own embedding."""

    def _problems(self) -> Iterator[str]:
        yield from one_of(self, patch_target=PatchTarget)
        if not 0 < self.corrupt_fraction < 1:
            yield (
                f"corrupt_fraction={self.corrupt_fraction} is not between 0 and 1, so no patch would be predicted or "
                "none would be visible; choose a fraction such as 0.5"
            )
        for name in ("mask_fraction", "swap_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name}={getattr(self, name)} is not in [0, 1]"
        if self.mask_fraction + self.swap_fraction > 1 + 1e-9:
            yield (
                f"mask_fraction={self.mask_fraction} and swap_fraction={self.swap_fraction} add up to more than 1; "
                "choose smaller fractions"
            )
        if self.select == "colour_accuracy" and self.patch_target == "pixels":
            yield "select='colour_accuracy' needs colours, but patch_target='pixels' predicts none; choose patch_loss"
        yield from super()._problems()

    @property
    def output(self) -> OutputKind:
        """Meaning of the outputs of the saved model, which has none."""
        return "softmax"

    def check_data(self, splits: Splits) -> None:
        """Accept all images, with and without targets."""

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` unless the network is a transformer that knows the places of patches, sees every patch
        on its own, and has at least one corrupted and one visible patch in its images."""
        if not isinstance(network, ViTConfig):
            kind = "a network of your own class" if network is None else "a ResNet"
            raise ConfigError(
                f"task={self.name!r} replaces the embeddings of patches, which {kind} does not have; choose a Vision "
                "Transformer, such as variant='ViT-S/16'"
            )
        raise_problems(self._misfits(network))

    def _misfits(self, network: ViTConfig) -> Iterator[str]:
        needs = f"task={self.name!r}"
        if network.root is not None:
            yield (
                f"{needs} needs patches that do not overlap, but the tokens of a hybrid do, so that the neighbours of "
                "a corrupted patch would show its pixels; choose a variant without convolutions, such as 'ViT-S/16'"
            )
        if network.positions == "none":
            yield (
                f"{needs} needs positions, because nothing else tells corrupted patches apart, but the network has "
                "positions='none'; choose positions='learned'"
            )
        if network.patch_dropout:
            yield (
                f"patch_dropout={network.patch_dropout} removes patches that {needs} would predict; set it to 0, and "
                "leave early_patch_dropout out"
            )
        if network.pool == "map":
            yield (
                f"pool='map' has weights that {needs} does not train, because it trains no pooled vector; choose "
                "pool='gap'"
            )
        if network.head_hidden:
            yield (
                f"head_hidden={network.head_hidden} is a layer that {needs} does not train, because the network has no "
                "head; set head_hidden to 0"
            )
        patches = math.prod(network.grid)
        if not 0 < (count := self.corrupted_of(patches)) < patches:
            yield (
                f"corrupt_fraction={self.corrupt_fraction} of {patches} patches ({network.grid[0]} x "
                f"{network.grid[1]}) leaves no {'visible' if count else 'corrupted'} patch; choose another fraction, a "
                "larger image_size or smaller patches"
            )

    def corrupted_of(self, patches: int) -> int:
        """Return the number of corrupted patches of an image with this many patches."""
        return round(self.corrupt_fraction * patches)

    def outputs_of(self, network: ViTConfig) -> int:
        """Return the number of outputs of the decoder for one patch."""
        if self.patch_target == "pixels":
            return network.channels * math.prod(network.patch_size)
        return CELLS[self.patch_target] ** 2 * colours(network.channels)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the network computes all tokens and the decoder the corrupted ones.

        At the peak, the outputs of the decoder exist three times, or the levels of all pixels twice as whole numbers.
        """
        assert isinstance(network, ViTConfig)
        patches, outputs = self.corrupted_of(math.prod(network.grid)), self.outputs_of(network)
        levels = 0 if self.patch_target == "pixels" else 16 * network.channels * math.prod(network.image_size)
        return StepCost(
            dataclasses.replace(network, pool="gap", class_token=network.has_class_token),
            parameters=network.width + outputs * (network.width + 1),
            image_bytes=max(12 * patches * outputs, levels),
            flops=6 * patches * outputs * network.width,
        )

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """Return no names, because the network has no head."""
        return ()

    def main_metric(self, splits: Splits) -> str:
        return "patch_loss"

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the network with a mask embedding and a linear decoder. Raise `ConfigError` as `check_network`."""
        self.check_network(getattr(network, "config", None))
        return MaskedPatchesObjective(network, self)

    def evaluator(self, objective: Objective) -> Evaluator:
        """Return the evaluator of the loss and of the predicted colours, with fixed corrupted patches."""
        assert isinstance(objective, MaskedPatchesObjective)
        return PatchErrors(objective)


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
            others = embeddings.gather(1, _columns(self.sources, width))
            masks = token.to(embeddings.dtype).expand(*self.masked.shape, -1)
            places = _columns(torch.cat([self.masked, self.swapped], dim=1), width)
            return embeddings.scatter(1, places, torch.cat([masks, others], dim=1))

        return replace


def draw_corruption(task: MaskedPatches, batch: Batch, patches: int, *, seed: int) -> Corruption:
    """Return the corrupted patches of a batch whose images have this many patches.

    The corruption of an image is a pure function of the seed and of the image's epoch, sample and view. All images have
    exactly as many masked, swapped and kept patches as the fractions say, rounded to whole patches.
    """
    # DLPack shares memory on the CPU only, so it cannot wait for a device.
    key = np.from_dlpack(batch.epochs), np.from_dlpack(batch.samples), np.from_dlpack(batch.views)
    order = keyed_uniform(seed, *key, draws=patches, first=Slot.PATCH_ORDER).argsort(axis=1, kind="stable")
    corrupted = task.corrupted_of(patches)
    masked = round(task.mask_fraction * corrupted)
    swapped = min(round(task.swap_fraction * corrupted), corrupted - masked)
    places = order[:, masked : masked + swapped]
    uniform = keyed_uniform(seed, *key, draws=swapped, first=Slot.PATCH_SOURCE)
    sources = (uniform * (patches - 1)).astype(np.int64)
    sources += sources >= places  # any patch but the swapped one itself
    groups = order[:, :masked], places, sources, order[:, masked + swapped : corrupted]
    device = batch.images.device
    return Corruption(*(on_device(np.ascontiguousarray(group), device) for group in groups))


class PatchLosses(NamedTuple):
    """The loss and the accuracy of each image, as means over its corrupted patches."""

    loss: Float[Tensor, " b"]
    """Cross-entropy per predicted colour, in nats, or squared error per predicted normalised pixel."""
    accuracy: Float[Tensor, " b"] | None
    """Fraction of the predicted colours that are right, or None if pixels are predicted."""


class MaskedPatchesObjective(Objective):
    """A network that predicts corrupted patches through a linear decoder of their encoded tokens.

    The mask embedding and the decoder are trained beside the network. They are in checkpoints, but not in the saved
    model. The targets are computed from the images of the batch, so they follow the augmentation.
    """

    def __init__(self, network: nn.Module, task: MaskedPatches) -> None:
        super().__init__(network)
        self.task = task
        self.seed = 0
        self.preprocess: Preprocess | None = None
        config: ViTConfig = self.network.config
        self.mask_embedding = nn.Parameter(torch.empty(config.width))
        nn.init.normal_(self.mask_embedding, std=0.02)
        self.decoder = nn.Linear(config.width, task.outputs_of(config))
        nn.init.normal_(self.decoder.weight, std=0.02)
        nn.init.zeros_(self.decoder.bias)

    def begin(self, preprocess: Preprocess, seed: int) -> None:
        """Keep the normalisation of the images, which leads back to colours, and the seed of the corrupted patches."""
        self.preprocess, self.seed = preprocess, seed

    def forward(self, batch: Batch) -> LossOutput:
        assert self.preprocess is not None, "`begin` comes before the first step"
        losses = self.losses(self.network, batch, self.preprocess, seed=self.seed)
        metrics = {}
        if losses.accuracy is not None:
            metrics["colour_accuracy"] = mean_of_counted(losses.accuracy.detach(), batch.valid)
        return LossOutput(mean_of_counted(losses.loss, batch.valid), metrics)

    def losses(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> PatchLosses:
        """Return the losses of a batch of normalised images. `network` is the network in training or a copy of it."""
        config = cast(ViTConfig, network.config)
        patches = math.prod(config.grid_of(*batch.images.shape[2:]))
        corruption = draw_corruption(self.task, batch, patches, seed=seed)
        encoded = network.encode(batch.images, replace=corruption.replacing(self.mask_embedding)).patches
        places = corruption.patches
        tokens = encoded.gather(1, _columns(places, encoded.shape[2]))
        predicted = self.decoder(tokens).float()
        rows = torch.arange(len(places), device=places.device)[:, None]
        if self.task.patch_target == "pixels":
            pixels = cut_patches(batch.images, config.patch_size)[rows, places].flatten(2)
            return PatchLosses(F.mse_loss(predicted, pixels, reduction="none").mean(dim=(1, 2)), None)
        levels = cut_patches(preprocess.levels(batch.images), config.patch_size)[rows, places]
        classes = colour_classes(levels, CELLS[self.task.patch_target])
        predicted = predicted.unflatten(2, (classes.shape[2], colours(config.channels)))
        losses = F.cross_entropy(predicted.movedim(3, 1), classes, reduction="none")
        right = (predicted.detach().argmax(dim=3) == classes).float()
        return PatchLosses(losses.mean(dim=(1, 2)), right.mean(dim=(1, 2)))


@dataclass(frozen=True)
class PatchErrors:
    """Measures the loss and the accuracy of predicted colours on held-out images. The corrupted patches of each image
    are the same in every measurement."""

    objective: MaskedPatchesObjective

    @torch.no_grad()
    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `patch_loss`, `colour_accuracy` unless pixels are predicted, `images` and `skipped`."""
        bundle, objective = outputs.bundle, self.objective
        network = shared_copy(bundle.network)
        totals = torch.zeros(3, dtype=torch.float64, device=bundle.device)  # sums of losses and accuracies, images
        skipped: list[Skipped] = []
        ranks = Ranks(outputs.processes.rank, outputs.processes.world)
        batch_size = outputs.batch_size or 256
        for batch in evaluation_batches(
            held_out, bundle.preprocess, batch_size=batch_size, readers=outputs.readers, ranks=ranks
        ):
            skipped += batch.skipped
            batch = batch.to(bundle.device)
            images = bundle.preprocess.normalise(batch.images)
            losses = objective.losses(
                network, dataclasses.replace(batch, images=images), bundle.preprocess, seed=EVALUATION_SEED
            )
            accuracy = torch.zeros_like(losses.loss) if losses.accuracy is None else losses.accuracy
            rows = torch.stack([losses.loss, accuracy, torch.ones_like(losses.loss)]).double()
            totals += torch.where(batch.valid, rows, 0.0).sum(dim=1)
        skipped = [item for part in outputs.processes.gather(skipped) for item in part]
        for item in skipped:
            outputs.on_skip(item)
        loss, right, count = outputs.processes.sum(totals).tolist()
        found = {"patch_loss": loss / max(count, 1)}
        if objective.task.patch_target != "pixels":
            found["colour_accuracy"] = right / max(count, 1)
        return found | {"images": count, "skipped": float(len(skipped))}


def _columns(places: Int64[Tensor, "b k"], width: int) -> Int64[Tensor, "b k width"]:
    """Return indices for `gather` and `scatter` of whole tokens."""
    return places[:, :, None].expand(-1, -1, width)
