"""Recipes of "How to train your ViT?" (AugReg, 2106.10270) and of "Better plain ViT baselines" (2205.01580)."""

from __future__ import annotations

import functools
from typing import NamedTuple

from vitrail.data.augmentation.augment import Augment, Preset
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.variants import variant_config
from vitrail.recipes.paper import DATA, PaperRecipe
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["AUGREG_RECIPES", "PLAIN_RECIPES", "AugRegRow", "augreg", "plain_vit_s16"]

REGULARISATION = (0.0, 0.1)
"""Rates of dropout and stochastic depth in AugReg's grid. Within a run, both have the same rate."""

WEIGHT_DECAYS = (0.1, 0.03)
"""Weight decays in AugReg's grid, to be multiplied by the learning rate."""


def augreg(
    variant: str,
    data: str,
    *,
    augmentation: Preset,
    weight_decay: float = 0.1,
    regularisation: float = 0.0,
    epochs: int = 300,
) -> TrainConfig:
    """Return the config of a run of AugReg's grid: Adam, batches of 4,096, 10,000 steps of warm-up, a cosine schedule.

    `data` is i1k or i21k. The grid has seven presets `augmentation` (augreg-none to augreg-strong2), the rates
    `regularisation` of both dropout and stochastic depth (`REGULARISATION`), and `WEIGHT_DECAYS`. On ImageNet-21k the
    grid has runs of 30 and of 300 epochs. The loss is the sigmoid loss, with the initial biases of big_vision's
    configs, which store Adam's momentum in bfloat16. Networks for ImageNet have a hidden layer before the head, as in
    big_vision's config.
    """
    overrides = {
        "activation": "gelu-tanh", "dropout": regularisation, "stochastic_depth": regularisation,
        "head_bias": {"i1k": -6.9, "i21k": -10.0}[data],
        "head_hidden": variant_config(variant).embed_width if data == "i1k" else 0,
    }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="sigmoid"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
        augment=Augment(preset=augmentation, flip=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup="10000 steps", warmup_from_zero=True, weight_decay=weight_decay, clip=1.0,
            momentum_format="bfloat16",
        ),
        run=RunConfig(epochs=float(epochs), batch_size=4096, keep="last"),
    )  # fmt: skip


def plain_vit_s16(epochs: int = 90) -> TrainConfig:
    """Return the config of the S/16 of "Better plain ViT baselines", in every detail of big_vision's config.

    The network has mean pooling, fixed sin-cos positions and a hidden layer before the head. big_vision multiplies its
    weight decay of 1e-4 by the schedule alone. AdamW also multiplies by the learning rate of 1e-3, so the weight decay
    of this recipe is 0.1.
    """
    variant = "ViT-S/16"
    overrides = {
        "pool": "gap", "positions": "sincos-2d", "activation": "gelu-tanh",
        "head_hidden": variant_config(variant).embed_width,
    }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=Classification(loss="softmax"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
        augment=Augment(preset="augreg-light2", flip=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup="10000 steps", warmup_from_zero=True, weight_decay=0.1, clip=1.0,
            momentum_format="bfloat16",
        ),
        run=RunConfig(epochs=float(epochs), batch_size=1024, keep="last"),
    )  # fmt: skip


class AugRegRow(NamedTuple):
    """A network of AugReg with the settings of its recommended model."""

    variant: str
    augmentation: Preset
    weight_decay: float
    regularisation: float
    accuracy: float | None = None
    """Published top-1 accuracy on ImageNet in percent, after fine-tuning at 384 pixels."""


ON_I21K = {
    "ti16": AugRegRow("ViT-Ti/16", "augreg-none", 0.03, 0.0, 78.22),
    "s32": AugRegRow("ViT-S/32", "augreg-none", 0.1, 0.0, 79.58),
    "s16": AugRegRow("ViT-S/16", "augreg-light1", 0.03, 0.0, 83.73),
    "b32": AugRegRow("ViT-B/32", "augreg-light1", 0.1, 0.0, 83.59),
    "b16": AugRegRow("ViT-B/16", "augreg-medium1", 0.1, 0.0, 85.49),
    "l16": AugRegRow("ViT-L/16", "augreg-strong1", 0.1, 0.0, 85.59),
    "r-ti16": AugRegRow("R+ViT-Ti/16", "augreg-none", 0.03, 0.0, 75.40),
    "r26-s32": AugRegRow("R26+ViT-S/32", "augreg-light1", 0.1, 0.0, 83.85),
    "r50-l32": AugRegRow("R50+ViT-L/32", "augreg-medium1", 0.1, 0.1, 85.99),
}
"""Settings and results of the models that the authors recommend, by the names of their files."""

ON_I1K = {
    "ti16": AugRegRow("ViT-Ti/16", "augreg-light1", 0.1, 0.0),
    "s32": AugRegRow("ViT-S/32", "augreg-medium1", 0.1, 0.0),
    "s16": AugRegRow("ViT-S/16", "augreg-medium2", 0.1, 0.0),
    "b32": AugRegRow("ViT-B/32", "augreg-medium2", 0.1, 0.0),
    "b16": AugRegRow("ViT-B/16", "augreg-medium2", 0.1, 0.0),
    "l16": AugRegRow("ViT-L/16", "augreg-medium2", 0.1, 0.0),
}
"""Default settings of big_vision's config for ImageNet."""

PLAIN_RESULTS = {90: 76.5, 150: 78.5, 300: 80.0}
"""Top-1 accuracy on ImageNet's validation split in percent, by epochs (Table 1 of 2205.01580)."""


def _recipe(network: str, data: str, row: AugRegRow) -> PaperRecipe:
    make = functools.partial(
        augreg,
        row.variant,
        data,
        augmentation=row.augmentation,
        weight_decay=row.weight_decay,
        regularisation=row.regularisation,
    )
    if row.accuracy is None:
        result, source = "not stated", "2106.10270, configs of google-research/big_vision"
    else:
        result, source = f"{row.accuracy:.2f} %", "2106.10270, README of google-research/vision_transformer"
    return PaperRecipe(f"augreg-{network}-{data}", make, result, source)


AUGREG_RECIPES = (
    *(_recipe(network, "i21k", row) for network, row in ON_I21K.items()),
    *(_recipe(network, "i1k", row) for network, row in ON_I1K.items()),
)
"""Recipes of AugReg's recommended models on ImageNet-21k, and of big_vision's defaults on ImageNet."""

PLAIN_RECIPES = tuple(
    PaperRecipe(
        f"plain-vit-s16-{epochs}",
        functools.partial(plain_vit_s16, epochs),
        f"{accuracy:.1f} %",
        "2205.01580, Table 1",
        "on ImageNet's validation split",
    )
    for epochs, accuracy in PLAIN_RESULTS.items()
)
"""The ViT-S/16 of "Better plain ViT baselines", trained for 90, 150 and 300 epochs."""
