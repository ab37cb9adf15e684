"""The demo: bundled images, a small network, a few minutes."""

from __future__ import annotations

from vitrail.data.augment import Augment
from vitrail.data.preprocess import Preprocess
from vitrail.training.config import ModelConfig, OptimizerConfig, TrainConfig

__all__ = ["demo"]


def demo() -> TrainConfig:
    """Fashion-MNIST's bundled 10,000 images in a few minutes on two cores.

    Command: `vitrail train` (or `make demo`).
    """
    return TrainConfig(
        name="demo",
        data="bundled",
        validation_share=0.05,
        epochs=36.0,
        batch_size=32,
        label_smoothing=0.1,
        keep="last",
        model=ModelConfig(variant="ViT-Pico/7", position_std=0.3),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, erase=0.5),
        optimization=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
    )
