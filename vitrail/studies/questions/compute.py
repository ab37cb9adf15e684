"""The study `compute`: accuracy against training compute (2010.11929, Figure 5 and Table 6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vitrail.recipes.papers import pretraining
from vitrail.studies.claims import Claim, LessCompute, PowerLawFit
from vitrail.studies.study import Point, Settings, Study, point, run_cost, small_config

SIZES = {"small": (32, 6), "medium": (64, 10), "large": (96, 14)}
"""Width of the transformers and of the ResNet by size."""

PUBLISHED = {
    "ViT": (("ViT-B/32", 7), ("ViT-B/16", 7), ("ViT-L/32", 7), ("ViT-L/16", 7), ("ViT-L/16", 14), ("ViT-H/14", 14)),
    "hybrid": (
        ("R50+ViT-B/32", 7), ("R50+ViT-B/16", 7), ("R50+ViT-L/32", 7), ("R50+ViT-L/16", 7), ("R50+ViT-L/16", 14),
    ),
    "BiT": (
        ("BiT-R50x1", 7), ("BiT-R50x2", 7), ("BiT-R101x1", 7), ("BiT-R152x1", 7), ("BiT-R152x2", 7),
        ("BiT-R152x2", 14), ("BiT-R200x3", 14),
    ),
}  # fmt: skip
"""Networks and epochs of Table 6."""


def _points(settings: Settings) -> list[Point]:
    found = []
    sizes = settings.of(("small", "medium"), tuple(SIZES))
    steps: tuple[int, ...] = settings.of((60, 120), (250, 500, 1000))
    rates = {"ViT": (1e-3, 3e-3), "hybrid": (1e-3, 3e-3), "BiT": (3e-3, 1e-2)}
    for family, size, length in itertools.product(("ViT", "hybrid", "BiT"), sizes, steps):
        width, channels = SIZES[size]
        network = {"width": width, "heads": width // 32, "mlp_width": 4 * width, "depth": 4, "position_std": 0.3}
        variants = {"ViT": "ViT-Pico/4", "hybrid": "Conv+ViT-Pico/4", "BiT": "BiT-Pico"}
        overrides = {"width": channels} if family == "BiT" else network
        config = small_config(
            settings, images=settings.images, epochs=1.0, variant=variants[family], **overrides
        ).override(steps=length)
        found.append(
            point(
                family,
                config,
                rates[family],
                x=run_cost(config, settings),
                label=f"{size} {length} steps",
                tuned=f"{family} {size}",
            )
        )
    return found


def _claims(points: Sequence[Point]) -> list[Claim]:
    arms = dict.fromkeys(one.arm for one in points)
    return [
        *(PowerLawFit(f"The error of {arm} falls as a power of the compute", arm) for arm in arms),
        LessCompute("A ViT needs less compute than a BiT ResNet for equal accuracy", "ViT", "BiT"),
        LessCompute("A hybrid needs less compute than a ViT for equal accuracy", "hybrid", "ViT"),
    ]


def _published() -> list[Point]:
    return [
        point(
            family, pretraining(variant, "jft", epochs=epochs, learning_rate=6e-4), (6e-4,), label=f"{variant} {epochs}"
        )
        for family, networks in PUBLISHED.items()
        for variant, epochs in networks
    ]


COMPUTE = Study(
    name="compute",
    question="Which architecture is most accurate for a given amount of training compute?",
    paper=(
        "Figure 5 and Table 6 of 2010.11929: Vision Transformers need 2 to 4 times less compute than ResNets for equal "
        "accuracy. Hybrids are slightly better at small budgets, and the difference vanishes for larger models."
    ),
    points=_points,
    claims=_claims,
    x_name="training FLOPs",
    published=_published,
)
