"""The study `optimizer`: Adam or SGD for the pre-training of ResNets (2010.11929, Table 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Better, Claim
from vitrail.studies.study import NETWORKS, Point, Settings, Stage, Study, finetuning_config, fractals, small_config

ARMS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "adamw"},
    "SGD": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
}
"""Optimizer of the pre-training."""

RATES = {"Adam": (3e-3, 1e-2, 3e-2, 1e-1), "SGD": (0.03, 0.1, 0.3, 1.0)}
"""Learning rates of the pre-training to try."""

PUBLISHED_RATES = {"Adam": (1e-3,), "SGD": (0.48,)}
"""Learning rates in the published size: that of Table 3, and BiT's 0.03 for 256 images."""


FINE_TUNED: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0}
"""The fine-tuning of both arms, as in the paper."""


def _points(settings: Settings) -> list[Point]:
    classes, samples = settings.of((20, 100), (50, 400))
    config = small_config(settings, images=settings.images, epochs=settings.of(3.0, 4.0), **NETWORKS["BiT"])
    pretrained = config.override(data=fractals(settings, classes, samples))
    found = []
    for count in settings.of((500,), (500, 2000, 8000)):
        images = min(count, settings.images)
        tuned = finetuning_config(settings, images=images, steps=settings.of(60, 400), **FINE_TUNED)
        found += [
            Point(
                arm=arm,
                stages=(
                    Stage(config=pretrained.override(**fields), rates=RATES[arm]),
                    Stage(config=tuned, rates=(0.03, 0.1, 0.3)),
                ),
                x=float(images),
                label=f"{images} images",
            )
            for arm, fields in ARMS.items()
        ]
    return found


def _claims(points: Sequence[Point]) -> list[Claim]:
    labels = dict.fromkeys(one.label for one in points)
    return [
        Better(
            f"Pre-training with Adam transfers better than with SGD, with {label}",
            ((f"Adam at {label}", f"SGD at {label}"),),
        )
        for label in labels
    ]


def _published() -> list[Point]:
    config = pretraining("BiT-R50x1", "jft", epochs=7, learning_rate=1e-3)
    return [
        Point(arm=arm, stages=(Stage(config=config.override(**fields), rates=PUBLISHED_RATES[arm]),))
        for arm, fields in ARMS.items()
    ]


OPTIMIZER = Study(
    name="optimizer",
    question="Does pre-training a ResNet with Adam transfer better than with SGD?",
    paper=(
        "Table 7 of 2010.11929, accuracy after fine-tuning: R50 pre-trained with Adam 77.54 % on ImageNet and 86.07 % "
        "on CIFAR-100, with SGD 78.24 % and 85.17 %; R152x2 84.97 % and 92.05 % with Adam, 84.37 % and 91.06 % with "
        "SGD."
    ),
    points=_points,
    claims=_claims,
    x_name="labelled images",
    published=_published,
)
