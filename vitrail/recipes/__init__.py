"""Recipes: functions that return the `TrainConfig` of a complete run. Their docstrings state the expected result."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.recipes.demo import demo
from vitrail.recipes.fashion_mnist import fashion_mnist
from vitrail.recipes.folder import folder
from vitrail.training.config import TrainConfig

__all__ = ["RECIPES"]

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "fashion-mnist": fashion_mnist,
    "folder": folder,
}
