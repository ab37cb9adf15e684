"""The configs of BiT ResNets and of the root of a hybrid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from vitrail.errors import ConfigError
from vitrail.models.cost import resnet as costs
from vitrail.models.cost.footprint import Footprint, FootprintPrecision
from vitrail.models.cost.resnet import BASIC_EXPANSION, EXPANSION
from vitrail.models.network import refuse_assignment
from vitrail.settings import pairs, raise_problems

WeightEps = Literal["variance", "deviation"]
"""Statistic that `weight_eps` is added to: the variance (before the square root) or the standard deviation."""

Stem = Literal["7x7+pool", "3x3+3x3"]
"""Stem of a root. "7x7+pool" is the published stem: a 7 x 7 convolution and a max pool, both of stride 2. "3x3+3x3" is
for small images: a 3 x 3 convolution of stride 1 and a 3 x 3 convolution of stride 2 (after 2106.14881)."""

ResNetStem = Literal["7x7+pool", "3x3"]
"""Stem of a ResNet. "7x7+pool" is the published stem: a 7 x 7 convolution and a max pool, both of stride 2. "3x3" is
for small images, as in 1512.03385, section 4.2: one 3 x 3 convolution of stride 1. Every stage then halves the
sides."""

ResNetUnit = Literal["bottleneck", "basic"]
"""Residual unit of a ResNet. "bottleneck" is the published one: convolutions of 1 x 1, 3 x 3 and 1 x 1. "basic" has two
3 x 3 convolutions (1512.03385, figure 5), which train faster in narrow networks."""


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """The config of the ResNet below a hybrid. The defaults are those of the original code. Raises `ConfigError` for
    values that do not fit."""

    unit: ClassVar[ResNetUnit] = "bottleneck"
    """Residual unit: the root of a hybrid has bottlenecks."""
    expansion: ClassVar[int] = EXPANSION
    """Ratio of the channels after the first stage to `width`."""
    first_stride: ClassVar[int] = 1
    """Stride of the first stage."""

    depths: tuple[int, ...] = ()
    """Number of units in each stage. () leaves only the stem."""
    stem: Stem = "7x7+pool"
    """Stem of the root: the published "7x7+pool", or "3x3+3x3" for small images. The norms of "3x3+3x3" have one
    group."""
    width: int = 64
    """Channels of the stem. Stage i has `width * 2**i` channels inside its units and four times as many outside."""
    norm_eps: float = 1e-6
    """Epsilon of every group norm: 1e-6, or timm's 1e-5."""
    weight_eps: float = 1e-5
    """Epsilon of weight standardisation. The original code adds 1e-5 to the standard deviation, and timm adds 1e-8 to
    the variance."""
    weight_eps_on: WeightEps = "deviation"
    """Statistic that the epsilon of weight standardisation is added to: the standard deviation or the variance of a
    filter."""

    def __post_init__(self) -> None:
        _check(self.depths, self.width, 32, self.norm_eps, self.weight_eps, self.weight_eps_on)
        if self.stem not in get_args(Stem):
            raise ConfigError(f"stem={self.stem!r} is not one of {', '.join(map(repr, get_args(Stem)))}")

    @property
    def stem_stride(self) -> int:
        """Pixels between neighbouring cells of the stem's feature map."""
        return 4 if self.stem == "7x7+pool" else 2

    @property
    def stride(self) -> int:
        """Pixels between neighbouring cells of the last feature map."""
        return self.stem_stride * 2 ** max(0, len(self.depths) - 1)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        return self.width * EXPANSION * 2 ** (len(self.depths) - 1) if self.depths else self.width


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The config of a BiT ResNet. The defaults are BiT-R50x1. Raises `ConfigError` for values that do not fit.

    `stem="3x3"`, `unit="basic"` and `norm_groups=1` make a small ResNet for small images, such as BiT-Pico.
    """

    architecture: ClassVar[Literal["BiT"]] = "BiT"
    """Name of the architecture in files and messages."""
    has_uniform_blocks: ClassVar[bool] = False
    """False because stages differ in shape, so each unit would need a compiled graph of its own."""
    recomputes_blocks: ClassVar[bool] = False
    """False because units keep their activations."""
    adaptable: ClassVar[tuple[str, ...]] = ()
    """Names of the weights in a block that LoRA can adapt: none, because units have no dense layers."""
    head_hidden: ClassVar[int] = 0
    """Units of a hidden layer before the head: a ResNet has none."""
    weights_depend_on_size: ClassVar[bool] = False
    """False because no weight is made for one image size."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width of images in pixels. The network also accepts every other size."""
    channels: int = 3
    """Image channels: 3 for RGB, 1 for grey."""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Number of units in each stage."""
    width: int = 64
    """Number of channels of the first convolution: 64 times the width factor."""
    stem: ResNetStem = "7x7+pool"
    """Stem of the ResNet: the published "7x7+pool", or "3x3" for images below about 64 pixels."""
    unit: ResNetUnit = "bottleneck"
    """Residual unit: the published "bottleneck", or "basic" with two 3 x 3 convolutions."""
    norm_groups: int = 32
    """Number of groups of every group norm."""
    num_classes: int = 1000
    """Number of outputs of the head. 0 makes a network without a head."""
    head_bias: float = 0.0
    """Initial value of the head's biases."""
    norm_eps: float = 1e-5
    """Epsilon of every group norm."""
    weight_eps: float = 1e-10
    """Epsilon of weight standardisation: 1e-10, or timm's 1e-8."""
    weight_eps_on: WeightEps = "variance"
    """Statistic that the epsilon of weight standardisation is added to: the standard deviation or the variance of a
    filter."""

    def __post_init__(self) -> None:
        raise_problems(pairs(self, "image_size"))
        _check(self.depths, self.width, self.norm_groups, self.norm_eps, self.weight_eps, self.weight_eps_on)
        for name, kinds in (("stem", get_args(ResNetStem)), ("unit", get_args(ResNetUnit))):
            if (kind := getattr(self, name)) not in kinds:
                raise ConfigError(f"{name}={kind!r} is not one of {', '.join(map(repr, kinds))}")
        if not self.depths:
            raise ConfigError("depths=() leaves no stage, but a ResNet must have at least one")
        if min(*self.image_size, self.channels) < 1 or self.num_classes < 0:
            raise ConfigError(
                f"image_size={self.image_size} and channels={self.channels} must be at least 1, and "
                f"num_classes={self.num_classes} at least 0"
            )
        if not math.isfinite(self.head_bias):
            raise ConfigError(f"head_bias={self.head_bias} is not a finite number")

    @property
    def stem_stride(self) -> int:
        """Pixels between neighbouring cells of the stem's feature map."""
        return 4 if self.stem == "7x7+pool" else 1

    @property
    def first_stride(self) -> int:
        """Stride of the first stage: 2 after a stem of stride 1."""
        return 1 if self.stem == "7x7+pool" else 2

    @property
    def expansion(self) -> int:
        """Ratio of the channels after the first stage to `width`."""
        return EXPANSION if self.unit == "bottleneck" else BASIC_EXPANSION

    @property
    def embed_width(self) -> int:
        """Channels of the last feature map."""
        return self.width * self.expansion * 2 ** (len(self.depths) - 1)

    @property
    def summary(self) -> str:
        """Number of units of each stage, for tables."""
        return "-".join(map(str, self.depths))

    @property
    def num_blocks(self) -> int:
        """Number of residual units in all stages."""
        return sum(self.depths)

    @property
    def stream_width(self) -> int:
        """Channels of the last feature map. Learning rates are scaled by this number."""
        return self.embed_width

    @property
    def head_inputs(self) -> int:
        """Number of inputs of the head."""
        return self.embed_width

    @property
    def tokens(self) -> int:
        """Number of cells of the last feature map for an image of `image_size`."""
        return math.prod(self.grid_of(*self.image_size))

    def with_image_size(self, image_size: tuple[int, int]) -> ResNetConfig:
        """Return the same config for another image size."""
        return replace(self, image_size=image_size)

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ResNetConfig:
        """Return the same config with a head of `num_classes` outputs. There is no hidden layer to drop."""
        return replace(self, num_classes=num_classes)

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the nearest image size that the network accepts. A ResNet accepts every size of at least one pixel."""
        return max(1, height), max(1, width)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last feature map. Raise `ConfigError` for an image without pixels."""
        if min(height, width) < 1:
            raise ConfigError(f"an image of {height} x {width} has no pixels; both sides must be at least 1")
        stride = self.stem_stride * self.first_stride * 2 ** (len(self.depths) - 1)
        return math.ceil(height / stride), math.ceil(width / stride)

    def parameters(self) -> int:
        """Return the number of weights."""
        return costs.parameters(self)

    def macs(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the multiply-accumulates of the forward pass of one image."""
        return costs.macs(self, image_size or self.image_size)

    def inference_flops(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the FLOPs that are computed to predict one image."""
        return 2 * self.macs(image_size)

    def training_flops(self, image_size: tuple[int, int] | None = None, trained_blocks: int | None = None) -> int:
        """Return the FLOPs that a training step computes per image. By default all blocks are trained, otherwise the
        last `trained_blocks` with the layers after them, or only the head (0)."""
        return costs.training_flops(self, image_size or self.image_size, trained_blocks)

    def footprint(self, image_size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
        """Return the memory that a training step needs."""
        return costs.footprint(self, image_size, precision)


def _check(
    depths: tuple[int, ...], width: int, groups: int, norm_eps: float, weight_eps: float, weight_eps_on: str
) -> None:
    problems = []
    if any(depth < 1 for depth in depths):
        problems.append(f"depths={depths}: a stage must have at least one unit")
    if groups < 1 or width < groups or width % groups:
        problems.append(f"width={width} is not a multiple of {groups}, the number of groups of every norm")
    if not (norm_eps > 0 and weight_eps > 0):
        problems.append(f"norm_eps={norm_eps} and weight_eps={weight_eps} must be above 0")
    if weight_eps_on not in get_args(WeightEps):
        problems.append(f"weight_eps_on={weight_eps_on!r} is not one of {', '.join(map(repr, get_args(WeightEps)))}")
    if problems:
        raise ConfigError("\n".join(problems))
