"""Recipes: functions that return the `TrainConfig` of a complete run, with its expected result."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.recipes.augreg import AUGREG_RECIPES, PLAIN_RECIPES
from vitrail.recipes.bit import BIT_RECIPES
from vitrail.recipes.cifar10 import cifar10
from vitrail.recipes.demo import demo
from vitrail.recipes.fashion_mnist import fashion_mnist
from vitrail.recipes.folder import folder
from vitrail.recipes.fractals import fractals
from vitrail.recipes.paper import PaperRecipe
from vitrail.recipes.self_supervised.dino import DINO_RECIPES, dino
from vitrail.recipes.self_supervised.mae import MAE_RECIPES, mae
from vitrail.recipes.self_supervised.masked_patches import MASKED_PATCHES_RECIPES, masked_patches
from vitrail.recipes.self_supervised.moco import MOCO_RECIPES, moco
from vitrail.recipes.self_supervised.simclr import simclr
from vitrail.recipes.self_supervised.tokens import TOKEN_RECIPES, beit, vqvae
from vitrail.recipes.vit import VIT_RECIPES
from vitrail.training.config import TrainConfig

__all__ = ["PAPER_RECIPES", "RECIPES"]

PAPER_RECIPES: dict[str, PaperRecipe] = {
    recipe.name: recipe
    for recipe in (
        *VIT_RECIPES,
        *MASKED_PATCHES_RECIPES,
        *TOKEN_RECIPES,
        *MAE_RECIPES,
        *DINO_RECIPES,
        *MOCO_RECIPES,
        *AUGREG_RECIPES,
        *PLAIN_RECIPES,
        *BIT_RECIPES,
    )
}
"""Training runs of papers, by name."""

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "folder": folder,
    "fractals": fractals,
    "masked-patches": masked_patches,
    "mae": mae,
    "simclr": simclr,
    "dino": dino,
    "moco": moco,
    "vqvae": vqvae,
    "beit": beit,
    **PAPER_RECIPES,
}
"""All recipes by name: twelve of our own, and those of papers."""
