"""The study `attention`: the accuracy of attention that costs less than N² (2010.11929, D.6)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Better, Claim
from vitrail.studies.study import Point, Settings, Study, patch_side, point, small_config

ARMS = {
    "full": "full",
    "local": "local:window=3",
    "blocks": "blocks:size=3",
    "shifted-blocks": "blocks:size=3:shift=1",
    "axial": "axial",
    "axial-sum": "axial:sum=on",
    "strided": "strided",
    "fixed": "fixed",
    "linformer": "linformer:rows=12",
    "lsh": "lsh:chunk=12",
}
"""Attention of each arm, for grids of about 7 x 7 patches."""

WINDOWED = ("local", "blocks", "shifted-blocks", "strided", "fixed", "linformer", "lsh")
"""Arms with the same dense layers as `full` and fewer pairs of tokens."""


def _points(settings: Settings) -> list[Point]:
    # The class token sees all patches in every kind. With the class token as output, the last block's kind would not
    # matter, which is half of the quick version's network.
    config = small_config(
        settings, images=settings.of(2000, 7000), epochs=settings.of(2.0, 10.0),
        variant=f"ViT-Pico/{patch_side(settings, 7)}", width=64, depth=settings.of(2, 4), heads=2, mlp_width=256,
        pool="gap", position_std=0.3,
    )  # fmt: skip
    return [point(arm, config.override(attention=text), (1e-3, 3e-3)) for arm, text in ARMS.items()]


def _claims(points: Sequence[Point]) -> list[Claim]:
    arms = [one.arm for one in points]
    cheaper = [arm for arm in WINDOWED if arm in arms]
    return [
        Better("Axial attention, with its second MLP, is better than full attention", (("axial", "full"),)),
        *(Better(f"Full attention is better than {arm}", (("full", arm),)) for arm in cheaper),
    ]


def _published() -> list[Point]:
    """Return ViT-B/16 on JFT-300M. The paper compares only full and axial attention."""
    kinds = {
        "full": "full", "local": "local:window=7", "blocks": "blocks:size=7", "axial": "axial",
        "linformer": "linformer:rows=64",
    }  # fmt: skip
    config = pretraining("ViT-B/16", "jft", epochs=7, learning_rate=8e-4)
    return [point(arm, config.override(attention=text), (8e-4,)) for arm, text in kinds.items()]


ATTENTION = Study(
    name="attention",
    question="How much accuracy does attention between fewer pairs of patches cost?",
    paper=(
        "Appendix D.6 and Figure 13 of 2010.11929: Axial-ViT-B/32 and Axial-ViT-B/16 are more accurate than their "
        "counterparts with full attention, and cost more compute, because each block has a second MLP."
    ),
    points=_points,
    claims=_claims,
    published=_published,
)
