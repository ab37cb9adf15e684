"""The outputs of a network of which the task trains the head alone: the tokens of an image are computed once."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.machine import available_memory
from vitrail.models.network import Features
from vitrail.models.shortcuts import has_hooks, is_plain
from vitrail.models.vit import VisionTransformer
from vitrail.tasks.task import Objective

KEPT_FRACTION = 1 / 6
"""Fraction of the free memory that the tokens of images may take."""


class DenseObjective(Objective):
    """An objective of boxes or masks, whose network is called by `outputs`.

    If nothing below the head is trained, the tokens of an image are the same in every step. They are computed once for
    each image and its mirror image, and kept in main memory as far as it allows. An image is recognised by its pixels,
    and its tokens are computed apart from those of other images, so they do not depend on what was kept.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._kept: dict[bytes, Tensor] = {}
        self._free: float | None = None

    def outputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b rows outputs"]:
        """Return the outputs of the network in float32."""
        network = self.network
        if not (self.training and images.device.type == "cpu" and is_frozen_below_head(network)):
            return network(images).float()
        tokens = torch.cat([self._tokens(image[None]) for image in images])
        prefix, grid = network.config.prefix, network.config.grid_of(*images.shape[2:])
        first = int(network.config.has_class_token)
        features = Features(tokens[:, 0] if first else None, tokens[:, first:prefix], tokens[:, prefix:], grid)
        return network.head(features).float()

    @torch.no_grad()
    def _tokens(self, image: Float[Tensor, "1 c h w"]) -> Float[Tensor, "1 n width"]:
        """Return the tokens of an image, class token and registers first."""
        key = hashlib.blake2b(np.ascontiguousarray(image.numpy()).data, digest_size=16).digest()
        if (kept := self._kept.get(key)) is not None:
            return kept
        found: Features = self.network.features(image)
        first = [] if found.cls is None else [found.cls[:, None]]
        tokens = torch.cat([*first, found.registers, found.patches], dim=1)
        if self._free is None:
            self._free = _memory() * KEPT_FRACTION
        if (size := tokens.nbytes) <= self._free:
            self._free -= size
            self._kept[key] = tokens
        return tokens


def is_frozen_below_head(network: Any) -> bool:
    """Return True if the tokens of an image do not change while the network is trained: only its head is trained, and
    nothing below drops values, has hooks or is the user's own."""
    if not is_plain(network, VisionTransformer) or network.head is None:
        return False
    config, of_head = network.config, {id(weight) for weight in network.head.parameters()}
    drops = config.dropout or config.stochastic_depth or network.patch_dropout
    return not drops and not any(
        has_hooks(part) or any(one.requires_grad and id(one) not in of_head for one in part.parameters(recurse=False))
        for part in network.modules()
    )


def _memory() -> float:
    """Return the free memory in bytes, or 0 if it is unknown."""
    try:
        return float(available_memory(torch.device("cpu")))
    except ConfigError:
        return 0
