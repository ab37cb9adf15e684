"""The recipe for training from scratch on any folder of images."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["folder"]


def folder() -> TrainConfig:
    """Return the config of a run with a small network on colour images of 64 x 64 pixels.

    `vitrail train --init MODEL --data DIR` also uses this recipe, with the network and the preprocessing of MODEL.
    Without --init, `vitrail train --data DIR` chooses settings from the data.

    Command: `vitrail train folder --data DIR`. DIR has a folder of images per class, or train/, val/ and test/ with
    such folders.
    Hardware: two CPU cores; any GPU.
    Time and result depend on the images. A network from scratch needs hundreds of images per class to be useful.
    """
    return TrainConfig(
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="ViT-Nano/8", overrides={"position_std": 0.3}),
        images=Preprocess(image_size=(64, 64), channels=3, resize="crop"),
        augment=Augment(flip=True, shift=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(epochs=40.0, batch_size=64),
    )
