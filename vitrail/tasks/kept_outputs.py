"""Outputs of frozen weights, which are computed once for each image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.machine import available_memory
from vitrail.models.shortcuts import has_hooks, is_plain
from vitrail.models.vit import VisionTransformer

KEPT_FRACTION = 1 / 6
"""Fraction of the free memory that the outputs may take."""


class KeptOutputs:
    """The outputs of frozen weights for images, kept in main memory as far as it allows.

    An image is recognised by its pixels, and its outputs are computed apart from those of other images, so they do not
    depend on what was kept.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, Tensor] = {}
        self._free: float | None = None

    @torch.no_grad()
    def __call__(
        self, images: Float[Tensor, "b c h w"], compute: Callable[[Float[Tensor, "1 c h w"]], Float[Tensor, "1 ..."]]
    ) -> Float[Tensor, "b ..."]:
        """Return what `compute` returns for each image."""
        return torch.cat([self._one(image[None], compute) for image in images])

    def _one(self, image: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        key = hashlib.blake2b(np.ascontiguousarray(image.numpy()).data, digest_size=16).digest()
        if (kept := self._kept.get(key)) is not None:
            return kept
        found = compute(image)
        if self._free is None:
            self._free = _memory() * KEPT_FRACTION
        if (size := found.nbytes) <= self._free:
            self._free -= size
            self._kept[key] = found
        return found


def is_frozen(network: Any, trained: Collection[nn.Parameter] = ()) -> bool:
    """Return True if the tokens of an image do not change while the network is trained: no weight is trained but those
    of `trained`, and nothing drops values, has hooks or is the user's own."""
    if not is_plain(network, VisionTransformer):
        return False
    config, allowed = network.config, {id(weight) for weight in trained}
    drops = config.dropout or config.stochastic_depth or network.patch_dropout
    return not drops and not any(
        has_hooks(part) or any(one.requires_grad and id(one) not in allowed for one in part.parameters(recurse=False))
        for part in network.modules()
    )


def _memory() -> float:
    """Return the free memory in bytes, or 0 if it is unknown."""
    try:
        return float(available_memory(torch.device("cpu")))
    except ConfigError:
        return 0
