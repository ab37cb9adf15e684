"""Parameters and multiply-accumulates of a network by closed form, without making it."""

from __future__ import annotations

import math

from vitrail.models.vit import ViTConfig

__all__ = ["macs", "parameters"]


def parameters(config: ViTConfig) -> int:
    """Trainable numbers of the network that `config` describes."""
    width, mlp = config.width, config.mlp_width
    stem = math.prod(config.patch_size) * config.channels * width + width
    tokens = config.tokens * width + (config.pool == "cls") * width  # positions, class token
    attention = 4 * width * width + 4 * width
    block = attention + 2 * width * mlp + mlp + width + 4 * width  # two norms of 2 * width
    hidden = config.head_hidden * (width + 1)
    head = config.num_classes * ((config.head_hidden or width) + 1)
    return stem + tokens + config.depth * block + 2 * width + hidden + head


def macs(config: ViTConfig) -> int:
    """Multiply-accumulates of the matrix products of one image's forward pass (a FLOP count is twice that).

    Training costs three times as much: the backward pass has two products for each of these.
    """
    n, width = config.tokens, config.width
    stem = math.prod(config.grid) * math.prod(config.patch_size) * config.channels * width
    block = n * (4 * width * width + 2 * width * config.mlp_width) + 2 * n * n * width
    hidden = config.head_hidden * width
    head = config.num_classes * (config.head_hidden or width)
    return stem + config.depth * block + hidden + head
