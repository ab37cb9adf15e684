"""What a network costs, by closed form and without making it: parameters and multiply-accumulates.

A FLOP count is twice the multiply-accumulates. All counts are of matrix products and convolutions; norms, activations
and softmax are left out, as everywhere in the literature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from vitrail.models.resnet import EXPANSION, ResNetConfig, RootConfig
from vitrail.models.variants import AnyConfig
from vitrail.models.vit import ViTConfig

__all__ = [
    "LayerCost",
    "Unit",
    "cells",
    "inference_flops",
    "layer_costs",
    "macs",
    "parameters",
    "root_parameters",
    "stem_channels",
    "training_flops",
    "units",
]


def parameters(config: AnyConfig) -> int:
    """Trainable numbers of the network that `config` describes."""
    if isinstance(config, ResNetConfig):
        convolved = sum(unit.parameters(bit=True) for unit in units(config, config.image_size))
        stem = 49 * config.channels * config.width
        return stem + convolved + 2 * config.embed_width + config.num_classes * (config.embed_width + 1)
    width = config.width
    stem = math.prod(config.patch_size) * stem_channels(config) * width + width * config.patch_bias
    hidden = config.head_hidden * (config.embed_width + 1)
    head = config.num_classes * ((config.head_hidden or config.embed_width) + 1)
    norm = 2 * (width if config.final_norm == "tokens" else config.embed_width)
    prefix = config.prefix * width
    attention_pool = 0
    if config.pool == "map":
        attention_pool = width + 4 * width * (width + 1) + 2 * width + _mlp_parameters(config, bias=True)
    root = root_parameters(config.root, config.channels) if config.root else 0
    blocks = config.depth * _block_parameters(config)
    return root + stem + prefix + _position_parameters(config) + blocks + norm + attention_pool + hidden + head


def macs(config: AnyConfig, image_size: tuple[int, int] | None = None) -> int:
    """Multiply-accumulates of one image's forward pass, at the config's image size or another.

    As the literature counts them: all tokens go through the whole of every block. `inference_flops` and
    `training_flops` count what is computed.
    """
    size = image_size or config.image_size
    if isinstance(config, ResNetConfig):
        convolved = sum(unit.macs for unit in units(config, size))
        return _first_macs(config, size) + convolved + config.num_classes * config.embed_width
    return _transformer_macs(config, size, math.prod(config.grid_of(*size)))


def inference_flops(config: AnyConfig, image_size: tuple[int, int] | None = None) -> int:
    """FLOPs that a prediction of one image takes."""
    size = image_size or config.image_size
    if isinstance(config, ResNetConfig):
        return 2 * macs(config, size)
    return 2 * (macs(config, size) - _unread_macs(config, math.prod(config.grid_of(*size)) + config.prefix))


def training_flops(config: AnyConfig, image_size: tuple[int, int] | None = None) -> int:
    """FLOPs of a training step, an image: forward, and two products for each of its own backward.

    The first product's gradient with respect to the image is not computed. Patches that `patch_dropout` leaves out are
    not counted.
    """
    size = image_size or config.image_size
    if isinstance(config, ResNetConfig):
        return 2 * (3 * macs(config, size) - _first_macs(config, size))
    patches = config.kept_of(math.prod(config.grid_of(*size)))
    forward = _transformer_macs(config, size, patches) - _unread_macs(config, patches + config.prefix)
    first = _first_macs(config, size) if config.root else _stem_macs(config, patches)
    return 2 * (3 * forward - first)


class LayerCost(NamedTuple):
    """One kind of layer over a sequence ("Attention Is All You Need", Table 1)."""

    kind: str
    macs: int
    """Multiply-accumulates of mixing n tokens of a width."""
    sequential: int
    """Steps that have to wait for each other."""
    path: int
    """Layers, or steps, that a signal passes between the two tokens that are farthest apart."""


def layer_costs(tokens: int, width: int, kernel: int = 3) -> tuple[LayerCost, ...]:
    """Self-attention, a recurrence and a convolution over the same sequence.

    The products that mix tokens are counted: the two of attention, without its projections; a recurrence's one per
    token; a convolution's `kernel` per token. A convolution's path is over stacked layers of that kernel.
    """
    return (
        LayerCost("self-attention", 2 * tokens * tokens * width, 1, 1),
        LayerCost("recurrence", tokens * width * width, tokens, tokens),
        LayerCost("convolution", kernel * tokens * width * width, 1, math.ceil((tokens - 1) / (kernel - 1))),
    )


class Unit(NamedTuple):
    """One bottleneck: channels, and cells of its map before and after the stride."""

    before: int
    after: int
    cells_in: int
    cells_out: int
    side: tuple[int, int]
    stride: int

    @property
    def middle(self) -> int:
        return self.after // EXPANSION

    @property
    def has_shortcut(self) -> bool:
        return self.stride > 1 or self.before != self.after

    @property
    def macs(self) -> int:
        shortcut = self.before * self.after * self.cells_out * self.has_shortcut
        first, last = self.before * self.middle * self.cells_in, self.middle * self.after * self.cells_out
        return first + 9 * self.middle**2 * self.cells_out + last + shortcut

    def parameters(self, *, bit: bool) -> int:
        products = self.middle * (self.before + 9 * self.middle + self.after)
        products += self.before * self.after * self.has_shortcut
        if bit:
            return products + 2 * (self.before + 2 * self.middle)
        return products + 2 * (2 * self.middle + self.after + self.after * self.has_shortcut)


def cells(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


def units(config: AnyConfig, size: tuple[int, int]) -> Iterator[Unit]:
    """The bottlenecks of a ResNet, or of a hybrid's root, in order."""
    shape = config if isinstance(config, ResNetConfig) else config.root
    assert shape is not None
    widths = [shape.width, *(shape.width * EXPANSION * 2**stage for stage in range(len(shape.depths)))]
    side = cells(size, 4 if isinstance(shape, ResNetConfig) or shape.stem == "7x7+pool" else 2)
    for stage, (depth, (before, after)) in enumerate(zip(shape.depths, pairwise(widths), strict=True)):
        for unit in range(depth):
            stride = 2 if stage and unit == 0 else 1
            new = cells(side, stride)
            yield Unit(before if unit == 0 else after, after, math.prod(side), math.prod(new), side, stride)
            side = new


