"""Formulas for BiT ResNets and for the ResNet below a hybrid: parameters, multiply-accumulates and kept bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from vitrail.models.cost.footprint import Footprint, FootprintPrecision, bytes_each

if TYPE_CHECKING:
    from vitrail.models.resnet_config import ResNetConfig, RootConfig


EXPANSION = 4
"""Ratio of a bottleneck's output channels to the channels of its 3 x 3 convolution."""

BASIC_EXPANSION = 2
"""Ratio of the channels after the first stage to those of the stem, if the units are basic ones."""

GAPS = 0.45
"""Unused bytes between the tensors of a ResNet or a hybrid, as a fraction of the activations, including oneDNN's own
copies of maps and filters. Measured (glibc 2.36, 2026-11)."""


@dataclass(frozen=True)
class Unit:
    """One bottleneck, with its channels and the sizes of its feature map before and after the stride."""

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

    @property
    def kept(self) -> int:
        """Number of values of a BiT unit that the backward pass reads: every norm keeps its input, and every
        convolution the activated map."""
        return 2 * self.before * self.cells_in + 2 * self.middle * (self.cells_in + self.cells_out)

    @property
    def held(self) -> int:
        """Largest number of values in a prediction: the input, the normed input and the maps of the convolutions."""
        return self.kept + 2 * self.after * self.cells_out

    @property
    def largest_filters(self) -> int:
        """Number of weights of the largest convolution."""
        return 9 * self.middle**2


class BasicUnit(Unit):
    """One unit of two 3 x 3 convolutions."""

    @property
    def macs(self) -> int:
        return self._products * self.cells_out

    def parameters(self, *, bit: bool) -> int:
        assert bit, "the root of a hybrid has no basic units"
        return self._products + 2 * (self.before + self.after)

    @property
    def kept(self) -> int:
        return 2 * self.before * self.cells_in + 2 * self.after * self.cells_out

    @property
    def largest_filters(self) -> int:
        return 9 * self.after**2

    @property
    def _products(self) -> int:
        """Number of weights of the convolutions."""
        return self.after * (9 * (self.before + self.after) + self.before * self.has_shortcut)


