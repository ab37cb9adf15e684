"""Masked autoencoders: "Masked Autoencoders Are Scalable Vision Learners" (2111.06377).

Most patches of an image are removed. The network encodes the others, and a light decoder predicts the pixels of the
removed patches. A step is cheap because the network never sees the removed patches. No labels are needed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.data.augment.operations import on_device
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.blocks import make_blocks
from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features, Footprint, FootprintPrecision
from vitrail.models.positions import sincos_2d
from vitrail.models.tokens import cut_patches
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import setting
from vitrail.tasks.task import Objective, StepCost, TaskMetric
from vitrail.tasks.unlabelled import PatchObjective, PatchTask, Restored, decoder_config, draw_order

PUBLISHED_WIDTH, PUBLISHED_DEPTH, PUBLISHED_HEADS = 512, 8, 16
"""The decoder of the paper, for all sizes of the network."""


@dataclass(frozen=True, kw_only=True)
class Mae(PatchTask):
    """Remove most patches of images and predict their pixels, which needs no labels.

    The saved model is the network without a head.
    """

    name = "mae"
    metrics = (TaskMetric("patch_loss", higher_is_better=False),)
    hidden = "removed"
    restored_note = "If normalised pixels are predicted, each patch has the mean and contrast of the original one."
    fraction = "remove_fraction"

    remove_fraction: float = 0.75
    """Fraction of each image's patches that the network does not see. The loss counts only these patches."""
    normalise_pixels: bool = True
    """True to predict the pixels of each patch with mean 0 and standard deviation 1."""
    decoder_width: int | None = setting(None, least=4)
    """Width of the decoder's tokens. By default 512, or half of the network's width if the network is narrower than
    512."""
    decoder_depth: int | None = setting(None, least=1)
    """Number of blocks of the decoder. By default 8, or 2 if the network is narrower than 512."""
    decoder_heads: int | None = setting(None, least=1)
    """Number of attention heads of the decoder. By default 16, or those of the network if it is narrower than 512."""

    def hidden_of(self, patches: int) -> int:
        """Return the number of removed patches. The number of visible ones is rounded down, as in the published
        code."""
        return patches - int(patches * (1 - self.remove_fraction))

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` as `PatchTask.check_network`, and if the decoder's sizes do not fit together."""
        super().check_network(network)
        network = self.transformer(network)
        if network.attention_kind.needs_grid:
            raise ConfigError(
                f"attention={network.attention!r} needs the whole grid of patches, but task={self.name!r} encodes some "
                "of them; choose attention='full'"
            )
        self.decoder_of(network)

    def decoder_of(self, network: ViTConfig) -> ViTConfig:
        """Return the config of the decoder's blocks. Raise `ConfigError` if its sizes do not fit together."""
        is_narrow = network.width < PUBLISHED_WIDTH
        width = self.decoder_width or (network.width // 2 if is_narrow else PUBLISHED_WIDTH)
        depth = self.decoder_depth or (2 if is_narrow else PUBLISHED_DEPTH)
        heads = self.decoder_heads or (network.heads if is_narrow else PUBLISHED_HEADS)
        return decoder_config(network, width=width, depth=depth, heads=heads, registers=network.prefix)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the network computes the visible patches and the decoder all of them."""
        network = self.transformer(network)
        decoder, patches = self.decoder_of(network), math.prod(network.grid)
        removed, tokens = self.hidden_of(patches), patches + network.prefix
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in MaeDecoder(decoder, network.width).parameters())
        pixels = network.channels * math.prod(network.patch_size)
        attention, mlp = decoder.attention_kind, 2 * decoder.width * decoder.mlp_width
        macs = decoder.macs() - patches * pixels * decoder.width  # without patch embedding, which a decoder lacks
        unread = attention.macs(tokens, tokens) - attention.macs(tokens, removed) + (tokens - removed) * mlp
        macs += (tokens - removed) * network.width * decoder.width + removed * decoder.width * pixels - unread
        held: Footprint = decoder.footprint(decoder.image_size, precision)
        return StepCost(
            dataclasses.replace(
                network, pool="gap", class_token=network.has_class_token, patch_dropout=removed / patches
            ),
            parameters=parameters,
            image_bytes=held.activations + held.passing + 16 * removed * pixels,
            flops=6 * macs,
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return MaeObjective(network, self)


class MaeObjective(PatchObjective):
    """A network that encodes visible patches, and a decoder that predicts the pixels of the others."""

    def __init__(self, network: nn.Module, task: Mae) -> None:
        super().__init__(network)
        self.task = task
        config: ViTConfig = self.network.config
        self.decoder = MaeDecoder(task.decoder_of(config), config.width)

    def losses(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> dict[str, Tensor]:
        """Return `patch_loss` of each image, which is the mean squared error of the pixels of removed patches."""
        removed, predicted = self.predicted(network, batch, seed=seed)
        normalises = self.task.normalise_pixels
        pixels = patch_pixels(batch.images, network.config.patch_size, removed, normalise=normalises)
        return {"patch_loss": (predicted - pixels).square().mean(dim=(1, 2))}

    def predicted(
        self, network: Any, batch: Batch, *, seed: int
    ) -> tuple[Int64[Tensor, "b k"], Float[Tensor, "b k pixels"]]:
        """Return the removed patches of each image, and the prediction of their pixels."""
        config = cast(ViTConfig, network.config)
        patches = math.prod(config.grid_of(*batch.images.shape[2:]))
        order = draw_order(batch, patches, seed=seed)
        count = self.task.hidden_of(patches)
        removed, visible = (
            on_device(np.ascontiguousarray(part), batch.images.device) for part in (order[:, :count], order[:, count:])
        )
        return removed, self.decoder(network.encode(batch.images, keep=visible), visible, removed)

    def restored(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> Restored:
        """Return the predicted levels. Normalised pixels get the mean and the standard deviation of the patch."""
        removed, pixels = self.predicted(network, batch, seed=seed)
        height, width = network.config.patch_size
        if self.task.normalise_pixels:
            whole = patch_pixels(batch.images, (height, width), removed, normalise=False)
            variance, mean = torch.var_mean(whole, dim=2, keepdim=True)
            pixels = pixels * (variance + 1e-6).sqrt() + mean
        levels = preprocess.levels(pixels.reshape(-1, batch.images.shape[1], height, width))
        return removed, levels.view(*removed.shape, *levels.shape[1:])


def patch_pixels(
    images: Float[Tensor, "b c h w"], patch_size: tuple[int, int], places: Int64[Tensor, "b k"], *, normalise: bool
) -> Float[Tensor, "b k pixels"]:
    """Return the pixels of the patches at these places. With `normalise`, the pixels of each patch have mean 0 and
    standard deviation 1, unless the patch is nearly constant."""
    rows = torch.arange(len(places), device=places.device)[:, None]
    pixels = cut_patches(images, patch_size)[rows, places].flatten(2)
    if not normalise:
        return pixels
    variance, mean = torch.var_mean(pixels, dim=2, keepdim=True)
    return (pixels - mean) / (variance + 1e-6).sqrt()


# The decoder of masked autoencoders: a light transformer that sees the encoded patches and predicts the others.


class MaeDecoder(nn.Module):
    """Predicts the pixels of removed patches from the tokens of the visible ones (2111.06377, section 3).

    The encoder's tokens are projected to the decoder's width. A learned mask token stands for every removed patch. All
    patches receive fixed sines and cosines of their places. The class token and registers have no position, as in the
    published code. Attention does not depend on the order of tokens, so the removed patches come first, and the last
    block computes only them.
    """

    def __init__(self, config: ViTConfig, width: int) -> None:
        """`config` describes the blocks of the decoder, and `width` is the width of the encoder's tokens."""
        super().__init__()
        self.config = config
        self.embedding = Linear(width, config.width)
        self.mask_token = nn.Parameter(torch.empty(config.width))
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.channels * config.patch_size[0] * config.patch_size[1])
        self.initialise()

    def forward(
        self, encoded: Features, visible: Int64[Tensor, "b k"], removed: Int64[Tensor, "b m"]
    ) -> Float[Tensor, "b m pixels"]:
        """Return the predictions for the removed patches, in the order of `removed`.

        `encoded.patches` has the tokens of the patches `visible`, in this order. Both are indices of patches in
        row-major order of the grid.
        """
        count = removed.shape[1]
        prefix = [] if encoded.cls is None else [encoded.cls[:, None]]
        tokens = self.embedding(torch.cat([*prefix, encoded.registers, encoded.patches], dim=1))
        tokens = tokens.to(self.mask_token.dtype)  # under autocast, the residual stream stays in float32
        first = tokens.shape[1] - visible.shape[1]
        places = sincos_2d(encoded.grid, self.config.width, device=tokens.device, lowest=False).to(tokens.dtype)
        masks = self.mask_token + places[removed]
        z = torch.cat([masks, tokens[:, :first], tokens[:, first:] + places[visible]], dim=1)
        return self.head(self.norm(self.blocks(z, read=count))).float()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights as the published code does."""
        nn.init.normal_(self.mask_token, std=0.02)
        INITIAL_WEIGHTS["mae"].draw_dense(self)
