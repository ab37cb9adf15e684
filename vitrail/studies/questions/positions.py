"""The study `positions`: kinds of position embeddings, and the layers that use them (2010.11929, Table 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Alike, Better, Claim
from vitrail.studies.study import Point, Settings, Study, point, small_config

ARMS: dict[str, dict[str, Any]] = {
    "none": {"positions": "none"},
    "1-D stem": {"positions": "learned", "positions_at": "stem"},
    "1-D every-layer": {"positions": "learned", "positions_at": "every-layer"},
    "1-D shared": {"positions": "learned", "positions_at": "shared"},
    "2-D stem": {"positions": "learned-2d", "positions_at": "stem"},
    "2-D every-layer": {"positions": "learned-2d", "positions_at": "every-layer"},
    "2-D shared": {"positions": "learned-2d", "positions_at": "shared"},
    "relative-bias every-layer": {"positions": "relative-bias", "positions_at": "every-layer"},
    "relative-bias shared": {"positions": "relative-bias", "positions_at": "shared"},
    "relative-keys every-layer": {"positions": "relative-keys", "positions_at": "every-layer"},
    "relative-keys shared": {"positions": "relative-keys", "positions_at": "shared"},
    "sin-cos": {"positions": "sincos-2d", "positions_at": "stem"},
    "rotary": {"positions": "rotary-2d"},
}
"""Kind and place of each arm. The paper's relative positions are "relative-keys every-layer"; it has neither
"relative-bias" nor sin-cos nor rotary positions."""

PAPER = tuple(name for name in ARMS if name not in ("none", "sin-cos", "rotary"))
"""Arms with positions that are like those of the paper."""


def _points(settings: Settings) -> list[Point]:
    config = small_config(settings, images=settings.of(2000, 7000), epochs=settings.of(4.0, 10.0))
    return [
        point(
            arm,
            config.override(**fields),
            (1e-3, 3e-3),
            by=("accuracy", "fewshot", "linear"),
            evaluator_settings={"fewshot": {"shots": [5]}},
        )
        for arm, fields in ARMS.items()
    ]


def _claims(points: Sequence[Point]) -> list[Claim]:
    found = [one.arm for one in points]
    paper = tuple(arm for arm in PAPER if arm in found)
    claims: list[Claim] = []
    for metric, name in (("accuracy", "accuracy"), ("fewshot_5", "5-shot accuracy")):
        claims += [
            Better(
                f"Every kind and place of the paper has a better {name} than no positions",
                tuple((arm, "none") for arm in paper),
                metric,
            ),
            Alike(f"The kinds and places of the paper differ little in {name}", paper, metric=metric),
        ]
    return claims


def _published() -> list[Point]:
    config = pretraining("ViT-B/16", "jft", epochs=7, learning_rate=8e-4)
    return [point(arm, config.override(**fields), (8e-4,)) for arm, fields in ARMS.items()]


POSITIONS = Study(
    name="positions",
    question="Which position embeddings does a Vision Transformer need, and in which layers?",
    paper=(
        "Table 8 of 2010.11929 (5-shot accuracy on ImageNet, ViT-B/16): 61.38 % without positions, 63.96 to 64.29 % "
        "with 1-D, 64.00 to 64.05 % with 2-D and 64.03 % with relative positions. Positions help, and their kind and "
        "place hardly matter."
    ),
    points=_points,
    claims=_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot", "linear": "linear"},
    published=_published,
)
