"""Tasks, one file each. A task defines the targets, the objective, the metrics and the saved model of a training
run."""

from __future__ import annotations

from vitrail.tasks.classification import Classification
from vitrail.tasks.dino import Dino
from vitrail.tasks.distillation import Distillation
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.tasks.moco import MoCo
from vitrail.tasks.regression import Regression
from vitrail.tasks.simclr import SimClr
from vitrail.tasks.task import Task
from vitrail.tasks.vqvae import VqVae

__all__ = [
    "TASKS",
    "Classification",
    "Dino",
    "Distillation",
    "Mae",
    "MaskedPatches",
    "MoCo",
    "Regression",
    "SimClr",
    "Task",
    "VqVae",
]

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Classification, Regression, MaskedPatches, Mae, Distillation, SimClr, Dino, MoCo, VqVae)
}
"""Every task by its name."""
