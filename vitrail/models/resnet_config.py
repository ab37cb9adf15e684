"""The configs of BiT ResNets and of the root of a hybrid, with their parameters, multiply-accumulates and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

from vitrail.errors import ConfigError
from vitrail.models.network import Footprint, FootprintPrecision, NetworkConfig, bytes_each, refuse_assignment
from vitrail.settings import Checked, raise_problems, setting

EXPANSION = 4
"""Ratio of a bottleneck's output channels to the channels of its 3 x 3 convolution."""

BASIC_EXPANSION = 2
"""Ratio of the channels after the first stage to those of the stem, if the units are basic ones."""

GAPS = 0.45
"""Unused bytes between the tensors of a ResNet or a hybrid, as a fraction of the activations, including oneDNN's own
copies of maps and filters. Measured (glibc 2.36, 2026-11)."""

WeightEps = Literal["variance", "deviation"]
"""Statistic that `weight_eps` is added to: the variance (before the square root) or the standard deviation."""

Stem = Literal["7x7+pool", "3x3+3x3", "3x3"]
"""Stem of a root. "7x7+pool" is the published stem: a 7 x 7 convolution and a max pool, both of stride 2. The others
are for small images. "3x3+3x3" is a 3 x 3 convolution of stride 1 and a 3 x 3 convolution of stride 2 (after
2106.14881). "3x3" makes the root a small ResNet, such as BiT-Pico without its head (`ResNetConfig.stem`)."""

ResNetStem = Literal["7x7+pool", "3x3"]
"""Stem of a ResNet. "7x7+pool" is the published stem: a 7 x 7 convolution and a max pool, both of stride 2. "3x3" is
for small images, as in 1512.03385, section 4.2: one 3 x 3 convolution of stride 1. Every stage then halves the
sides."""

ResNetUnit = Literal["bottleneck", "basic"]
"""Residual unit of a ResNet. "bottleneck" is the published one: convolutions of 1 x 1, 3 x 3 and 1 x 1. "basic" has two
3 x 3 convolutions (1512.03385, figure 5), which train faster in narrow networks."""


class Stages(Checked):
    """The sizes that follow from the stem, the units and the stages, for a ResNet and for the root of a hybrid."""

    depths: tuple[int, ...]
    width: int
    stem: Stem
    pools: bool

    @property
    def unit(self) -> ResNetUnit:
        """Residual unit."""
        return "basic" if self.stem == "3x3" else "bottleneck"

    @property
    def expansion(self) -> int:
        """Ratio of the channels after the first stage to `width`."""
        return BASIC_EXPANSION if self.unit == "basic" else EXPANSION

    @property
    def stem_stride(self) -> int:
        """Pixels between neighbouring cells of the stem's feature map."""
        return {"7x7+pool": 4, "3x3+3x3": 2, "3x3": 1}[self.stem]

    @property
    def first_stride(self) -> int:
        """Stride of the first stage: 2 after a stem of stride 1."""
        return 2 if self.stem == "3x3" else 1

    @property
    def stride(self) -> int:
        """Pixels between neighbouring cells of the last feature map."""
        return self.stem_stride * self.first_stride * 2 ** max(0, len(self.depths) - 1)

    @property
    def out_channels(self) -> int:
        """Channels of the last feature map."""
        return self.width * self.expansion * 2 ** (len(self.depths) - 1) if self.depths else self.width