def cells(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the sides of a feature map after a stride, rounded up."""
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


def units(shape: ResNetConfig | RootConfig, size: tuple[int, int]) -> Iterator[Unit]:
    """Yield the units of a ResNet, or of a hybrid's root, in order."""
    kind = Unit if shape.unit == "bottleneck" else BasicUnit
    widths = [shape.width, *(shape.width * shape.expansion * 2**stage for stage in range(len(shape.depths)))]
    side = cells(size, shape.stem_stride)
    for stage, (depth, (before, after)) in enumerate(zip(shape.depths, pairwise(widths), strict=True)):
        for unit in range(depth):
            stride = 1 if unit else 2 if stage else shape.first_stride
            new = cells(side, stride)
            yield kind(before if unit == 0 else after, after, math.prod(side), math.prod(new), side, stride)
            side = new


def parameters(config: ResNetConfig) -> int:
    """Return the number of weights of a BiT ResNet."""
    convolved = sum(unit.parameters(bit=True) for unit in units(config, config.image_size))
    stem = _stem_kernel(config) ** 2 * config.channels * config.width
    return stem + convolved + 2 * config.embed_width + config.num_classes * (config.embed_width + 1)


def macs(config: ResNetConfig, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of the forward pass of one image."""
    convolved = sum(unit.macs for unit in units(config, size))
    return _first_macs(config, size) + convolved + config.num_classes * config.embed_width


def training_flops(config: ResNetConfig, size: tuple[int, int], trained_blocks: int | None = None) -> int:
    """Return the FLOPs of a training step per image. The gradient of the image itself is not computed.

    If only the last `trained_blocks` units are trained with the head, the layers below have no backward pass.
    """
    forward, first = macs(config, size), _first_macs(config, size)
    if trained_blocks is None:
        return 2 * (3 * forward - first)
    if not trained_blocks:  # the head, whose input has no gradient
        return 2 * (forward + config.num_classes * config.embed_width)
    frozen = list(units(config, size))[: config.num_blocks - trained_blocks]
    return 2 * (3 * forward - 2 * (first + sum(unit.macs for unit in frozen)))


def footprint(config: ResNetConfig, size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
    """Return the memory that a training step of a BiT ResNet needs."""
    count = parameters(config)
    pooled = 8 * config.width * math.prod(cells(size, 4)) * (config.stem == "7x7+pool")
    activations = bytes_each(precision) * _kept(config, size) + pooled
    return Footprint(
        parameters=count,
        activations=activations,
        first_weights=standardised_bytes(precision) * count,
        last_weights=4 * count,
        filters=filter_bytes(config),
        gaps=GAPS,
        predicting=predicting_bytes(config, size, precision),
    )


def predicting_bytes(shape: ResNetConfig | RootConfig, size: tuple[int, int], precision: FootprintPrecision) -> int:
    """Return the peak bytes per image of a prediction. It is in a unit or in the stem."""
    stem = 2 * shape.width * math.prod(cells(size, min(2, shape.stem_stride)))
    held = (unit.held for unit in units(shape, size))
    return int((1 + GAPS) * bytes_each(precision) * max(stem, *held, 0))


def root_parameters(root: RootConfig, channels: int) -> int:
    """Return the number of weights of a hybrid's root."""
    convolved = sum(unit.parameters(bit=False) for unit in units(root, (224, 224)))
    half = root.width // 2
    before = 9 * channels * half + 2 * half + 9 * half * root.width
    return (49 * channels * root.width if root.stem == "7x7+pool" else before) + 2 * root.width + convolved


def root_macs(root: RootConfig, channels: int, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of a hybrid's root for one image."""
    half = math.prod(cells(size, 2))
    stem = root_first_macs(root, channels, size)
    if root.stem == "3x3+3x3":
        stem += half * 9 * (root.width // 2) * root.width
    return stem + sum(unit.macs for unit in units(root, size))


def root_first_macs(root: RootConfig, channels: int, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of the root's first convolution, whose input needs no gradient."""
    if root.stem == "3x3+3x3":
        return math.prod(size) * 9 * channels * (root.width // 2)
    return math.prod(cells(size, 2)) * 49 * channels * root.width


def root_bytes(
    root: RootConfig, channels: int, size: tuple[int, int], precision: FootprintPrecision, *, backward: bool = False
) -> int:
    """Return the bytes that a hybrid's root keeps per image. With `backward`, add the gradient of the first feature
    map."""
    as_published = root.stem == "7x7+pool"
    kept = _root_kept(root, channels, size)
    if backward:
        kept += root.width * math.prod(cells(size, 2)) if as_published else root.width // 2 * math.prod(size)
    pooled = 8 * root.width * math.prod(cells(size, 4)) * as_published
    return bytes_each(precision) * kept + pooled


def standardised_bytes(precision: FootprintPrecision) -> int:
    """Return the bytes per weight of a filter's two copies: one with the mean subtracted, and one standardised."""
    return 4 + bytes_each(precision)


def filter_bytes(shape: ResNetConfig | RootConfig) -> int:
    """Return the bytes of the five temporary tensors in the backward pass of the largest standardised filters."""
    return 4 * 5 * max((unit.largest_filters for unit in units(shape, (224, 224))), default=0)


def _first_macs(config: ResNetConfig, size: tuple[int, int]) -> int:
    stride = min(2, config.stem_stride)
    return math.prod(cells(size, stride)) * _stem_kernel(config) ** 2 * config.channels * config.width


def _stem_kernel(config: ResNetConfig) -> int:
    return 7 if config.stem == "7x7+pool" else 3


def _kept(config: ResNetConfig, size: tuple[int, int]) -> int:
    kept = config.channels * math.prod(size) + sum(unit.kept for unit in units(config, size))
    if config.stem == "7x7+pool":
        half = cells(size, 2)
        kept += config.width * (half[0] + 2) * (half[1] + 2)
    return kept + 2 * math.prod(config.grid_of(*size)) * config.embed_width


def _root_kept(root: RootConfig, channels: int, size: tuple[int, int]) -> int:
    half = cells(size, 2)
    kept = 2 * root.width * math.prod(half)
    if root.stem == "3x3+3x3":
        before = root.width // 2
        kept += channels * _padded(size, 3, 1) + 2 * before * math.prod(size) + before * _padded(size, 3, 2)
    else:
        kept += channels * _padded(size, 7, 2)
        padded = _padded(half, 3, 2)
        kept += root.width * (padded if padded > math.prod(half) else 0)
        kept += root.width * math.prod(cells(size, 4)) * bool(root.depths)
    for unit in units(root, size):
        kept += 2 * unit.middle * unit.cells_in + unit.middle * (
            _padded(unit.side, 3, unit.stride) + 2 * unit.cells_out
        )
        kept += (2 + unit.has_shortcut) * unit.after * unit.cells_out
    return kept


def _padded(side: tuple[int, int], kernel: int, stride: int) -> int:
    """Return the number of cells of a feature map after "SAME" padding."""
    new = cells(side, stride)
    height, width = (max(s, (m - 1) * stride + kernel) for s, m in zip(side, new, strict=True))
    return height * width
