"""The recipe for the whole of Fashion-MNIST."""

from __future__ import annotations

from vitrail.recipes.demo import demo
from vitrail.training.config import TrainConfig

__all__ = ["fashion_mnist"]


def fashion_mnist() -> TrainConfig:
    """Return the config of a run with 1.3 million parameters on all 60,000 training images of Fashion-MNIST.

    Command: `vitrail train fashion-mnist`.
    Hardware: two CPU cores; any GPU.
    Time: 17 minutes on two cores with AVX512-BF16 (1,013 images/s; AMD EPYC 9004, 2026-11).
    Result: 92.36 % of the 10,000 test images, 93.99 % of the 3,163 validation images (seed 0, one run).
    """
    return demo().override(
        name="fashion-mnist",
        data="fashion-mnist",
        epochs=18.0,
        batch_size=64,
        width=128,
        heads=4,
        mlp_width=512,
        erase=0.25,
    )
