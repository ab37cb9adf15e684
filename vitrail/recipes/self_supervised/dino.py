"""Self-distillation (DINO): a recipe for small images, and the pre-training of the paper."""

from __future__ import annotations

from functools import partial
from typing import Any

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.recipes.paper import DATA, IMAGENET_MEAN, IMAGENET_STD, PaperRecipe
from vitrail.tasks import Dino
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["DINO_RECIPES", "dino", "dino_i1k"]


def dino() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 7 x 7 pixels, which pools the mean of its patches. Its two
    global views are crops of 40 to 100 % of an image's area, and its four local views are crops of 15 to 50 % with
    14 x 14 pixels.

    Command: `vitrail train dino`, or `vitrail train --task dino`.
    Hardware: two CPU cores; any GPU.
    Time and result: 27 minutes on half of a core, with `--threads 0`. Of 531 validation images, 20 nearest neighbours
    classify 78.9 % (70.2 % with the initial weights), and a linear model 81.4 % (73.8 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=Dino(
            local_views=4,
            local_size=(14, 14),
            local_crop_area=(0.15, 0.5),
            prototypes=256,
            projection_hidden=256,
            bottleneck=64,
            teacher_momentum=0.98,
        ),
        model=ModelConfig(variant="ViT-Pico/7", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, crop_area=(0.4, 1.0), colour_jitter=(0.4, 0.4, 0.0, 0.0)),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="dino", epochs=20.0, batch_size=64, keep="last"),
    )


def dino_i1k(variant: str, epochs: float, batch_size: int, task: dict[str, Any]) -> TrainConfig:
    """Return the config of a pre-training run of the published code on ImageNet.

    The optimizer is AdamW with a learning rate of 5e-4 per 256 images, a warm-up of 10 epochs and a cosine decay to
    1e-6. The weight decay rises from 0.04 to 0.4. Ten views of an image are processed: two of 224 x 224 pixels with 40
    to 100 % of its area, and eight of 96 x 96 pixels with 5 to 40 %.

    Some details differ from the published code. Blur, random grey and solarisation do not exist here, and colour jitter
    changes every view instead of 80 % of the views. The norm of the whole gradient is limited to 3, and not that of
    each weight. While the prototypes are frozen, the optimizer collects their gradients. The temperature of the teacher
    changes with every step instead of every epoch. The class token and the positions do not decay.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=Dino(local_size=(96, 96), prototypes=65_536, projection_hidden=2048, bottleneck=256, **task),
        model=ModelConfig(variant=variant, overrides={"stochastic_depth": 0.1}),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"),
        augment=Augment(flip=True, crop_area=(0.4, 1.0), colour_jitter=(0.4, 0.4, 0.2, 0.1)),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            base_batch_size=256,
            schedule="cosine",
            end_learning_rate=1e-6,
            warmup="10 epochs",
            warmup_from_zero=True,
            weight_decay=0.04,
            end_weight_decay=0.4,
            clip=3.0,
        ),
        run=RunConfig(epochs=epochs, batch_size=batch_size, keep="last"),
    )


DINO_RECIPES = tuple(
    PaperRecipe(
        name,
        partial(dino_i1k, "ViT-S/16", epochs, batch_size, task),
        result,
        "2104.14294 and its code, README",
        "on ImageNet by a linear model of the class tokens of the last four blocks",
    )
    for name, epochs, batch_size, result, task in (  # 8 and 16 GPUs with 64 images each
        ("vit-s16-i1k-dino-100", 100.0, 512, "74.0 % (nearest neighbours: 69.3 %)", {}),
        (
            "vit-s16-i1k-dino-300",
            300.0,
            1024,
            "76.0 % (nearest neighbours: 73.3 %)",
            {"target_temperature": 0.07, "target_temperature_epochs": 30.0, "unit_prototypes": False},
        ),
    )
)
"""Recipes of DINO in the published code."""
