"""The choice of a network: the name of a variant, and values that override fields of the variant's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import ConfigError, nearest
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.tokens.reduction import TokenReduction
from vitrail.models.variants import AnyConfig, config_type, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import from_plain

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
            if name not in known:
                of = self.variant or "a network"
                raise ConfigError(f"unknown field {name!r} of {of}; {nearest(name, known)}")
        overrides = dict(self.overrides)
        for name, cls in (("root", RootConfig), ("reduction", TokenReduction)):
            if isinstance(value := overrides.get(name), dict):  # JSON has lists instead of tuples
                overrides[name] = from_plain(cls, value)
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
    types = (ViTConfig, ResNetConfig) if variant is None else (config_type(variant),)
    return {
        item.name: item for cls in reversed(types) for item in dataclasses.fields(cls) if item.name not in FROM_DATA
    }
