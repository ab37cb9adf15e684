"""Recipes: functions that return the `TrainConfig` of a complete run, with its expected result."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.recipes.papers import AUGREG_RECIPES, BIT_RECIPES, PLAIN_RECIPES, VIT_RECIPES, PaperRecipe
from vitrail.recipes.self_supervised import (
    DINO_RECIPES,
    MAE_RECIPES,
    MASKED_PATCHES_RECIPES,
    MOCO_RECIPES,
    TOKEN_RECIPES,
    beit,
    dino,
    mae,
    masked_patches,
    moco,
    simclr,
    vqvae,
)
from vitrail.recipes.small import cifar10, demo, fashion_mnist, folder, fractals
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
