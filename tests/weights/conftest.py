"""A small model whose every weight matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.models.vit import VisionTransformer, ViTConfig
from vitrail.weights.bundle import Bundle

CLASSES = ("rose", "tulip", "黒い花 / black")


@pytest.fixture(scope="session")
def make_bundle() -> Callable[..., Bundle]:
    """Makes models for images of 12 x 10 with weights drawn from a seed; fields can be replaced."""

    def make(*, seed: int = 5, scores: str = "softmax", channels: int = 3, **fields: Any) -> Bundle:
        defaults = {
            "image_size": (12, 10), "patch_size": (4, 5), "width": 12, "depth": 2, "heads": 3, "mlp_width": 20,
            "num_classes": 3,
        }  # fmt: skip
        network = VisionTransformer(ViTConfig(**{**defaults, "channels": channels, **fields}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return Bundle(
            network=network,
            classes=CLASSES[: network.config.num_classes],
            preprocess=Preprocess(image_size=network.config.image_size, channels=channels, mean=(0.4,), std=(0.25,)),
            scores=scores,
            metrics={"test_accuracy": 0.1 + 0.2},
            provenance={"recipe": "demo", "seed": 3, "notes": ["ü", None, {"deep": 1.5}]},
        )

    return make


@pytest.fixture
def bundle(make_bundle: Callable[..., Bundle]) -> Bundle:
    """One of them."""
    return make_bundle()
