"""One table of sizes, and `create`, which makes a network from a name such as "ViT-S/16"."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from vitrail.errors import ConfigError, nearest
from vitrail.models.vit import VisionTransformer, ViTConfig

__all__ = ["PUBLISHED", "VARIANTS", "Variant", "create", "variant_config"]


class Variant(NamedTuple):
    """The four numbers that a size stands for."""

    width: int
    depth: int
    mlp_width: int
    heads: int


VARIANTS = {
    "Pico": Variant(96, 6, 384, 3),  # ours, for images of 28 to 64 pixels on a CPU
    "Nano": Variant(192, 8, 768, 3),  # ours, likewise
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

PUBLISHED = (
    "ViT-Pico/7", "ViT-Nano/8", "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-M/16", "ViT-B/32", "ViT-B/16", "ViT-B/8",
    "ViT-L/32", "ViT-L/16", "ViT-So400m/14", "ViT-H/14", "ViT-g/14", "ViT-G/14", "ViT-e/14",
)  # fmt: skip
"""Sizes with the patches they were published with, as `vitrail models` lists them. Any size takes any patch."""

NAME = re.compile(r"ViT-(?P<size>\w+)/(?P<patch_h>[1-9]\d*)(x(?P<patch_w>[1-9]\d*))?")


def variant_config(name: str, *, image_size: int | tuple[int, int] = 224, **fields: Any) -> ViTConfig:
    """The config that `name` stands for: "ViT-B/16", or "ViT-B/16x8" for patches of 16 rows and 8 columns.

    `fields` replace those of `ViTConfig`. Raises `ConfigError` for a name or a field that does not exist.
    """
    match = NAME.fullmatch(name)
    if match is None or match["size"] not in VARIANTS:
        rule = "a name is ViT-SIZE/PATCH" if match is None else f"size {match['size']!r} does not exist"
        raise ConfigError(f"unknown variant {name!r}: {rule}; {nearest(name, PUBLISHED)}")
    known = ViTConfig.__dataclass_fields__
    for field in fields:
        if field not in known:
            raise ConfigError(f"unknown field {field!r} of {name}; {nearest(field, known)}")
    patch_size = int(match["patch_h"]), int(match["patch_w"] or match["patch_h"])
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(size) != 2:
        raise ConfigError(f"image_size={image_size} must be one number or (height, width)")
    return ViTConfig(**{**VARIANTS[match["size"]]._asdict(), "patch_size": patch_size, "image_size": size, **fields})


def create(name: str, *, image_size: int | tuple[int, int] = 224, **fields: Any) -> VisionTransformer:
    """A network with random weights: `create("ViT-S/16", num_classes=10, image_size=(224, 160))`."""
    return VisionTransformer(variant_config(name, image_size=image_size, **fields))
