"""The ResNets of Big Transfer (BiT, 1912.11370), and the root that turns a Vision Transformer into a hybrid.

The units of BiT normalise before each convolution (v2, "pre-activation") and pad by fixed amounts. The units of a
hybrid follow the Vision Transformer's own code: they normalise after each convolution (v1) and pad like TensorFlow's
"SAME". Both networks standardise the weights of every convolution (1903.10520) and use group norm instead of batch
norm.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.blocks import lecun_normal_
from vitrail.models.convolution import convolve
from vitrail.models.network import (
    Features,
    Layers,
    block_numbers,
    check_images,
    image_sides,
    with_new_head,
    with_resized_parts,
)
from vitrail.models.resnet_config import EXPANSION, ResNetConfig, ResNetUnit, RootConfig, WeightEps, units
from vitrail.models.shortcuts import has_plain_type, is_plain, skippable
from vitrail.settings import from_plain


class ResNet(nn.Module):
    """A BiT ResNet-v2, or a small ResNet for small images. `features` returns the cells of the last feature map as
    patches, and `embed` returns the mean of all cells."""

    def __init__(self, config: ResNetConfig | dict[str, Any]) -> None:
        """Make a network of random weights. The config may be what `vitrail.settings.to_plain` or JSON makes of it, as
        other libraries store it."""
        super().__init__()
        self.config = config = from_plain(ResNetConfig, config) if isinstance(config, dict) else config
        eps = config.weight_eps, config.weight_eps_on
        kernel, stride = (7, 2) if config.stem == "7x7+pool" else (3, 1)
        self.stem = StandardisedConv(config.channels, config.width, kernel, stride=stride, padding=kernel // 2, eps=eps)
        unit = functools.partial(UNITS[config.unit], groups=config.norm_groups)
        unit = functools.partial(unit, pools=True) if config.pools else unit
        self.stages = _stages(unit, config)
        self.norm = GroupNorm(config.norm_groups, config.embed_width, eps=config.norm_eps)
        self.head = nn.Linear(config.embed_width, config.num_classes) if config.num_classes else None
        if not self.norm.weight.is_meta:  # on "meta", weights are loaded later
            self.initialise()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return logits, or the embedding if the network has no head."""
        x = self.embed(images)
        return x if self.head is None else self.head(x)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        """Return the mean over the last feature map."""
        return self.features(images).patches.mean(dim=1)

    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: None = None) -> Features: ...
    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: Sequence[int]) -> tuple[Features, ...]: ...
    def features(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> Features | tuple[Features, ...]:
        """Return the cells of the last feature map, after the final norm and ReLU. With `layers`, return the cells
        after each of these residual units. The units of all stages are numbered from 0, or backward from -1. Raises
        `ConfigError` for a wrong number of channels, for images without pixels, and for an unknown unit.
        """
        if layers is None:
            return _cells_of(self.feature_map(images))
        chosen = block_numbers(layers, self.config.num_blocks)
        found: dict[int, Features] = {}  # the compiler does not know `dict[int, Features]()`
        x = self._after_stem(images)
        for number, unit in enumerate(self.layers().blocks):
            x = unit(x)
            if number in chosen:
                found[number] = _cells_of(x)
        return tuple(found[number] for number in chosen)

    def feature_map(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        """Return the last feature map, after the final norm and ReLU. Raises `ConfigError` as `features` does."""
        return F.relu(self.norm(self.stages(self._after_stem(images))))

    def _after_stem(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        check_images(images, self.config.channels)
        self.config.grid_of(images.shape[2], images.shape[3])
        # Large maps of few channels are faster if channels are last in memory, an order that `vmap` does not have.
        if self.config.stem == "3x3" and not torch._C._are_functorch_transforms_active():
            images = _with_channels_last(images)
        x = self.stem(images)
        if self.config.stem == "7x7+pool":
            # The pool has no padding of its own and sees the zeros that pad the map, as in BiT's own code.
            x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=2)
        return x

    def layers(self) -> Layers:
        """Return the modules from bottom to top. Residual units are the blocks."""
        units = [unit for stage in self.stages.children() for unit in stage.children()]
        return Layers([self.stem], units, [self.norm], [] if self.head is None else [self.head])

    def with_image_size(self, image_size: tuple[int, int]) -> ResNet:
        """Return the same weights in a network for another image size. All tensors are shared."""
        return with_resized_parts(self, self.config.with_image_size(image_size), {})

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ResNet:
        """Return the same network with a new head of zeros."""
        return with_new_head(self, num_classes, drop_hidden=drop_hidden)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights. Before standardisation, the weights of convolutions have the variance 1 / fan_in. The head
        is zero."""
        _initialise_convolutions(self)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)


def _with_channels_last(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return the images with their channels last in memory. Convolutions of them return maps in the same order."""
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel, both orders are the same in memory, and `contiguous` does not change the strides. Convolutions
    # choose the order of their results by the strides.
    return images.contiguous()[:, 0, :, :, None].movedim(3, 1)


def _cells_of(x: Float[Tensor, "b c h w"]) -> Features:
    tokens = x.flatten(2).transpose(1, 2)  # b (h w) c
    return Features(cls=None, registers=tokens[:, :0], patches=tokens, grid=(x.shape[2], x.shape[3]))


class HybridRoot(nn.Module):
    """The Vision Transformer's own ResNet-v1: a stem, and stages of post-activation units."""

    def __init__(self, config: RootConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        eps = config.weight_eps, config.weight_eps_on
        as_published, half = config.stem == "7x7+pool", config.width // 2
        self.before = None if as_published else StandardisedConv(channels, half, 3, padding="same", eps=eps)
        self.before_norm = None if as_published else GroupNorm(1, half, eps=config.norm_eps)
        kernel, into = (7, channels) if as_published else (3, half)
        self.stem = StandardisedConv(into, config.width, kernel, stride=2, padding="same", eps=eps)
        self.norm = GroupNorm(32 if as_published else 1, config.width, eps=config.norm_eps)
        self.stages = _stages(PostActivationUnit, config)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        """Return the feature map. Each side is the image's side divided by the config's stride, rounded up."""
        x = images
        if self.before is not None and self.before_norm is not None:
            x = F.relu(self.before_norm(self.before(x)))
        x = F.relu(self.norm(self.stem(x)))
        if self.config.stem == "7x7+pool":
            x = F.max_pool2d(_pad_same(x, 3, 2, value=-math.inf), 3, stride=2)
        return self.stages(x)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights. The last norm of every unit starts at zero, so at first every unit computes only its
        shortcut."""
        _initialise_convolutions(self)
        for module in self.modules():
            if isinstance(module, PostActivationUnit):
                nn.init.zeros_(module.norm3.weight)


class SmallRoot(ResNet):
    """A small ResNet below a Vision Transformer, which gives it its last feature map."""

    def __init__(self, config: RootConfig, channels: int) -> None:
        super().__init__(config.small(channels))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        return self.feature_map(images)


def make_root(config: RootConfig, channels: int) -> HybridRoot | SmallRoot:
    """Return the root of a hybrid for images of this number of channels."""
    return SmallRoot(config, channels) if config.is_small else HybridRoot(config, channels)


@skippable
class StandardisedConv(nn.Conv2d):
    """A convolution without bias whose filters are standardised to mean 0 and deviation 1 in every call."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | Literal["same"] = 0,
        eps: tuple[float, WeightEps],
    ) -> None:
        self.same = padding == "same"
        super().__init__(
            in_channels, out_channels, kernel, stride=stride, padding=0 if padding == "same" else padding, bias=False
        )
        self.eps = eps
        self.is_standardised = False
        """True if the stored filters are already standardised, as in a predictor's copy."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # on "meta" there is nothing to draw, and drawing is slow
            super().reset_parameters()

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        if self.same:
            x = _pad_same(x, self.kernel_size[0], self.stride[0])
        assert not isinstance(self.padding, str), "the constructor sets numbers"
        (down, across), (above, left) = self.stride, self.padding
        return convolve(x, self.operand, (down, across), (above, left))

    @property
    def operand(self) -> Float[Tensor, "b c kh kw"]:
        """The standardised filters, which the convolution uses."""
        if self.is_standardised:
            return self.weight
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        eps, added_to = self.eps
        deviation = (variance + eps).sqrt() if added_to == "variance" else variance.sqrt() + eps
        return (self.weight - mean) / deviation

    def freeze(self, dtype: torch.dtype | None) -> None:
        """Replace the filters by standardised filters, converted to `dtype` (None keeps the format).

        The layer cannot be trained afterwards: `Predictor` calls this on its own copy of a network. The filters of a
        layer with hooks or a parametrisation stay as they are, because they may be computed in every call.
        """
        if not (is_plain(self, StandardisedConv) and has_plain_type(self.weight)):
            return
        operand = self.operand.detach()
        self.weight = nn.Parameter(operand if dtype is None else operand.to(dtype), requires_grad=False)
        self.is_standardised = True


class GroupNorm(nn.GroupNorm):
    """Group norm that can be trained above frozen layers."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if torch.is_grad_enabled() and self.weight.requires_grad and not x.requires_grad:
            # If channels are last in memory and the input needs no gradient, the backward pass on a CPU ends the
            # process: it writes that gradient nowhere (torch 2.13).
            x = x.contiguous()
        return super().forward(x)


class PreActivationUnit(nn.Module):
    """BiT's bottleneck: a norm and a ReLU before each of three convolutions.

    If the shortcut has a convolution, the first norm and ReLU come before it as well.
    """

    def __init__(
        self,
        before: int,
        after: int,
        *,
        stride: int,
        groups: int = 32,
        norm_eps: float,
        weight_eps: tuple[float, WeightEps],
    ) -> None:
        super().__init__()
        middle = after // EXPANSION
        self.norm1 = GroupNorm(groups, before, eps=norm_eps)
        self.conv1 = StandardisedConv(before, middle, 1, eps=weight_eps)
        self.norm2 = GroupNorm(groups, middle, eps=norm_eps)
        self.conv2 = StandardisedConv(middle, middle, 3, stride=stride, padding=1, eps=weight_eps)
        self.norm3 = GroupNorm(groups, middle, eps=norm_eps)
        self.conv3 = StandardisedConv(middle, after, 1, eps=weight_eps)
        changes = stride > 1 or before != after
        self.shortcut = StandardisedConv(before, after, 1, stride=stride, eps=weight_eps) if changes else None

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        active, shortcut = _activated(self, x)
        y = self.conv1(active)
        y = self.conv2(F.relu(self.norm2(y)))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


class BasicUnit(nn.Module):
    """Two 3 x 3 convolutions (1512.03385), with a norm and a ReLU before each, as in BiT's bottleneck.

    If the shortcut has a convolution, the first norm and ReLU come before it as well. With `pools`, a max pool after
    the first convolution takes the place of its stride.
    """

    def __init__(
        self,
        before: int,
        after: int,
        *,
        stride: int,
        groups: int,
        pools: bool = False,
        norm_eps: float,
        weight_eps: tuple[float, WeightEps],
    ) -> None:
        super().__init__()
        self.norm1 = GroupNorm(groups, before, eps=norm_eps)
        self.conv1 = StandardisedConv(before, after, 3, stride=1 if pools else stride, padding=1, eps=weight_eps)
        self.pool = stride if pools else 1
        self.norm2 = GroupNorm(groups, after, eps=norm_eps)
        self.conv2 = StandardisedConv(after, after, 3, padding=1, eps=weight_eps)
        changes = stride > 1 or before != after
        self.shortcut = StandardisedConv(before, after, 1, stride=stride, eps=weight_eps) if changes else None

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        active, shortcut = _activated(self, x)
        y = self.conv1(active)
        if self.pool > 1:
            y = F.max_pool2d(y, self.pool, ceil_mode=True)
        return shortcut + self.conv2(F.relu(self.norm2(y)))


UNITS: dict[ResNetUnit, type[PreActivationUnit] | type[BasicUnit]] = {
    "bottleneck": PreActivationUnit,
    "basic": BasicUnit,
}
"""The residual unit of each kind."""


def _activated(
    unit: PreActivationUnit | BasicUnit, x: Float[Tensor, "b c h w"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b d gh gw"]]:
    """Return the input of a unit after its first norm and ReLU, and its shortcut."""
    active = F.relu(unit.norm1(x))
    return active, x if unit.shortcut is None else unit.shortcut(active)


class PostActivationUnit(nn.Module):
    """The hybrid's bottleneck: a norm after each convolution, and a ReLU after the sum."""

    def __init__(
        self, before: int, after: int, *, stride: int, norm_eps: float, weight_eps: tuple[float, WeightEps]
    ) -> None:
        super().__init__()
        middle = after // EXPANSION
        self.conv1 = StandardisedConv(before, middle, 1, padding="same", eps=weight_eps)
        self.norm1 = GroupNorm(32, middle, eps=norm_eps)
        self.conv2 = StandardisedConv(middle, middle, 3, stride=stride, padding="same", eps=weight_eps)
        self.norm2 = GroupNorm(32, middle, eps=norm_eps)
        self.conv3 = StandardisedConv(middle, after, 1, padding="same", eps=weight_eps)
        self.norm3 = GroupNorm(32, after, eps=norm_eps)
        changes = stride > 1 or before != after
        self.shortcut = (
            StandardisedConv(before, after, 1, stride=stride, padding="same", eps=weight_eps) if changes else None
        )
        self.shortcut_norm = GroupNorm(32, after, eps=norm_eps) if changes else None

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        shortcut = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut(x))
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(shortcut + self.norm3(self.conv3(y)))


def _pad_same(x: Float[Tensor, "b c h w"], kernel: int, stride: int, value: float = 0.0) -> Float[Tensor, "b c ph pw"]:
    """Pad like TensorFlow's "SAME", for ceil(size / stride) windows. If the number of padded cells is odd, the extra
    cell is added below or to the right."""
    pads = []
    for size in reversed(image_sides(x)):
        total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def _stages(make_unit: Callable[..., nn.Module], config: ResNetConfig | RootConfig) -> nn.Sequential:
    """Return all stages of a ResNet or of a hybrid's root."""
    made = (
        make_unit(
            unit.before,
            unit.after,
            stride=unit.stride,
            norm_eps=config.norm_eps,
            weight_eps=(config.weight_eps, config.weight_eps_on),
        )
        for unit in units(config, (224, 224))  # the size of images changes no weights
    )
    return nn.Sequential(*(nn.Sequential(*itertools.islice(made, depth)) for depth in config.depths))


def _initialise_convolutions(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, StandardisedConv):
            lecun_normal_(part.weight)
        elif isinstance(part, nn.GroupNorm):
            part.reset_parameters()
