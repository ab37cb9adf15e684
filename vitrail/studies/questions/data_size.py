"""The study `data-size`: how much data each architecture needs (2010.11929, Figures 3 to 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Better, Claim
from vitrail.studies.study import NETWORKS, Point, Settings, Study, point, small_config

REGULARISED: dict[str, Any] = {"weight_decay": 0.1, "label_smoothing": 0.1, "erase": 0.5, "shift": 2, "mixup": 0.2}
"""Settings of the arms with strong regularisation."""

PUBLISHED = {"ViT": "ViT-L/16", "hybrid": "R50+ViT-L/32", "BiT": "BiT-R152x2"}

PUBLISHED_IMAGES = (9_000_000, 30_000_000, 90_000_000, 300_000_000)


def _points(settings: Settings) -> list[Point]:
    rates = {"ViT": (1e-3, 3e-3), "hybrid": (1e-3, 3e-3), "BiT": (3e-3, 1e-2)}
    kinds: dict[str, dict[str, Any]] = settings.of({"": {}}, {"": {}, " regularised": REGULARISED})
    return [
        point(
            family + kind,
            small_config(settings, images=settings.part(share), epochs=1.0, **network, **overrides).override(
                steps=settings.of(120, 500)
            ),
            rates[family],
            x=float(settings.part(share)),
            label=f"{100 * share:g} %",
            by=("accuracy", "fewshot"),
            evaluator_settings={"fewshot": {"shots": [5], "allow_fewer": True}},
        )
        for kind, overrides in kinds.items()
        for family, network in NETWORKS.items()
        for share in settings.of((0.01, 0.1, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0))
    ]


def _claims(points: Sequence[Point]) -> list[Claim]:
    claims: list[Claim] = []
    labels = [one.label for one in sorted(points, key=lambda one: one.x or 0.0)]
    few, many = labels[0], labels[-1]
    for kind in ("", " regularised") if any(one.arm.endswith("regularised") for one in points) else ("",):
        vit, hybrid, bit = (f"{family}{kind}" for family in NETWORKS)
        claims += [
            Better(f"With few images, {bit} is better than {vit}", ((f"{bit} at {few}", f"{vit} at {few}"),)),
            Better(f"With all images, {vit} is better than {bit}", ((f"{vit} at {many}", f"{bit} at {many}"),)),
            Better(
                f"The lines of {vit} and {bit} cross: {bit} is better with few images and {vit} with all",
                ((f"{bit} at {few}", f"{vit} at {few}"), (f"{vit} at {many}", f"{bit} at {many}")),
            ),
            Better(f"With few images, {hybrid} is better than {vit}", ((f"{hybrid} at {few}", f"{vit} at {few}"),)),
        ]
    return claims


def _published() -> list[Point]:
    return [
        point(
            family,
            pretraining(variant, "jft", epochs=7, learning_rate=6e-4).override(data=f"jft-300m[:{images}]"),
            (6e-4,),
            x=float(images),
            label=f"{images / 1e6:g} million",
        )
        for family, variant in PUBLISHED.items()
        for images in PUBLISHED_IMAGES
    ]


DATA_SIZE = Study(
    name="data-size",
    question="How many training images does a Vision Transformer need to be better than a ResNet?",
    paper=(
        "Figures 3 and 4 of 2010.11929: with 9 million images of JFT-300M, ResNets are better than Vision Transformers "
        "of similar compute; with 90 million and more, Vision Transformers are better. Figure 5: hybrids are better "
        "than pure transformers for small budgets of compute."
    ),
    points=_points,
    claims=_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot"},
    x_name="training images",
    published=_published,
)
