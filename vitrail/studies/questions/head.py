"""The study `head`: class token, mean of the patches, or attention pooling (2010.11929, Figure 9 and D.3)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Alike, Better, Claim
from vitrail.studies.study import VIT, Point, Settings, Study, patch_side, point, small_config

POOLS = {"class-token": "cls", "mean": "gap", "attention": "map"}
"""Pooling of each arm."""

PUBLISHED_RATES = (1e-4, 3e-4, 8e-4)
"""Learning rates to try in the published size. The paper's are 8e-4 for the class token and 3e-4 for the mean."""


def _points(settings: Settings) -> list[Point]:
    # 16 patches, not 49: the answer needs long training, and each step costs a third.
    config = small_config(
        settings, images=settings.of(2000, 7000), epochs=settings.of(6.0, 20.0),
        variant=f"ViT-Pico/{patch_side(settings, 4)}", **VIT,
    )  # fmt: skip
    rates = settings.of((1e-3, 3e-3, 8e-3), (5e-4, 1.5e-3, 4e-3, 1e-2))
    return [point(arm, config.override(pool=pool), rates) for arm, pool in POOLS.items()]


def _claims(points: Sequence[Point]) -> list[Claim]:
    return [
        Alike("The mean of the patches works as well as the class token, each at its own learning rate",
              ("class-token", "mean")),
        Better("Attention pooling is better than the class token", (("attention", "class-token"),)),
        Better("The class token is better than the mean of the patches", (("class-token", "mean"),)),
    ]  # fmt: skip


def _published() -> list[Point]:
    config = pretraining("ViT-H/14", "jft", epochs=14, learning_rate=3e-4)
    return [point(arm, config.override(pool=pool, head_hidden=0), PUBLISHED_RATES) for arm, pool in POOLS.items()]


HEAD = Study(
    name="head",
    question="Does a class token summarise an image better than the mean of the patches?",
    paper=(
        "Figure 9 and appendix D.3 of 2010.11929: the mean of the patches works as well as the class token, but with "
        "another learning rate (8e-4 for the token, 3e-4 for the mean)."
    ),
    points=_points,
    claims=_claims,
    published=_published,
)
