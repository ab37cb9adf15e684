"""The recipe for the whole of Fashion-MNIST."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["fashion_mnist"]


def fashion_mnist() -> TrainConfig:
    """Return the config of a run with a small ResNet on all 60,000 training images of Fashion-MNIST.

    The network has 0.3 million parameters. In the time that two CPU cores need, it learns more than a Vision
    Transformer. `--variant Conv+ViT-Pico/8 --image-size 32 32 --width 128 --heads 4 --mlp-width 512` trains a Vision
    Transformer with two convolutions. Other Vision Transformers need an `--image-size` that their patches divide.

    Command: `vitrail train fashion-mnist`.
    Hardware: two CPU cores; any GPU.
    Time: 797 to 817 seconds of training on two cores with AVX512-BF16 (1,980 images/s; AMD EPYC 9004, 2026-11).
    Result: 93.59, 94.28 and 94.11 % of the 10,000 test images, 94.97 to 95.23 % of the 3,000 validation images (seeds
    0 to 2).
    docs/log.md explains the choice of the network.
    """
    return TrainConfig(
        data=DataConfig(spec="fashion-mnist", validation_share=0.05),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="BiT-Pico"),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, shift=2, erase=0.25),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="fashion-mnist", epochs=28.0, batch_size=128),
    )
