"""The common part of all tasks in which a network predicts hidden patches of an image from its visible patches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import GREY
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.models.network import shared_copy
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import raise_problems
from vitrail.tasks.pictures import ROWS, Picture, PictureTable, decoded, paste_patches, picture_of, spread
from vitrail.tasks.task import (
    EVALUATION_SEED,
    HeadlessObjective,
    HeadlessTask,
    LossOutput,
    Objective,
    mean_losses,
    mean_of_counted,
)
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class PatchTask(HeadlessTask):
    """A task in which a Vision Transformer predicts hidden patches. The saved model is the network without a head.

    The constructor raises `ConfigError` if fields have invalid values. The message names all of them.
    """

    loss_metric = "patch_loss"

    hidden: ClassVar[str]
    """Word for hidden patches in messages."""
    fraction: ClassVar[str]
    """Name of the field with the fraction of the patches that are hidden."""
    restored_note: ClassVar[str] = ""
    """Sentence about the predictions in the run's report."""

    def _problems(self) -> Iterator[str]:
        if not 0 < (fraction := getattr(self, self.fraction)) < 1:
            yield (
                f"{self.fraction}={fraction} is not between 0 and 1, so no patch would be predicted or none would be "
                f"visible; choose a fraction such as {type(self).__dataclass_fields__[self.fraction].default}"
            )
        yield from super()._problems()

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` unless the network is a transformer that has position embeddings, embeds every patch
        separately, and has at least one hidden and one visible patch in its images."""
        raise_problems(self._misfits(self.transformer(network)))

    def transformer(self, network: AnyConfig | None) -> ViTConfig:
        """Return the config of a network if the network is a transformer. Raise `ConfigError` for any other network."""
        config = transformer_config(network)
        if config is not None:
            return config
        kind = "a network of your own class" if network is None else "a ResNet"
        raise ConfigError(
            f"task={self.name!r} hides the embeddings of patches, which {kind} does not have; choose a Vision "
            "Transformer, such as variant='ViT-S/16'"
        )

    def _misfits(self, network: ViTConfig) -> Iterator[str]:
        needs = f"task={self.name!r}"
        if network.root is not None:
            yield (
                f"{needs} needs patches that do not overlap, but the tokens of a hybrid do, so that the neighbours of "
                f"a {self.hidden} patch would show its pixels; choose a variant without convolutions, such as "
                "'ViT-S/16'"
            )
        if network.positions == "none":
            yield (
                f"{needs} needs positions, because nothing else distinguishes {self.hidden} patches, but the network "
                "has positions='none'; choose positions='learned'"
            )
        yield from unfit_parts(network, needs)
        patches = math.prod(network.grid)
        if not 0 < (count := self.hidden_of(patches)) < patches:
            yield (
                f"{self.fraction}={getattr(self, self.fraction)} of {patches} patches ({network.grid[0]} x "
                f"{network.grid[1]}) leaves no {'visible' if count else self.hidden} patch; choose another fraction, a "
                "larger image_size or smaller patches"
            )

    def hidden_of(self, patches: int) -> int:
        """Return the number of hidden patches of an image with this many patches."""
        return round(getattr(self, self.fraction) * patches)

    @torch.no_grad()
    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return images, their visible patches, and the images with restored patches."""
        assert isinstance(objective, PatchObjective)
        preprocess = bundle.preprocess
        samples, images = decoded(preprocess, source, spread(len(source), ROWS), bundle.device)
        if not samples:
            return ()
        count = len(samples)
        batch = Batch(
            images=images,
            labels=torch.full((count,), -1),
            valid=torch.ones(count, dtype=torch.bool),
            samples=torch.tensor(samples),
            epochs=torch.zeros(count, dtype=torch.int64),
        )
        places, patches = objective.restored(shared_copy(bundle.network), batch, preprocess, seed=EVALUATION_SEED)
        levels = preprocess.levels(images)
        empty = torch.full_like(patches, GREY)
        columns = {
            "image": levels,
            f"{self.hidden} patches": paste_patches(levels, places, empty),
            "restored": paste_patches(levels, places, patches),
        }
        rows = tuple(
            tuple(Picture(picture_of(pictures[row]), (name,)) for name, pictures in columns.items())
            for row in range(count)
        )
        text = (
            f"Each row shows a held-out image, the same image with its {self.hidden} patches in grey, and the image "
            f"with the network's predictions of these patches. {self.restored_note}".rstrip()
        )
        return (PictureTable("Restored patches", text, rows),)


Restored = tuple[Int64[Tensor, "b k"], Int64[Tensor, "b k c ph pw"]]
"""Predictions of hidden patches: their indices in row-major order of the grid, and their levels from 0 to 255."""


class PatchObjective(HeadlessObjective):
    """A network that predicts hidden patches through a decoder.

    The decoder is trained beside the network. It is in checkpoints, but not in the saved model. The targets are
    computed from the images of the batch, so they follow the augmentation.
    """

    measured: tuple[str, ...] = ("patch_loss",)
    """Names of the values that `losses` returns."""

    def forward(self, batch: Batch) -> LossOutput:
        found = self.losses(self.network, batch, self.preprocess, seed=self.seed)
        metrics = {
            name: mean_of_counted(values.detach(), batch.valid)
            for name, values in found.items()
            if name != "patch_loss"
        }
        return LossOutput(mean_of_counted(found["patch_loss"], batch.valid), metrics)

    @abstractmethod
    def losses(
        self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int
    ) -> Mapping[str, Float[Tensor, " b"]]:
        """Return the values that `measured` names for each image of a batch of normalised images.

        Each value is a mean over the hidden patches. `network` is the network in training or a copy of it.
        """

    @abstractmethod
    def restored(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> Restored:
        """Return the predictions of the patches that `losses` hides, as levels."""

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the means of the values that `losses` returns, with the counts `images` and `skipped`. The hidden
        patches of each image are the same in every measurement."""
        network, preprocess = shared_copy(outputs.bundle.network), outputs.bundle.preprocess
        losses = partial(self.losses, network, preprocess=preprocess, seed=EVALUATION_SEED)
        return mean_losses(outputs, held_out, self.measured, losses)


def unfit_parts(network: ViTConfig, needs: str) -> Iterator[str]:
    """Yield a message for each part of a network that a task of patches without a head does not train, and for patch
    dropout. `needs` names the task."""
    if network.patch_dropout:
        yield (
            f"patch_dropout={network.patch_dropout} removes patches that {needs} would predict; set it to 0, and leave "
            "early_patch_dropout out"
        )
    if network.pool == "map":
        yield (
            f"pool='map' has weights that {needs} does not train, because it trains no pooled vector; choose pool='gap'"
        )
    if network.projection:
        yield (
            f"projection={network.projection} is a matrix that {needs} does not train, and embeddings would pass "
            "through it; choose projection=0, and start from no model that has a projection"
        )
    if network.head_hidden:
        yield (
            f"head_hidden={network.head_hidden} is a layer that {needs} does not train, because the network has no "
            "head; set head_hidden to 0"
        )


def decoder_config(network: ViTConfig, *, width: int, depth: int, heads: int, registers: int = 0) -> ViTConfig:
    """Return the config of the blocks of a decoder that predicts the pixels of a network's patches. Raise `ConfigError`
    if its width and its number of heads do not fit together."""
    if width % heads or width % 4:
        raise ConfigError(
            f"decoder_width={width} with decoder_heads={heads} does not work, because the width must be divisible by 4 "
            "and by the number of heads; choose both"
        )
    return ViTConfig(
        image_size=network.image_size,
        patch_size=network.patch_size,
        cut_uneven=network.cut_uneven,
        channels=network.channels,
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=4 * width,
        num_classes=0,
        pool="gap",
        registers=registers,
        positions="sincos-2d-mae",
        activation="gelu" if network.activation == "swiglu" else network.activation,
        norm_eps=network.norm_eps,
    )


def draw_order(batch: Batch, patches: int, *, seed: int) -> Int64[np.ndarray, "b n"]:
    """Return a random order of the patches of each image.

    The order is a pure function of the seed and of the image's epoch, sample and view.
    """
    uniform = keyed_uniform(seed, *batch_key(batch), draws=patches, first=Slot.PATCH_ORDER)
    return uniform.argsort(axis=1, kind="stable")


def batch_key(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the epochs, samples and views of a batch. The random numbers of its images depend on them."""
    # DLPack shares memory on the CPU only, so it cannot wait for a device.
    return np.from_dlpack(batch.epochs), np.from_dlpack(batch.samples), np.from_dlpack(batch.views)


def tokens_at(tokens: Float[Tensor, "b n width"], places: Int64[Tensor, "b k"]) -> Float[Tensor, "b k width"]:
    """Return the tokens of each image at these places."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))
