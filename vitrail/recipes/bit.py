"""Pre-training of Big Transfer (BiT, 1912.11370): ResNets on ImageNet (BiT-S) and on ImageNet-21k (BiT-M)."""

from __future__ import annotations

import functools

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.recipes.paper import DATA, PaperRecipe
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["BIT_RECIPES", "upstream"]


def upstream(variant: str, data: str) -> TrainConfig:
    """Return the config of a pre-training run of BiT: SGD with momentum 0.9 for 90 epochs, with 5,000 steps of warm-up.

    The learning rate is 0.03 for 256 images and is divided by ten after 30, 60 and 80 epochs. A weight decay of 1e-4
    is added to the gradient, as SGD does by default.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="softmax" if data == "i1k" else "sigmoid"),
        model=ModelConfig(variant=variant),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.9, learning_rate=0.03, base_batch_size=256, schedule="staircase",
            stair_at=("30 epochs", "60 epochs", "80 epochs"), warmup="5000 steps", warmup_from_zero=True,
            weight_decay=1e-4, clip=0.0,
        ),
        run=RunConfig(epochs=90.0, batch_size=4096, keep="last"),
    )  # fmt: skip


BIT_RECIPES = tuple(
    PaperRecipe(
        f"bit-{network}-{data}",
        functools.partial(upstream, f"BiT-{network.upper().replace('X', 'x')}", data),
        result,
        "1912.11370, README of google-research/big_transfer",
        "on ImageNet after fine-tuning by BiT-HyperRule",
    )
    for network, data, result in (
        ("r50x1", "i1k", "not stated"),
        ("r50x1", "i21k", "80.68 %"),
        ("r152x2", "i21k", "85.15 %"),
    )
)
"""Recipes of BiT-S (i1k) and BiT-M (i21k)."""
