"""The study `shape`: which dimension of a Vision Transformer to enlarge (2010.11929, Figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Better, Claim
from vitrail.studies.study import Point, Settings, Study, patch_side, point, small_config

BASE: dict[str, Any] = {"width": 64, "depth": 4, "heads": 2, "mlp_width": 256}

ARMS: dict[str, dict[str, Any]] = {
    "base": {},
    "depth": {"depth": 8},
    "width": {"width": 96, "heads": 3, "mlp_width": 384},
    "MLP": {"mlp_width": 640},
    "patches": {},
    "everything": {"depth": 6, "width": 80, "heads": 2, "mlp_width": 320},
}
"""Changes of the base network. Those of depth, width and MLP about double its compute. `patches` and `everything` also
have smaller patches, which triple the number of tokens."""

SMALLER = ("patches", "everything")


def _points(settings: Settings) -> list[Point]:
    found = []
    for arm, changes in ARMS.items():
        patch = patch_side(settings, 7 if arm in SMALLER else 4)
        config = small_config(
            settings, images=settings.of(2000, 7000), epochs=settings.of(5.0, 10.0), variant=f"ViT-Pico/{patch}",
            position_std=0.3, **BASE | changes,
        )  # fmt: skip
        found.append(point(arm, config, (1e-3, 3e-3)))
    return found


def _claims(points: Sequence[Point]) -> list[Claim]:
    return [
        Better("A deeper network is better", (("depth", "base"),)),
        Better("Smaller patches are better", (("patches", "base"),)),
        Better("Depth helps more than width, for about the same compute", (("depth", "width"),)),
        Better("Enlarging everything is better than enlarging one dimension",
               tuple(("everything", arm) for arm in ("depth", "width", "MLP", "patches"))),
    ]  # fmt: skip


def _published() -> list[Point]:
    """Return the networks of Figure 8. The paper states neither their data nor their number of epochs: 300 epochs of
    ImageNet are assumed."""
    base = {"width": 1024, "depth": 8, "heads": 16, "mlp_width": 2048}
    arms: dict[str, dict[str, Any]] = {
        "base": {}, "depth": {"depth": 64}, "width": {"width": 4096}, "MLP": {"mlp_width": 8192},
    }  # fmt: skip
    found = [
        point(
            arm,
            pretraining("ViT-B/32", "i1k", epochs=300, learning_rate=1e-3).override(**base | changes, head_hidden=0),
            (1e-3,),
        )
        for arm, changes in arms.items()
    ]
    smaller = pretraining("ViT-B/16", "i1k", epochs=300, learning_rate=1e-3).override(**base, head_hidden=0)
    return [*found, point("patches", smaller, (1e-3,))]


SHAPE = Study(
    name="shape",
    question="Which dimension of a Vision Transformer is worth its compute: depth, width, MLP or patches?",
    paper=(
        "Figure 8 of 2010.11929: depth improves accuracy most, with diminishing returns after 16 layers; width changes "
        "it least; smaller patches improve it without parameters; scaling everything together is robust."
    ),
    points=_points,
    claims=_claims,
    published=_published,
)
