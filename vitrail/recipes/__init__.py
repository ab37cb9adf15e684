"""Recipes: functions that return the `TrainConfig` of a complete run, with its expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vitrail.registry import Registry
from vitrail.training.config import TrainConfig

__all__ = ["PAPER_RECIPES", "RECIPES", "PaperRecipe"]


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
    differences: tuple[str, ...]
    """Sentences about what differs from the publication, with the effect if it was measured. Empty if nothing is
    known."""
    measured: str = "on ImageNet after fine-tuning at 384 pixels"
    """Description of how the accuracy was measured."""

    def __call__(self) -> TrainConfig:
        """Return the config of the run."""
        return self.make().override(name=self.name)


def _papers() -> Mapping[str, PaperRecipe]:
    from vitrail.recipes import fine_tuning, image_texts, papers, self_supervised

    return {
        recipe.name: recipe
        for recipe in (
            *papers.VIT_RECIPES,
            *self_supervised.MASKED_PATCHES_RECIPES,
            *self_supervised.TOKEN_RECIPES,
            *self_supervised.MAE_RECIPES,
            *self_supervised.DINO_RECIPES,
            *self_supervised.MOCO_RECIPES,
            *self_supervised.SIMCLR_RECIPES,
            *fine_tuning.FINE_TUNING_RECIPES,
            *fine_tuning.LINEAR_RECIPES,
            *fine_tuning.DEIT_RECIPES,
            *fine_tuning.YOLOS_RECIPES,
            *fine_tuning.EOMT_RECIPES,
            *image_texts.IMAGE_TEXT_RECIPES,
            *papers.AUGREG_RECIPES,
            *papers.PLAIN_RECIPES,
            *papers.BIT_RECIPES,
        )
    }


PAPER_RECIPES = Registry[PaperRecipe]({}, rest=_papers)
"""Training runs of papers, by name."""

RECIPES = Registry[Callable[[], TrainConfig]](
    {
        "demo": "vitrail.recipes.small:demo",
        "fashion-mnist": "vitrail.recipes.small:fashion_mnist",
        "cifar10": "vitrail.recipes.small:cifar10",
        "folder": "vitrail.recipes.small:folder",
        "fractals": "vitrail.recipes.small:fractals",
        "masked-patches": "vitrail.recipes.self_supervised:masked_patches",
        "mae": "vitrail.recipes.self_supervised:mae",
        "simclr": "vitrail.recipes.self_supervised:simclr",
        "dino": "vitrail.recipes.self_supervised:dino",
        "moco": "vitrail.recipes.self_supervised:moco",
        "vqvae": "vitrail.recipes.self_supervised:vqvae",
        "beit": "vitrail.recipes.self_supervised:beit",
        "scenes": "vitrail.recipes.image_texts:scenes",
        "pairs": "vitrail.recipes.image_texts:pairs",
    },
    rest=_papers,
    fits=(callable, "a function that returns a TrainConfig"),
)
"""All recipes by name: fourteen of our own, and those of papers."""
