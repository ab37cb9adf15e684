"""Pre-training of the paper "An Image is Worth 16x16 Words" (2010.11929): its Table 3, a recipe for each row."""

from __future__ import annotations

import functools
from typing import NamedTuple

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.models.variants import variant_config
from vitrail.recipes.paper import DATA, PaperRecipe
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["VIT_RECIPES", "Table3Row", "pretraining"]


class Table3Row(NamedTuple):
    """One network and data set of Table 3."""

    variant: str
    data: str
    epochs: int
    learning_rate: float
    accuracy: float | None
    """Published top-1 accuracy on ImageNet in percent, after fine-tuning at 384 pixels (Tables 5 and 6)."""


ROWS = {
    "vit-b32-jft": Table3Row("ViT-B/32", "jft", 7, 8e-4, 80.73),
    "vit-b16-jft": Table3Row("ViT-B/16", "jft", 7, 8e-4, 84.15),
    "vit-l32-jft": Table3Row("ViT-L/32", "jft", 7, 6e-4, 84.37),
    "vit-l16-jft-7": Table3Row("ViT-L/16", "jft", 7, 4e-4, 86.30),
    "vit-l16-jft": Table3Row("ViT-L/16", "jft", 14, 4e-4, 87.12),
    "vit-h14-jft": Table3Row("ViT-H/14", "jft", 14, 3e-4, 88.08),
    "resnet-r50x1-jft": Table3Row("BiT-R50x1", "jft", 7, 1e-3, 77.54),
    "resnet-r50x2-jft": Table3Row("BiT-R50x2", "jft", 7, 1e-3, 82.12),
    "resnet-r101x1-jft": Table3Row("BiT-R101x1", "jft", 7, 8e-4, 80.67),
    "resnet-r152x1-jft": Table3Row("BiT-R152x1", "jft", 7, 6e-4, 81.88),
    "resnet-r152x2-jft": Table3Row("BiT-R152x2", "jft", 7, 6e-4, 84.97),
    "hybrid-r50-b32-jft": Table3Row("R50+ViT-B/32", "jft", 7, 8e-4, 84.90),
    "hybrid-r50-b16-jft": Table3Row("R50+ViT-B/16", "jft", 7, 8e-4, 85.58),
    "hybrid-r50-l32-jft": Table3Row("R50+ViT-L/32", "jft", 7, 2e-4, 85.68),
    "hybrid-r50-l16-jft-7": Table3Row("R50+ViT-L/16", "jft", 7, 4e-4, 86.60),
    "hybrid-r50-l16-jft": Table3Row("R50+ViT-L/16", "jft", 14, 4e-4, 87.12),
    "vit-b32-i21k": Table3Row("ViT-B/32", "i21k", 90, 1e-3, 81.28),
    "vit-b16-i21k": Table3Row("ViT-B/16", "i21k", 90, 1e-3, 83.97),
    "vit-l32-i21k-30": Table3Row("ViT-L/32", "i21k", 30, 1e-3, None),
    "vit-l32-i21k": Table3Row("ViT-L/32", "i21k", 90, 1e-3, None),
    "vit-l16-i21k-30": Table3Row("ViT-L/16", "i21k", 30, 1e-3, None),
    "vit-l16-i21k": Table3Row("ViT-L/16", "i21k", 90, 1e-3, None),
    "vit-b32-i1k": Table3Row("ViT-B/32", "i1k", 300, 3e-3, 73.38),
    "vit-b16-i1k": Table3Row("ViT-B/16", "i1k", 300, 3e-3, 77.91),
    "vit-l32-i1k": Table3Row("ViT-L/32", "i1k", 300, 3e-3, 71.16),
    "vit-l16-i1k": Table3Row("ViT-L/16", "i1k", 300, 3e-3, 76.53),
}

OF_BOTH_LENGTHS = {"ViT-L/32": 80.99, "ViT-L/16": 85.15}
"""Accuracies after pre-training on ImageNet-21k. The paper does not state whether they are for 30 or for 90 epochs."""


def pretraining(variant: str, data: str, *, epochs: int, learning_rate: float) -> TrainConfig:
    """Return the config of a pre-training run of Table 3: Adam with decoupled weight decay, batches of 4,096 images,
    10,000 steps of warm-up.

    The head of a transformer has a hidden layer of the network's width. JFT-300M and ImageNet-21k have several labels
    per image, so the loss is the sigmoid loss, and the head's biases start at -10 as in big_vision. Gradients are
    clipped on ImageNet alone. Images are cropped and scaled as in the authors' code.
    """
    network = variant_config(variant)
    overrides: dict[str, object] = {"head_bias": 0.0 if data == "i1k" else -10.0}
    if network.architecture == "ViT":
        overrides |= {
            "head_hidden": network.embed_width, "activation": "gelu-tanh", "dropout": 0.0 if data == "jft" else 0.1,
        }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="softmax" if data == "i1k" else "sigmoid"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            schedule="cosine" if data == "i1k" else "linear",
            warmup="10000 steps",
            warmup_from_zero=True,
            weight_decay={"jft": 0.1, "i21k": 0.03, "i1k": 0.3}[data],
            clip=1.0 if data == "i1k" else 0.0,
        ),
        run=RunConfig(epochs=float(epochs), batch_size=4096, keep="last"),
    )


def _recipe(name: str, row: Table3Row) -> PaperRecipe:
    accuracy = row.accuracy or OF_BOTH_LENGTHS[row.variant]
    result = f"{accuracy:.2f} %" + ("" if row.accuracy else " (epochs not stated)")
    make = functools.partial(pretraining, row.variant, row.data, epochs=row.epochs, learning_rate=row.learning_rate)
    table = "6" if row.data == "jft" else "5"
    return PaperRecipe(name, make, result, f"2010.11929, Tables 3 and {table}")


VIT_RECIPES = tuple(_recipe(name, row) for name, row in ROWS.items())
"""Recipes of Table 3, trained on JFT-300M (jft), ImageNet-21k (i21k) and ImageNet (i1k)."""
