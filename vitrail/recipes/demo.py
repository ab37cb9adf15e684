"""The demo: a small network on bundled images, which trains in a few minutes."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["demo"]


def demo() -> TrainConfig:
    """Return the config of a run on the 10,000 bundled images of Fashion-MNIST.

    The network is a small Vision Transformer of 728 thousand parameters, with two 3 x 3 convolutions before its
    patches. The convolutions improve the accuracy on a few thousand small images. `--variant ViT-Pico/7
    --image-size 28 28` trains a network without convolutions.

    Command: `vitrail train`, or `make demo`.
    Hardware: two CPU cores; any GPU.
    Time: 285 and 251 seconds on two cores with AVX512-BF16 (880 and 1,010 images/s; AMD EPYC 9004, 2026-11).
    Result: 88.40 % and 89.05 % of the 2,000 test images, 89.3 % and 90.2 % of the 531 validation images (seeds 0, 1).
    docs/log.md explains the choice of the settings.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="Conv+ViT-Pico/8", overrides={"position_std": 0.3}),
        images=Preprocess(image_size=(32, 32), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, erase=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="demo", epochs=26.0, batch_size=32, keep="last"),
    )
