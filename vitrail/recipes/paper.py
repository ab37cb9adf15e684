"""Recipes of papers: one row each, with the command and the published result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitrail.training.config import TrainConfig

__all__ = ["DATA", "FINE_TUNED", "IMAGENET_MEAN", "IMAGENET_STD", "PaperRecipe"]

DATA = {"i1k": "hf:ILSVRC/imagenet-1k", "i21k": "imagenet-21k", "jft": "jft-300m"}
"""Data sets of the papers. The last two are folders of your own: ImageNet-21k has no official copy on the hub, and
JFT-300M is not public. With `--data`, the data can be in another folder."""


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, with which most papers normalise images."""

FINE_TUNED = "on ImageNet after fine-tuning at 384 pixels"


@dataclass(frozen=True)
class PaperRecipe:
    """A training run of a paper, in every setting that the paper or its code states."""

    name: str
    """Name of the recipe: the network and the data, such as vit-b16-jft."""
    make: Callable[[], TrainConfig]
    result: str
    """The published accuracy, or a note why there is none."""
    source: str
    """The paper or code, with table and arXiv number."""
    measured: str = FINE_TUNED
    """Description of how the accuracy was measured."""

    def __call__(self) -> TrainConfig:
        """Return the config of the run."""
        return self.make().override(name=self.name)
