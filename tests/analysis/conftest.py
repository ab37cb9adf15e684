"""Small networks in which every weight matters, for tests of what is inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig

Make = Callable[..., VisionTransformer]


@pytest.fixture(scope="session")
def make(randomised: Callable[[ViTConfig], VisionTransformer]) -> Make:
    """Return a function that makes networks of width 16 for images of 12 x 20 in patches of 4 x 5. No weight is 0 or
    1. It can replace fields of the config."""

    def build(**fields: Any) -> VisionTransformer:
        defaults = {
            "image_size": (12, 20), "patch_size": (4, 5), "channels": 3, "width": 16, "depth": 3, "heads": 4,
            "mlp_width": 24, "num_classes": 5,
        }  # fmt: skip
        return randomised(ViTConfig(**{**defaults, **fields}))

    return build


@pytest.fixture(scope="session")
def images_of() -> Callable[..., Tensor]:
    """Return a function that draws normal images of 12 x 20, or of another size."""

    def draw(count: int = 3, size: tuple[int, int] = (12, 20), channels: int = 3) -> Tensor:
        return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(1))

    return draw
