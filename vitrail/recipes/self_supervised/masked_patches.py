"""Masked patch prediction: a recipe for small images, and the pre-training of the paper."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.recipes.paper import DATA, PaperRecipe
from vitrail.tasks import MaskedPatches
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["MASKED_PATCHES_RECIPES", "masked_patches", "masked_patches_jft"]


def masked_patches() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 4 x 4 pixels, which pools the mean of its patches. It
    predicts 4 x 4 grey levels of each corrupted patch.

    Command: `vitrail train masked-patches`, or `vitrail train --task masked-patches`.
    Hardware: two CPU cores; any GPU.
    Time and result: 10 minutes on one core beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 72.5 % (64.8 % with the initial weights), and a linear model 83.1 % (73.4 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=MaskedPatches(patch_target="colours"),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="masked-patches", epochs=20.0, batch_size=32, keep="last"),
    )


def masked_patches_jft() -> TrainConfig:
    """Return the config of the paper's masked patch prediction with ViT-B/16 on JFT-300M (2010.11929, B.1.2).

    The run has a million steps with batches of 4,096 images, which are about 14 epochs. The optimizer is Adam with a
    learning rate of 2e-4, a warm-up of 10,000 steps and a cosine decay. The mean colours of the corrupted patches are
    predicted. The paper states neither weight decay nor augmentation for this run: there is no weight decay, and images
    are cropped and mirrored as in the paper's other pre-training.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["jft"], validation="train", validation_share=0.01),
        task=MaskedPatches(),
        model=ModelConfig(variant="ViT-B/16", overrides={"activation": "gelu-tanh"}),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            learning_rate=2e-4,
            schedule="cosine",
            warmup="10000 steps",
            warmup_from_zero=True,
            weight_decay=0.0,
            clip=0.0,
        ),
        run=RunConfig(epochs=14.0, steps=1_000_000, batch_size=4096, keep="last"),
    )


MASKED_PATCHES_RECIPES = (
    PaperRecipe("vit-b16-jft-masked", masked_patches_jft, "79.9 %", "2010.11929, section 4.6 and appendix B.1.2"),
)
"""Recipes of masked patch prediction in the paper."""
