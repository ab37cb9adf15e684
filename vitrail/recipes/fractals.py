"""Supervised pre-training on pictures of fractals, which needs neither photographs nor labels of people."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["fractals"]


def fractals() -> TrainConfig:
    """Return the config of a run in which a small ResNet learns to distinguish 1,000 fractals (2101.08515).

    The network is that of the recipe `cifar10`. It sees 70,000 computed pictures of 32 x 32 pixels in colour, each of
    them once. This is too short to help with photographs: fine-tuned on 500 images of CIFAR-10 it is no better than the
    same network from random weights, and on 200 digits half a point better (docs/pretraining.md).
    `--data fractals:1000:1000:0:32:colour` trains on more pictures.

    Command: `vitrail train fractals`.
    Hardware: two CPU cores; any GPU.
    Time: 165 seconds of processor time on one core, with `--threads 0` (AMD EPYC 9004, 2026-11); 30 minutes beside
    other programs.
    Result: 5.8 % of the 1,000 validation images, which are other pictures of the same 1,000 fractals (seed 0, one run).
    """
    return TrainConfig(
        data=DataConfig(spec="fractals:1000:70:0:32:colour", validation_share=0.02),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="BiT-Pico"),
        images=Preprocess(image_size=(32, 32), channels=3),
        augment=Augment(flip=True, crop_area=(0.4, 1.0)),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="fractals", epochs=1.0, batch_size=128, threads="auto", keep="last"),
    )
