"""Tasks, one file each. A task defines the targets, the objective, the metrics and the saved model of a training
run."""

from __future__ import annotations

from vitrail.registry import SETTINGS, Registry
from vitrail.tasks.task import Task

__all__ = ["TASKS"]

TASKS = Registry[type[Task]](
    {
        "classification": "vitrail.tasks.classification:Classification",
        "regression": "vitrail.tasks.regression:Regression",
        "detection": "vitrail.tasks.detection:Detection",
        "segmentation": "vitrail.tasks.segmentation:Segmentation",
        "masked-patches": "vitrail.tasks.masked_patches:MaskedPatches",
        "mae": "vitrail.tasks.mae:Mae",
        "distillation": "vitrail.tasks.distillation:Distillation",
        "simclr": "vitrail.tasks.contrast:SimClr",
        "dino": "vitrail.tasks.dino:Dino",
        "moco": "vitrail.tasks.contrast:MoCo",
        "clip": "vitrail.tasks.pairs:Clip",
        "siglip": "vitrail.tasks.pairs:SigLip",
        "vqvae": "vitrail.tasks.vqvae:VqVae",
    },
    fits=SETTINGS,
)
"""Every task by its name."""
