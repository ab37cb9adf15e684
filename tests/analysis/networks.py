"""Small networks and images, for tests of what is inside networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.make import randomised
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig


def make(**fields: Any) -> VisionTransformer:
    """Return a network of width 16 for images of 12 x 20 in patches of 4 x 5. No weight is 0 or 1."""
    defaults = {
        "image_size": (12, 20), "patch_size": (4, 5), "channels": 3, "width": 16, "depth": 3, "heads": 4,
        "mlp_width": 24, "num_classes": 5,
    }  # fmt: skip
    return randomised(ViTConfig(**{**defaults, **fields}))


def images_of(count: int = 3, size: tuple[int, int] = (12, 20), channels: int = 3) -> Tensor:
    """Draw normal images."""
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(1))
