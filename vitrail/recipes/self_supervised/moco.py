"""MoCo v3: a recipe for small images, and the pre-training of the paper."""

from __future__ import annotations

from functools import partial
from typing import Any

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.recipes.paper import DATA, IMAGENET_MEAN, IMAGENET_STD, PaperRecipe
from vitrail.tasks import MoCo
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["MOCO_RECIPES", "moco", "moco_i1k"]


def moco() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 7 x 7 pixels. The two views of an image are crops of 20 to
    100 % of its area with other brightness and contrast, and half are mirrored.

    Command: `vitrail train moco`, or `vitrail train --task moco`.
    Hardware: two CPU cores; any GPU.
    Time and result: 7 minutes on two cores beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 82.5 % (72.5 % with the initial weights), and a linear model 81.7 % (75.7 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=MoCo(projection_width=64, projection_hidden=256),
        model=ModelConfig(variant="ViT-Pico/7", overrides={"position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, crop_area=(0.2, 1.0), colour_jitter=(0.4, 0.4, 0.0, 0.0)),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="moco", epochs=20.0, batch_size=128, keep="last"),
    )


def moco_i1k(variant: str, overrides: dict[str, Any]) -> TrainConfig:
    """Return the config of a pre-training run of the published code on ImageNet, with 300 epochs.

    The optimizer is AdamW with a learning rate of 1.5e-4 per 256 images, which is 2.4e-3 for batches of 4,096, a
    warm-up of 40 epochs and a cosine decay. The patch projection is not trained.

    Some details differ from the published code. Blur, random grey and solarisation do not exist here, and colour jitter
    changes every view instead of 80 % of the views. The dense layers have layer norms instead of batch norms, and no
    norm after the last layer. Norms, biases and tokens do not decay.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=MoCo(projection_hidden=4096, projection_width=256),
        model=ModelConfig(variant=variant, overrides={"positions": "sincos-2d-mae", **overrides}),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD),
        augment=Augment(flip=True, crop_area=(0.08, 1.0), colour_jitter=(0.4, 0.4, 0.2, 0.1)),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4,
            base_batch_size=256,
            schedule="cosine",
            warmup="40 epochs",
            warmup_from_zero=True,
            weight_decay=0.1,
            clip=0.0,
        ),
        run=RunConfig(epochs=300.0, batch_size=4096, keep="last"),
    )


MOCO_RECIPES = tuple(
    PaperRecipe(
        name,
        partial(moco_i1k, variant, overrides),
        result,
        "2104.02057 and its code, CONFIG.md",
        "on ImageNet by a linear model of frozen features",
    )
    for name, variant, result, overrides in (
        ("vit-s16-i1k-moco", "ViT-S/16", "73.2 %", {"heads": 12}),
        ("vit-b16-i1k-moco", "ViT-B/16", "76.7 %", {}),
    )
)
"""Recipes of MoCo v3 in the published code."""