@dataclass(frozen=True, kw_only=True)
class RootConfig(Stages):
    """The config of the ResNet below a hybrid. The defaults are those of the original code. Raises `ConfigError` for
    values that do not fit."""

    depths: tuple[int, ...] = ()
    """Number of units in each stage. () leaves only the stem."""
    stem: Stem = "7x7+pool"
    """Stem of the root: the published "7x7+pool", or "3x3+3x3" or "3x3" for small images. The norms of "3x3+3x3" have
    one group, and so have all norms of the root with "3x3"."""
    width: int = 64
    """Channels of the stem. Stage i has `width * 2**i` channels inside its units and four times as many outside. With
    the stem "3x3", it has `width * 2**(i + 1)` channels."""
    pools: bool = False
    """With the stem "3x3": True to halve the sides by max pools (`ResNetConfig.pools`)."""
    norm_eps: float = setting(1e-6, above=0, below=math.inf)
    """Epsilon of every group norm: 1e-6, or timm's 1e-5."""
    weight_eps: float = setting(1e-5, above=0, below=math.inf)
    """Epsilon of weight standardisation. The original code adds 1e-5 to the standard deviation, and timm adds 1e-8 to
    the variance."""
    weight_eps_on: WeightEps = "deviation"
    """Statistic that the epsilon of weight standardisation is added to: the standard deviation or the variance of a
    filter."""

    def _problems(self) -> Iterator[str]:
        raise_problems([*super()._problems(), *_misfits(self.depths, self.width, 1 if self.is_small else 32)])
        if self.is_small:
            self.small(1)  # raises for a root without stages, with any number of channels
        elif self.pools:
            yield f"pools=True needs the stem '3x3', and the stem is {self.stem!r}"

    @property
    def is_small(self) -> bool:
        """True if the root is a small ResNet."""
        return self.stem == "3x3"

    def small(self, channels: int) -> ResNetConfig:
        """Return the config of the small ResNet that is the root, for images of this number of channels. Raise
        `ConfigError` if it has no stage."""
        return ResNetConfig(
            depths=self.depths, width=self.width, stem="3x3", unit="basic", norm_groups=1, channels=channels,
            pools=self.pools, num_classes=0, norm_eps=self.norm_eps, weight_eps=self.weight_eps,
            weight_eps_on=self.weight_eps_on,
        )  # fmt: skip


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Stages, NetworkConfig):
    """The config of a BiT ResNet. The defaults are BiT-R50x1. Raises `ConfigError` for values that do not fit.

    `stem="3x3"`, `unit="basic"` and `norm_groups=1` make a small ResNet for small images, such as BiT-Pico.
    """

    architecture: ClassVar[Literal["BiT"]] = "BiT"
    has_uniform_blocks: ClassVar[bool] = False
    """False because stages differ in shape, so each unit would need a compiled graph of its own."""
    recomputes_blocks: ClassVar[bool] = False
    """False because units keep their activations."""
    adaptable: ClassVar[tuple[str, ...]] = ()
    """Names of the weights in a block that LoRA can adapt: none, because units have no dense layers."""
    head_hidden: ClassVar[int] = 0
    weights_depend_on_size: ClassVar[bool] = False

    image_size: tuple[int, int] = setting((224, 224), least=1)
    """Height and width of images in pixels. The network also accepts every other size."""
    channels: int = setting(3, least=1)
    """Image channels: 3 for RGB, 1 for grey."""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Number of units in each stage."""
    width: int = 64
    """Number of channels of the first convolution: 64 times the width factor."""
    stem: ResNetStem = "7x7+pool"
    """Stem of the ResNet: the published "7x7+pool", or "3x3" for images below about 64 pixels."""
    unit: ResNetUnit = "bottleneck"
    """Residual unit: the published "bottleneck", or "basic" with two 3 x 3 convolutions."""
    pools: bool = False
    """True to halve the sides by max pools, for basic units. The first convolution of such a unit has the stride 1, and
    a max pool follows it, as in ResNet-9 (https://myrtle.ai/learn/how-to-train-your-resnet). This costs more than a
    stride of 2 (1512.03385), and learns more from each image."""
    norm_groups: int = 32
    """Number of groups of every group norm."""
    num_classes: int = setting(1000, least=0, most=2**24)
    """Number of outputs of the head. 0 makes a network without a head."""
    head_bias: float = setting(0.0, least=-1e9, most=1e9)
    """Initial value of the head's biases."""
    norm_eps: float = setting(1e-5, above=0, below=math.inf)
    """Epsilon of every group norm."""
    weight_eps: float = setting(1e-10, above=0, below=math.inf)
    """Epsilon of weight standardisation: 1e-10, or timm's 1e-8."""
    weight_eps_on: WeightEps = "variance"
    """Statistic that the epsilon of weight standardisation is added to: the standard deviation or the variance of a
    filter."""

    def _problems(self) -> Iterator[str]:
        yield from (*super()._problems(), *_misfits(self.depths, self.width, self.norm_groups))
        if not self.depths:
            yield "depths=() leaves no stage, but a ResNet must have at least one"
        if self.pools and self.unit != "basic":
            yield f"pools=True needs the unit 'basic', and the unit is {self.unit!r}"

    @property
    def embed_width(self) -> int:
        """Channels of the last feature map."""
        return self.out_channels

    @property
    def summary(self) -> str:
        """Number of units of each stage, for tables."""
        return "-".join(map(str, self.depths))

    @property
    def num_blocks(self) -> int:
        return sum(self.depths)

    @property
    def stream_width(self) -> int:
        return self.embed_width

    @property
    def head_inputs(self) -> int:
        return self.embed_width

    @property
    def tokens(self) -> int:
        return math.prod(self.grid_of(*self.image_size))

    def with_image_size(self, image_size: tuple[int, int]) -> ResNetConfig:
        return replace(self, image_size=image_size)

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ResNetConfig:
        return replace(self, num_classes=num_classes)

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        return max(1, height), max(1, width)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map. Raise `ConfigError` for an image without pixels."""
        if min(height, width) < 1:
            raise ConfigError(f"an image of {height} x {width} has no pixels; both sides must be at least 1")
        return cells((height, width), self.stride)

    def parameters(self) -> int:
        return root_parameters(self, self.channels) + self.num_classes * (self.embed_width + 1)

    def macs(self, image_size: tuple[int, int] | None = None) -> int:
        convolved = root_macs(self, self.channels, image_size or self.image_size)
        return convolved + self.num_classes * self.embed_width

    def inference_flops(self, image_size: tuple[int, int] | None = None) -> int:
        return 2 * self.macs(image_size)

    def training_flops(self, image_size: tuple[int, int] | None = None, trained_blocks: int | None = None) -> int:
        """Return the FLOPs that a training step computes per image. The gradient of the image is not computed. By
        default all blocks are trained, otherwise the last `trained_blocks` with the layers after them, or only the head
        (0). The layers below have no backward pass."""
        size = image_size or self.image_size
        forward, first = self.macs(size), root_first_macs(self, self.channels, size)
        if trained_blocks is None:
            return 2 * (3 * forward - first)
        if not trained_blocks:  # the head, whose input has no gradient
            return 2 * (forward + self.num_classes * self.embed_width)
        frozen = list(units(self, size))[: self.num_blocks - trained_blocks]
        return 2 * (3 * forward - 2 * (first + sum(unit.macs for unit in frozen)))

    def footprint(self, image_size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
        count = self.parameters()
        return Footprint(
            parameters=count,
            activations=bytes_each(precision) * _kept(self, image_size) + _place_bytes(self, image_size),
            first_weights=standardised_bytes(precision) * count + filter_bytes(self),
            last_weights=4 * count,
            gaps=GAPS,
            predicting=predicting_bytes(self, image_size, precision),
        )


def _misfits(depths: tuple[int, ...], width: int, groups: int) -> Iterator[str]:
    if any(depth < 1 for depth in depths):
        yield f"depths={depths}: a stage must have at least one unit"
    if groups < 1 or width < groups or width % groups:
        yield f"width={width} is not a multiple of {groups}, the number of groups of every norm"


class Convolution(NamedTuple):
    """A convolution of a stem or a unit, with the cells of its input and output."""

    inputs: int
    outputs: int
    kernel: int
    cells_in: int
    cells_out: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.kernel**2

    @property
    def macs(self) -> int:
        return self.weights * self.cells_out


@dataclass(frozen=True)
class Unit:
    """One residual unit, with its channels and its feature map before and after the stride."""

    before: int
    after: int
    side: tuple[int, int]
    stride: int
    kind: ResNetUnit
    pools: bool = False

    @property
    def middle(self) -> int:
        """Channels between the convolutions."""
        return self.after // EXPANSION if self.kind == "bottleneck" else self.after

    @property
    def has_shortcut(self) -> bool:
        return self.stride > 1 or self.before != self.after

    @property
    def cells_in(self) -> int:
        return math.prod(self.side)

    @property
    def cells_out(self) -> int:
        return math.prod(cells(self.side, self.stride))

    @property
    def convolutions(self) -> list[Convolution]:
        """The convolutions besides the shortcut."""
        cells_in, cells_out = self.cells_in, self.cells_out
        if self.kind == "basic":
            first = Convolution(self.before, self.middle, 3, cells_in, cells_in if self.pools else cells_out)
            return [first, Convolution(self.middle, self.after, 3, cells_out, cells_out)]
        return [
            Convolution(self.before, self.middle, 1, cells_in, cells_in),
            Convolution(self.middle, self.middle, 3, cells_in, cells_out),
            Convolution(self.middle, self.after, 1, cells_out, cells_out),
        ]

    @property
    def macs(self) -> int:
        shortcut = self.before * self.after * self.cells_out * self.has_shortcut
        return shortcut + sum(one.macs for one in self.convolutions)

    def parameters(self, *, bit: bool) -> int:
        """Return the number of weights. BiT's norms are before each convolution; others are after it."""
        shortcut, parts = self.before * self.after * self.has_shortcut, self.convolutions
        normed = sum(one.inputs if bit else one.outputs for one in parts) + (not bit) * self.after * self.has_shortcut
        return shortcut + sum(one.weights for one in parts) + 2 * normed

    @property
    def kept(self) -> int:
        """Number of values of a BiT unit that the backward pass reads: every norm keeps its input, every convolution
        the activated map, and a max pool its input."""
        pooled = self.middle * self.cells_in * self.has_pool
        return sum(2 * one.inputs * one.cells_in for one in self.convolutions) + pooled

    @property
    def has_pool(self) -> bool:
        return self.pools and self.stride > 1

    @property
    def held(self) -> int:
        """Largest number of values in a prediction: the input, the normed input and the maps of the convolutions."""
        return self.kept + 2 * self.after * self.cells_out


def cells(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the sides of a feature map after a stride, rounded up."""
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


def units(shape: ResNetConfig | RootConfig, size: tuple[int, int]) -> Iterator[Unit]:
    """Yield the units of a ResNet, or of a hybrid's root, in order."""
    widths = [shape.width, *(shape.width * shape.expansion * 2**stage for stage in range(len(shape.depths)))]
    side = cells(size, shape.stem_stride)
    for stage, (depth, (before, after)) in enumerate(zip(shape.depths, pairwise(widths), strict=True)):
        for unit in range(depth):
            stride = 1 if unit else 2 if stage else shape.first_stride
            yield Unit(before if unit == 0 else after, after, side, stride, shape.unit, shape.pools)
            side = cells(side, stride)


def predicting_bytes(shape: ResNetConfig | RootConfig, size: tuple[int, int], precision: FootprintPrecision) -> int:
    """Return the peak bytes per image of a prediction. It is in a unit or in the stem."""
    stem = 2 * shape.width * math.prod(cells(size, min(2, shape.stem_stride)))
    held = (unit.held for unit in units(shape, size))
    return int((1 + GAPS) * bytes_each(precision) * max(stem, *held, 0))


def stem_convolutions(shape: ResNetConfig | RootConfig, channels: int, size: tuple[int, int]) -> list[Convolution]:
    """Return the convolutions below the units, for images of this number of channels."""
    whole, half, narrow = math.prod(size), math.prod(cells(size, 2)), shape.width // 2
    if shape.stem == "7x7+pool":
        return [Convolution(channels, shape.width, 7, whole, half)]
    if shape.stem == "3x3":
        return [Convolution(channels, shape.width, 3, whole, whole)]
    return [Convolution(channels, narrow, 3, whole, whole), Convolution(narrow, shape.width, 3, whole, half)]


def root_parameters(shape: ResNetConfig | RootConfig, channels: int) -> int:
    """Return the number of weights of a hybrid's root, or of a ResNet without its head."""
    is_bit = isinstance(shape, ResNetConfig) or shape.is_small
    stem = stem_convolutions(shape, channels, (224, 224))
    normed = shape.out_channels if is_bit else sum(one.outputs for one in stem)
    convolved = sum(unit.parameters(bit=is_bit) for unit in units(shape, (224, 224)))
    return sum(one.weights for one in stem) + 2 * normed + convolved


def root_macs(shape: ResNetConfig | RootConfig, channels: int, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of a hybrid's root, or of a ResNet without its head, for one image."""
    stem = sum(one.macs for one in stem_convolutions(shape, channels, size))
    return stem + sum(unit.macs for unit in units(shape, size))


def root_first_macs(shape: ResNetConfig | RootConfig, channels: int, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of the first convolution, whose input needs no gradient."""
    return stem_convolutions(shape, channels, size)[0].macs


def root_bytes(
    root: RootConfig, channels: int, size: tuple[int, int], precision: FootprintPrecision, *, backward: bool = False
) -> int:
    """Return the bytes that a hybrid's root keeps per image. With `backward`, add the gradient of the first feature
    map."""
    if root.is_small:  # its first map has no gradient before most of what it keeps is freed
        return bytes_each(precision) * _kept(root.small(channels), size) + _place_bytes(root, size)
    as_published = root.stem == "7x7+pool"
    kept = _root_kept(root, channels, size)
    if backward:
        kept += root.width * math.prod(cells(size, 2)) if as_published else root.width // 2 * math.prod(size)
    return bytes_each(precision) * kept + _place_bytes(root, size)


def _place_bytes(shape: ResNetConfig | RootConfig, size: tuple[int, int]) -> int:
    """Return the bytes of the places of the largest values that max pools keep, 64 bits each."""
    stem = shape.width * math.prod(cells(size, 4)) * (shape.stem == "7x7+pool")
    return 8 * (stem + sum(unit.middle * unit.cells_out for unit in units(shape, size) if unit.has_pool))


def standardised_bytes(precision: FootprintPrecision) -> int:
    """Return the bytes per weight of a filter's two copies: one with the mean subtracted, and one standardised."""
    return 4 + bytes_each(precision)


def filter_bytes(shape: ResNetConfig | RootConfig) -> int:
    """Return the bytes of the five temporary tensors in the backward pass of the largest standardised filters."""
    return 4 * 5 * max((9 * unit.middle**2 for unit in units(shape, (224, 224))), default=0)


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
