"""Fashion-MNIST, all of it."""

from __future__ import annotations

import dataclasses

from vitrail.recipes.demo import demo
from vitrail.training.config import TrainConfig

__all__ = ["fashion_mnist"]


def fashion_mnist() -> TrainConfig:
    """The 60,000 training images in under 20 minutes on two cores.

    Command: `vitrail train fashion-mnist`.
    """
    return dataclasses.replace(demo(), name="fashion-mnist", data="fashion-mnist", epochs=24.0, batch_size=64)
