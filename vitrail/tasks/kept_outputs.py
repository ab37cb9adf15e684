"""Outputs of frozen weights, which are computed once for each image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.cores import compute_threads
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
        rows = [image[None] for image in images]
        keys = [hashlib.blake2b(np.ascontiguousarray(row.numpy()).data, digest_size=16).digest() for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._kept}
        found = dict(zip(missing, in_parallel(compute, [*missing.values()]), strict=True))
        outputs = [found[key] if key in found else self._kept[key] for key in keys]
        if self._free is None:
            self._free = _memory() * KEPT_FRACTION
        for key, output in found.items():
            if (size := output.nbytes) <= self._free:
                self._free -= size
                self._kept[key] = output
        return torch.cat(outputs)


def in_parallel(compute: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> list[Tensor]:
    """Return `compute` of each image. Each compute thread works on an image of its own, because the products of one
    image are too small to be divided: two threads are twice as fast as both on one image."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def one(image: Tensor) -> Tensor:
        is_on = dtype is not None  # the state of gradients and of autocast belongs to a thread
        with compute_threads(1), torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=is_on):
            return compute(image)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(one, images))


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
