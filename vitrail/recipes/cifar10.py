"""The recipe for CIFAR-10, from scratch."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["cifar10"]


def cifar10() -> TrainConfig:
    """Return the config of a run with a small ResNet on CIFAR-10, with a tenth of the training images held out.

    The network has 0.3 million parameters. In the time that two CPU cores need, it learns more than a Vision
    Transformer. `--variant Conv+ViT-Pico/8 --width 128 --heads 4 --mlp-width 512` trains a Vision Transformer with two
    convolutions.

    Command: `vitrail train cifar10`. `--data DIR` names a copy on the disk.
    Hardware: two CPU cores; any GPU.
    Time: 1,206, 1,062 and 1,136 seconds on two free cores with AVX512-BF16 (AMD EPYC 9004, 2026-11-23).
    Result: 85.6, 85.6 and 85.6 % of the test images, 86.8, 86.3 and 86.7 % of the 5,000 validation images (seeds 0 to
    2).
    docs/log.md explains the choice of the network.
    """
    return TrainConfig(
        data=DataConfig(spec="hf:uoft-cs/cifar10", validation_share=0.1),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="BiT-Pico"),
        images=Preprocess(image_size=(32, 32), channels=3, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262)),
        augment=Augment(flip=True, shift=4, erase=0.25),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="cifar10", epochs=38.0, batch_size=128, threads="auto"),
    )
