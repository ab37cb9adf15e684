"""The study `transfer`: the gain by pre-training with few labels (2010.11929, Table 5 and section 4.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.models.variants import ModelConfig
from vitrail.recipes.papers import pretraining
from vitrail.recipes.self_supervised import masked_patches_jft
from vitrail.studies.claims import Better, Claim, GainShrinks
from vitrail.studies.study import (
    VIT,
    Point,
    Settings,
    Stage,
    Study,
    data_config,
    finetuning_config,
    fractals,
    patch_side,
    small_config,
)
from vitrail.training.config import TrainConfig

TASKS: dict[str, dict[str, Any]] = {
    "masked-patches": {"task": "masked-patches", "patch_target": "colours"},
    "MAE": {"task": "mae"},
    "SimCLR": {
        "task": "simclr", "contrast_temperature": 0.2, "crop_area": (0.2, 1.0), "colour_jitter": (0.4, 0.4, 0.0, 0.0),
        "batch_size": 128,
    },
    "DINO": {
        "task": "dino", "local_views": 2, "local_crop_area": (0.15, 0.5), "prototypes": 256, "projection_hidden": 256,
        "bottleneck": 64, "teacher_momentum": 0.98, "crop_area": (0.4, 1.0), "colour_jitter": (0.4, 0.4, 0.0, 0.0),
    },
}  # fmt: skip
"""Pre-training without labels, on all training images. DINO's local views have about half the image's side."""

SCRATCH_RATES, TUNING_RATES = (1e-3, 3e-3), (3e-4, 1e-3)
"""Learning rates to try from random weights, and from a model whose head is fitted to its features first."""

LINEAR: dict[str, Any] = {"linear_head": True, "train_blocks": 0}
"""Settings of a linear model of frozen features. Its head is fitted before the only step, which changes nothing."""

UNCHANGED_RATE = 1e-9

FEW_SHOT: dict[str, Any] = {
    "by": ("accuracy", "fewshot"), "evaluator_settings": {"fewshot": {"shots": [5], "allow_fewer": True}},
}  # fmt: skip
"""Measurements of the arms whose features are those of the pre-training."""


def _points(settings: Settings) -> list[Point]:
    counts = settings.of((100, 1000), (100, 500, 2000, 8000))
    scratch, first = _network(settings), _pretraining(settings)
    steps = settings.of(40, 150)
    found = []
    for images in dict.fromkeys(min(count, settings.images) for count in counts):
        place: dict[str, Any] = {"x": float(images), "label": str(images)}
        spec = data_config(settings.data, images).spec
        for arm, length in (("none", steps), ("none-longer", 4 * steps)):
            stage = Stage(config=scratch.override(data=spec, steps=length), rates=SCRATCH_RATES)
            found.append(Point(arm=arm, stages=(stage,), **place))
        config = finetuning_config(settings, images=images, steps=steps, linear_head=True)
        tuned = Stage(config=config, rates=TUNING_RATES)
        config = finetuning_config(settings, images=images, steps=1, **LINEAR)
        linear = Stage(config=config, rates=(UNCHANGED_RATE,))
        for arm, stage in first.items():
            found.append(Point(arm=arm, stages=(stage, tuned), **place))
            if settings.scale == "default" or images == counts[0]:
                found.append(Point(arm=f"{arm}-linear", stages=(stage, linear), **place, **FEW_SHOT))
    return found


def _network(settings: Settings) -> TrainConfig:
    """Return the config of a run from scratch."""
    variant = f"ViT-Pico/{patch_side(settings, 4)}"
    return small_config(settings, images=settings.images, epochs=1.0, variant=variant, pool="gap", **VIT)


def _pretraining(settings: Settings) -> dict[str, Stage]:
    """Return the pre-training of each arm. All see the same number of images."""
    config = _network(settings)
    seen = settings.of(6_000, 100_000)
    classes, samples = settings.of((20, 100), (50, 400))
    supervised = config.override(data=fractals(settings, classes, samples), epochs=seen / (classes * samples))
    stages = {"fractals": supervised}
    patch = patch_side(settings, 4)
    local = patch * (config.images.image_size[0] // patch // 2)  # about half of the image
    for arm, fields in TASKS.items():
        views = {"local_size": (local, local)} if arm == "DINO" else {}
        stages[arm] = config.override(**fields, **views, epochs=seen / settings.images)
    return {arm: Stage(config=one, rates=(1e-3,)) for arm, one in stages.items()}


def _claims(points: Sequence[Point]) -> list[Claim]:
    labels = [one.label for one in sorted(points, key=lambda one: one.x or 0.0)]
    few, many = labels[0], labels[-1]
    claims: list[Claim] = []
    for arm in ("fractals", *TASKS):
        scratch, longer = f"none at {few}", f"none-longer at {few}"
        claims += [
            Better(f"With few labels, {arm} is better than no pre-training", ((f"{arm} at {few}", scratch),)),
            Better(f"With few labels, {arm} is better than four times the training", ((f"{arm} at {few}", longer),)),
            GainShrinks(f"{arm}: the gain is larger with few labels than with many",
                        (f"{arm} at {few}", scratch), (f"{arm} at {many}", f"none at {many}")),
        ]  # fmt: skip
    return claims


def _published() -> list[Point]:
    tuned = replace(pretraining("ViT-B/16", "i1k", epochs=1, learning_rate=0.03), model=ModelConfig()).override(
        steps=20_000, batch_size=512, image_size=(384, 384)
    )
    return [
        Point(arm=arm, stages=(Stage(config=config, rates=(rate,)), Stage(config=tuned, rates=(0.03,))))
        for arm, config, rate in (
            ("JFT-300M", pretraining("ViT-B/16", "jft", epochs=7, learning_rate=8e-4), 8e-4),
            ("masked-patches", masked_patches_jft(), 2e-4),
        )
    ]


TRANSFER = Study(
    name="transfer",
    question="What is pre-training worth if few images have labels?",
    paper=(
        "Table 5 of 2010.11929: on six data sets, each of four Vision Transformers is more accurate after pre-training "
        "on ImageNet-21k than on ImageNet, which has fewer images. Section 4.6: ViT-B/16 after masked patch prediction "
        "reaches 79.9 % on ImageNet, 2 points more than from scratch and 4 points less than after supervised "
        "pre-training."
    ),
    points=_points,
    claims=_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot"},
    x_name="labelled images",
    published=_published,
)