def _transformer_macs(config: ViTConfig, size: tuple[int, int], patches: int) -> int:
    """With so many patches of an image of this size."""
    n, width = patches + config.prefix, config.width
    root = 0
    if config.root:
        root = _root_stem_macs(config.root, config.channels, size) + sum(unit.macs for unit in units(config, size))
    block = n * (4 * width * width + _mlp_macs(config)) + 2 * n * n * width
    attention_pool = 0
    if config.pool == "map":  # the query is the same for all images, but is computed with each batch
        attention_pool = 2 * n * width * width + 2 * width * width + 2 * n * width + _mlp_macs(config)
    hidden = config.head_hidden * config.embed_width
    head = config.num_classes * (config.head_hidden or config.embed_width)
    return root + _stem_macs(config, patches) + config.depth * block + attention_pool + hidden + head


def _unread_macs(config: ViTConfig, n: int) -> int:
    """What the last of the blocks, which see n tokens, need not compute: all that belongs to the tokens which the head
    does not read, but for their keys and values."""
    if config.pool != "cls":
        return 0
    return (n - 1) * (2 * config.width**2 + _mlp_macs(config) + 2 * n * config.width)


def _stem_macs(config: ViTConfig, patches: int) -> int:
    return patches * math.prod(config.patch_size) * stem_channels(config) * config.width


def _mlp_macs(config: ViTConfig) -> int:
    """For one token."""
    return (3 if config.activation == "swiglu" else 2) * config.width * config.mlp_width


def _first_macs(config: AnyConfig, size: tuple[int, int]) -> int:
    """Of the convolution that sees the image, of a ResNet or of a hybrid's root."""
    root = config.root if isinstance(config, ViTConfig) else None
    if root and root.stem == "3x3+3x3":
        return math.prod(size) * 9 * config.channels * (root.width // 2)
    return math.prod(cells(size, 2)) * 49 * config.channels * (root.width if root else config.width)


def _root_stem_macs(root: RootConfig, channels: int, size: tuple[int, int]) -> int:
    half = math.prod(cells(size, 2))
    if root.stem == "7x7+pool":
        return half * 49 * channels * root.width
    return math.prod(size) * 9 * channels * (root.width // 2) + half * 9 * (root.width // 2) * root.width


def stem_channels(config: ViTConfig) -> int:
    return config.root.out_channels if config.root else config.channels


def _mlp_parameters(config: ViTConfig, *, bias: bool) -> int:
    up = (2 if config.activation == "swiglu" else 1) * config.mlp_width
    return config.width * (up + config.mlp_width) + bias * (up + config.width)


def _block_parameters(config: ViTConfig) -> int:
    width = config.width
    attention = 4 * width * width + 3 * width * config.qkv_bias + width * config.dense_bias
    query_key_norms = 4 * (width // config.heads) * config.qk_norm
    scales = 2 * width * (config.layer_scale > 0)
    return attention + query_key_norms + scales + 4 * width + _mlp_parameters(config, bias=config.dense_bias)


def _position_parameters(config: ViTConfig) -> int:
    layers = config.depth if config.where == "every-layer" else 1
    height, width = config.grid
    if config.positions == "learned":
        return layers * (config.covered + height * width) * config.width
    if config.positions == "learned-2d":
        return layers * (config.covered * config.width + (height + width) * (config.width // 2))
    if config.positions == "relative-bias":
        return layers * config.heads * (2 * height - 1) * (2 * width - 1)
    return 0


def root_parameters(root: RootConfig, channels: int) -> int:
    config = replace(ViTConfig(), root=root, patch_size=(1, 1), channels=channels)
    convolved = sum(unit.parameters(bit=False) for unit in units(config, config.image_size))
    half = root.width // 2
    before = 9 * channels * half + 2 * half + 9 * half * root.width
    return (49 * channels * root.width if root.stem == "7x7+pool" else before) + 2 * root.width + convolved
