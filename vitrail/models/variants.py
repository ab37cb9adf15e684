"""The table of names ("ViT-B/16", the hybrid "R50+ViT-B/16", "BiT-R50x1"), `create`, which makes a network by name, and
the choice of a run's network.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from vitrail.errors import ConfigError, check_known, nearest
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.registry import Registry
from vitrail.settings import bare_names, raise_problems, typed, typed_fields

AnyConfig = ViTConfig | ResNetConfig
AnyNetwork = VisionTransformer | ResNet

ARCHITECTURES: dict[str, tuple[type[AnyConfig], type[AnyNetwork]]] = {
    "ViT": (ViTConfig, VisionTransformer),
    "BiT": (ResNetConfig, ResNet),
}
"""The config class and the network class of each architecture, by `config.architecture`."""


class Variant(NamedTuple):
    """The four numbers that define the size of a transformer."""

    width: int
    depth: int
    mlp_width: int
    heads: int


_SIZES = {
    "Pico": Variant(96, 6, 384, 3),  # ours, for images of 28 to 64 pixels on a CPU
    "Nano": Variant(192, 8, 768, 3),  # ours, for the same images
    "Ti": Variant(192, 12, 768, 3),  # 2012.12877, 2106.10270
    "S": Variant(384, 12, 1536, 6),
    "M": Variant(512, 12, 2048, 8),
    "B": Variant(768, 12, 3072, 12),  # the paper's Table 1, with L and H
    "L": Variant(1024, 24, 4096, 16),
    "So400m": Variant(1152, 27, 4304, 16),  # 2305.13035
    "H": Variant(1280, 32, 5120, 16),
    "g": Variant(1408, 40, 6144, 16),  # 2106.04560, with G
    "G": Variant(1664, 48, 8192, 16),
    "e": Variant(1792, 56, 15360, 16),  # 2209.06794
}

VARIANTS = Registry[Variant](
    {},
    rest=lambda: _SIZES,
    fits=(
        lambda part: isinstance(part, Variant) and all(isinstance(number, int) and number > 0 for number in part),
        "a Variant of four whole numbers above 0",
    ),
)
"""Sizes by their names, which consist of letters, digits and underscores."""

RESNETS = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
"""Number of units in each of the four stages of a ResNet, by the depth of the ResNet."""

SMALL_RESNETS: dict[str, dict[str, Any]] = {
    "Pico": {"width": 16},
    "Nano": {"width": 32},
    "Micro": {"width": 24, "pools": True},
    "Milli": {"width": 32, "pools": True},
}
"""Channels of the stem of each small ResNet, which is ours, for images of 28 to 64 pixels on a CPU, and whether it
halves the sides by max pools."""

PUBLISHED = (
    "ViT-Pico/7", "Conv+ViT-Pico/8", "RPico+ViT-Pico/8", "RMicro+ViT-Pico/8", "RMilli+ViT-Pico/8", "ViT-Nano/8",
    "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-M/16", "ViT-B/32", "ViT-B/16", "ViT-B/8",
    "ViT-L/32", "ViT-L/16", "ViT-So400m/14", "ViT-H/14", "ViT-g/14", "ViT-G/14", "ViT-e/14",
    "R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32",
    "BiT-R50x1", "BiT-R101x1", "BiT-R50x3", "BiT-R101x3", "BiT-R152x2", "BiT-R152x4", "BiT-R200x3",
    "BiT-Pico", "BiT-Nano", "BiT-Micro", "BiT-Milli",
)  # fmt: skip
"""Combinations of size and patch that `vitrail models` lists: published ones, and the small networks of this package.
Any size also works with any other patch."""

VIT = re.compile(r"ViT-(?P<size>\w+)/(?P<patch_h>[1-9]\d*)(x(?P<patch_w>[1-9]\d*))?")
HYBRID = re.compile(
    rf"(Conv|R(?P<small>{'|'.join(SMALL_RESNETS)})"
    r"|R((?P<layers>\d+)(x(?P<factor>[1-9]\d*))?)?)\+ViT-(?P<size>\w+)/(?P<patch>[1-9]\d*)"
)
BIT = re.compile(r"BiT-R(?P<layers>\d+)x(?P<factor>[1-9]\d*)")


def variant_config(name: str, *, image_size: int | tuple[int, int] = 224, **fields: Any) -> AnyConfig:
    """Return the config of a variant.

    - "ViT-B/16", or "ViT-B/16x8" for patches of 16 rows and 8 columns.
    - "R50+ViT-B/16": a hybrid with 16 pixels between neighbouring tokens. With "/16", the root has three stages, and
      the third stage also contains the units of a ResNet's fourth stage. With "/32", the root has four stages and a
      patch is one cell. With "/64", a patch is 2 x 2 cells, and so on. The root of "R101x3+ViT-B/16" is three times as
      wide. The root of "R+ViT-Ti/16" has no stages, and a patch is 8 x 8 cells, as in the original code. Neighbouring
      tokens are therefore 32 pixels apart, despite the name.
    - "Conv+ViT-Pico/8" (ours, for small images): two 3 x 3 convolutions, of stride 1 and 2, and patches of 4 x 4 cells.
    - "RPico+ViT-Pico/8" (ours, for small images): the stages of BiT-Pico. Each of them halves the sides, so a patch is
      one cell of the third stage. With "/4", the root has two stages, and with "/16" a patch is 2 x 2 cells.
    - "BiT-R50x1".
    - "BiT-Pico" and "BiT-Nano" (ours, for small images): a 3 x 3 convolution of stride 1, and three stages of one unit
      of two 3 x 3 convolutions. "BiT-Micro" and "BiT-Milli" halve the sides by max pools instead of strides.
      "RNano+ViT-Pico/8", "RMicro+ViT-Pico/8" and "RMilli+ViT-Pico/8" are hybrids of theirs.

    `fields` replace fields of the `ViTConfig` or `ResNetConfig`. Raises `ConfigError` for an unknown name or field,
    and for a value of another type.
    """
    config = _named(name)
    known = bare_names(type(config))
    raise_problems(
        f"unknown field {given!r} of {name}; {nearest(given, known)}" for given in fields if given not in known
    )
    return dataclasses.replace(config, **typed_fields(type(config), {"image_size": image_size, **fields}))


def is_variant(name: str) -> bool:
    """Return True for the name of a variant."""
    with suppress(ConfigError):
        return bool(_named(name))
    return False


def create(name: str, *, image_size: int | tuple[int, int] = 224, **fields: Any) -> AnyNetwork:
    """Return a network with random weights: `create("ViT-S/16", num_classes=10, image_size=(224, 160))`."""
    return build(variant_config(name, image_size=image_size, **fields))


@torch.inference_mode(False)
def build(config: AnyConfig) -> AnyNetwork:
    """Return the network that a config describes, with random weights, which can be trained even if the caller is in
    inference mode."""
    network_class: Any = ARCHITECTURES[config.architecture][1]
    return network_class(config)


def transformer(network: nn.Module) -> VisionTransformer | None:
    """Return the network if it is a Vision Transformer or a hybrid, and None otherwise."""
    return network if isinstance(network, VisionTransformer) else None


def transformer_config(config: AnyConfig | None) -> ViTConfig | None:
    """Return the config if it describes a Vision Transformer or a hybrid, and None otherwise."""
    return config if isinstance(config, ViTConfig) else None


def _named(name: str) -> AnyConfig:
    """Return the config of a variant. The image size is a placeholder that the patch size divides."""
    name = typed(str, name, "variant")
    if match := VIT.fullmatch(name):
        patch = int(match["patch_h"]), int(match["patch_w"] or match["patch_h"])
        return ViTConfig(**_size(match, name)._asdict(), patch_size=patch, image_size=patch)
    if match := HYBRID.fullmatch(name):
        root, cells = _root(match, name)
        side = root.stride * cells
        size = _size(match, name)._asdict()
        return ViTConfig(**size, root=root, patch_size=(cells, cells), image_size=(side, side))
    if match := BIT.fullmatch(name):
        return ResNetConfig(depths=_layers(match, name), width=64 * int(match["factor"]))
    if (small := name.removeprefix("BiT-")) in SMALL_RESNETS and small != name:
        return ResNetConfig(
            depths=(1, 1, 1), stem="3x3", unit="basic", norm_groups=1, image_size=(32, 32), **SMALL_RESNETS[small]
        )
    rule = "names have the form ViT-SIZE/PATCH, R50+ViT-SIZE/PATCH or BiT-R50x1"
    raise ConfigError(f"unknown variant {name!r}: {rule}; {nearest(name, PUBLISHED)}")


def _size(match: re.Match[str], name: str) -> Variant:
    if match["size"] not in VARIANTS:
        raise ConfigError(
            f"unknown variant {name!r}: size {match['size']!r} does not exist; {nearest(name, PUBLISHED)}"
        )
    return VARIANTS[match["size"]]


def _layers(match: re.Match[str], name: str) -> tuple[int, ...]:
    if match["layers"] not in RESNETS:
        raise ConfigError(
            f"unknown variant {name!r}: a ResNet of {match['layers']} layers is not in the table; choose from "
            f"{', '.join(RESNETS)}"
        )
    return RESNETS[match["layers"]]


def _root(match: re.Match[str], name: str) -> tuple[RootConfig, int]:
    """Return the root of a hybrid, and the side of a patch in cells of its feature map."""
    pixels = int(match["patch"])
    if small := match["small"]:
        stages = min(3, (pixels & -pixels).bit_length() - 1)
        if not stages:
            raise ConfigError(
                f"unknown variant {name!r}: the first stage of the root halves the sides, so the patch must be even"
            )
        return RootConfig(stem="3x3", depths=(1,) * stages, **SMALL_RESNETS[small]), pixels // 2**stages
    if match["layers"] is None:
        if pixels % 2:
            raise ConfigError(f"unknown variant {name!r}: the patch of a root without stages must be a multiple of 2")
        return RootConfig() if name.startswith("R") else RootConfig(stem="3x3+3x3", width=32), pixels // 2
    layers, width = _layers(match, name), 64 * int(match["factor"] or 1)
    if pixels == 16:
        return RootConfig(depths=(*layers[:2], layers[2] + layers[3]), width=width), 1
    if pixels % 32:
        raise ConfigError(f"unknown variant {name!r}: a hybrid's patch must be 16, or a multiple of 32")
    return RootConfig(depths=layers, width=width), pixels // 32


DEFAULT_VARIANT = "ViT-Pico/7"

SIZES = frozenset({"width", "depth", "heads", "mlp_width", "patch_size", "depths"})
"""Fields that the name of a variant decides. If another variant's values were kept, a network called ViT-S/16 could
have the width of a small one."""

FROM_DATA = ("image_size", "channels", "num_classes")
"""Config fields that cannot be overridden, because the images and the classes determine them."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The choice of the network to train: a variant, and overrides of fields of its `ViTConfig` or `ResNetConfig`.

    Raises `ConfigError` for an unknown variant, and for overrides that name no field of the variant's config.
    """

    variant: str | None = None
    """Network and patch size, for example ViT-S/16, R50+ViT-B/16 (hybrid) or BiT-R50x1. `vitrail models` lists all. By
    default ViT-Pico/7. With --init, the run uses the network of the initial model."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace fields of the variant's config, such as {"width": 96, "class_token": True}."""

    def __post_init__(self) -> None:
        known = override_fields(self.variant)
        for name in self.overrides:
            check_known(name, known, f"unknown field {name!r} of {self.variant or 'a network'}")
        overrides = dict(self.overrides)
        for kind in (ResNetConfig, ViTConfig) if self.variant is None else (type(_named(self.variant)),):
            own = {name: value for name, value in overrides.items() if name in bare_names(kind)}
            overrides |= typed_fields(kind, own)
        object.__setattr__(self, "overrides", overrides)

    @property
    def name(self) -> str:
        """The variant, or its default."""
        return self.variant or DEFAULT_VARIANT

    def override(self, **fields: Any) -> ModelConfig:
        """Return a copy with another variant or other overrides. An override of None removes an earlier override.

        If the variant changes, two kinds of earlier overrides are dropped: sizes (`SIZES`), and fields that the new
        variant's config does not have.
        """
        variant = fields.pop("variant", self.variant)
        known = set(override_fields(variant))
        if variant != self.variant:
            known -= SIZES
        kept = {name: value for name, value in self.overrides.items() if name in known}
        overrides = {name: value for name, value in {**kept, **fields}.items() if value is not None}
        return dataclasses.replace(self, variant=variant, overrides=overrides)

    def value_of(self, name: str, *, image_size: tuple[int, int], channels: int) -> Any:
        """Return the value of an override, or else of the field of the variant's config.

        Return None if the variant is not named, since a model to start from can decide it, and for a field that the
        variant's config does not have.
        """
        if self.variant is None or name in self.overrides:
            return self.overrides.get(name)
        try:
            config = self.resolve(num_classes=1, image_size=image_size, channels=channels)
        except ConfigError:
            return None
        return getattr(config, name, None)

    def resolve(self, *, num_classes: int, image_size: tuple[int, int], channels: int) -> AnyConfig:
        """Return the network's config for this number of classes, image size and number of channels. Raises
        `ConfigError`."""
        shape = {"image_size": image_size, "channels": channels, "num_classes": num_classes}
        return variant_config(self.name, **shape, **self.overrides)  # type: ignore[arg-type]


def override_fields(variant: str | None = None) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that can be overridden, by name. If `variant` is None, return the fields of all configs."""
    types = (ViTConfig, ResNetConfig) if variant is None else (type(_named(variant)),)
    return {
        item.name: item for cls in reversed(types) for item in dataclasses.fields(cls) if item.name not in FROM_DATA
    }
