"""The study `augmentation`: the gain by augmentation, compared with more data (AugReg, 2106.10270)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Better, Claim
from vitrail.studies.study import Point, Settings, Study, point, small_config

PRESETS = {"none": "none", "light": "light1", "medium": "medium1", "strong": "strong1"}
"""Augmentation of each arm: presets of AugReg."""


def _points(settings: Settings) -> list[Point]:
    return [
        point(
            arm,
            small_config(settings, images=settings.part(share), epochs=1.0).override(
                preset=PRESETS[arm], steps=settings.of(150, 800)
            ),
            (1e-3, 3e-3),
            x=float(settings.part(share)),
            label=f"{100 * share:g} %",
        )
        for arm in settings.of(("none", "light", "medium"), tuple(PRESETS))
        for share in settings.of((0.03, 0.1, 0.3), (0.03, 0.1, 0.3, 1.0))
    ]


def _claims(points: Sequence[Point]) -> list[Claim]:
    labels = list(dict.fromkeys(one.label for one in sorted(points, key=lambda one: one.x or 0.0)))
    few, more = labels[0], labels[min(1, len(labels) - 1)]
    claims: list[Claim] = []
    for arm in dict.fromkeys(one.arm for one in points if one.arm != "none"):
        claims += [
            Better(
                f"With few images, {arm} augmentation is better than none", ((f"{arm} at {few}", f"none at {few}"),)
            ),
            Better(
                f"With few images, {arm} augmentation is worth more than three times as many images",
                ((f"{arm} at {few}", f"none at {more}"),),
            ),
        ]
    return claims or [Better("Augmentation is better than none", ())]


def _published() -> list[Point]:
    return [
        point(
            arm,
            pretraining("ViT-B/16", data, epochs=epochs, learning_rate=1e-3).override(preset=f"augreg-{preset}"),
            (1e-3,),
            label=data,
        )
        for data, epochs in (("i1k", 300), ("i21k", 300))
        for arm, preset in PRESETS.items()
    ]


AUGMENTATION = Study(
    name="augmentation",
    question="How many training images is augmentation worth?",
    paper=(
        "Figure 1 of 2106.10270 (AugReg): models that were trained on ImageNet-1k with the right augmentation and "
        "regularisation match models that were trained on ImageNet-21k, which has about ten times as many images."
    ),
    points=_points,
    claims=_claims,
    x_name="training images",
    published=_published,
)
