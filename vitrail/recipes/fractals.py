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
    """Return the config of a run in which a small Vision Transformer learns to distinguish 200 fractals (2101.08515).

    The network is that of the demo with a width of 128. It sees 200,000 computed pictures of 32 x 32 pixels in colour,
    each of them six times. `small`, the model in the package, was trained by this recipe. docs/pretraining.md says what
    it is worth: with 500 images of CIFAR-10 about 10 points of accuracy more than from random weights.

    Command: `vitrail train fractals`.
    Hardware: two CPU cores; any GPU.
    Time: 57 minutes on one core beside two other programs on two cores, of which drawing the pictures took about 10;
    at the end, with a core of its own, 600 images/s (AMD EPYC 9004, 2026-11).
    Result: 99.05 % of the 2,000 validation images, which are other pictures of the same 200 fractals (seed 0, one run).
    """
    return TrainConfig(
        data=DataConfig(spec="fractals:200:1000:0:32:colour", validation_share=0.01),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(
            variant="Conv+ViT-Pico/8",
            overrides={"width": 128, "heads": 4, "mlp_width": 512, "position_std": 0.3, "pool": "gap"},
        ),
        images=Preprocess(
            image_size=(32, 32), channels=3, resize="crop", mean=(0.508, 0.514, 0.492), std=(0.283, 0.295, 0.316)
        ),
        augment=Augment(flip=True, shift=4, erase=0.25),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="fractals", epochs=6.0, batch_size=128, threads="auto", keep="last"),
    )
