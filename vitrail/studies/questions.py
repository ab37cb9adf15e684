"""The studies: the questions of the paper, each with the runs that answer it and the claims that its results check."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.models.variants import ModelConfig
from vitrail.recipes.papers import pretraining
from vitrail.recipes.self_supervised import masked_patches_jft
from vitrail.studies.claims import Alike, Better, Claim, GainShrinks, LessCompute, PowerLawFit
from vitrail.studies.study import (
    NETWORKS,
    VIT,
    Point,
    Settings,
    Stage,
    Study,
    data_config,
    finetuning_config,
    fractals,
    patch_side,
    point,
    run_cost,
    small_config,
)
from vitrail.training.config import TrainConfig

# The study `positions`: kinds of position embeddings, and the layers that use them (2010.11929, Table 8).


POSITION_ARMS: dict[str, dict[str, Any]] = {
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

PAPER_POSITIONS = tuple(name for name in POSITION_ARMS if name not in ("none", "sin-cos", "rotary"))
"""Arms with positions that are like those of the paper."""


def _positions_points(settings: Settings) -> list[Point]:
    config = small_config(settings, images=settings.of(2000, 7000), epochs=settings.of(4.0, 10.0))
    return [
        point(
            arm,
            config.override(**fields),
            (1e-3, 3e-3),
            by=("accuracy", "fewshot", "linear"),
            evaluator_settings={"fewshot": {"shots": [5]}},
        )
        for arm, fields in POSITION_ARMS.items()
    ]


def _positions_claims(points: Sequence[Point]) -> list[Claim]:
    found = [one.arm for one in points]
    paper = tuple(arm for arm in PAPER_POSITIONS if arm in found)
    return [
        claim
        for metric, name in (("accuracy", "accuracy"), ("fewshot_5", "5-shot accuracy"))
        for claim in (
            Better(
                f"Every kind and place of the paper has a better {name} than no positions",
                tuple((arm, "none") for arm in paper),
                metric,
            ),
            Alike(f"The kinds and places of the paper differ little in {name}", paper, metric=metric),
        )
    ]


def _positions_published() -> list[Point]:
    config = pretraining("ViT-B/16", "jft", epochs=7, learning_rate=8e-4)
    return [point(arm, config.override(**fields), (8e-4,)) for arm, fields in POSITION_ARMS.items()]


POSITIONS = Study(
    name="positions",
    question="Which position embeddings does a Vision Transformer need, and in which layers?",
    paper=(
        "Table 8 of 2010.11929 (5-shot accuracy on ImageNet, ViT-B/16): 61.38 % without positions, 63.96 to 64.29 % "
        "with 1-D, 64.00 to 64.05 % with 2-D and 64.03 % with relative positions. Positions help, and their kind and "
        "place hardly matter."
    ),
    points=_positions_points,
    claims=_positions_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot", "linear": "linear"},
    published=_positions_published,
)


# The study `data-size`: how much data each architecture needs (2010.11929, Figures 3 to 5).


REGULARISED: dict[str, Any] = {"weight_decay": 0.1, "label_smoothing": 0.1, "erase": 0.5, "shift": 2, "mixup": 0.2}
"""Settings of the arms with strong regularisation."""

PUBLISHED_NETWORKS = {"ViT": "ViT-L/16", "hybrid": "R50+ViT-L/32", "BiT": "BiT-R152x2"}

PUBLISHED_IMAGES = (9_000_000, 30_000_000, 90_000_000, 300_000_000)


def _data_size_points(settings: Settings) -> list[Point]:
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


def _data_size_claims(points: Sequence[Point]) -> list[Claim]:
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


def _data_size_published() -> list[Point]:
    return [
        point(
            family,
            pretraining(variant, "jft", epochs=7, learning_rate=6e-4).override(data=f"jft-300m[:{images}]"),
            (6e-4,),
            x=float(images),
            label=f"{images / 1e6:g} million",
        )
        for family, variant in PUBLISHED_NETWORKS.items()
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
    points=_data_size_points,
    claims=_data_size_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot"},
    x_name="training images",
    published=_data_size_published,
)


# The study `compute`: accuracy against training compute (2010.11929, Figure 5 and Table 6).


COMPUTE_SIZES = {"small": (32, 6), "medium": (64, 10), "large": (96, 14)}
"""Width of the transformers and of the ResNet by size."""

PUBLISHED_COMPUTE = {
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


def _compute_points(settings: Settings) -> list[Point]:
    found = []
    sizes = settings.of(("small", "medium"), tuple(COMPUTE_SIZES))
    steps: tuple[int, ...] = settings.of((60, 120), (250, 500, 1000))
    rates = {"ViT": (1e-3, 3e-3), "hybrid": (1e-3, 3e-3), "BiT": (3e-3, 1e-2)}
    for family, size, length in itertools.product(("ViT", "hybrid", "BiT"), sizes, steps):
        width, channels = COMPUTE_SIZES[size]
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


def _compute_claims(points: Sequence[Point]) -> list[Claim]:
    arms = dict.fromkeys(one.arm for one in points)
    return [
        *(PowerLawFit(f"The error of {arm} falls as a power of the compute", arm) for arm in arms),
        LessCompute("A ViT needs less compute than a BiT ResNet for equal accuracy", "ViT", "BiT"),
        LessCompute("A hybrid needs less compute than a ViT for equal accuracy", "hybrid", "ViT"),
    ]


def _compute_published() -> list[Point]:
    return [
        point(
            family, pretraining(variant, "jft", epochs=epochs, learning_rate=6e-4), (6e-4,), label=f"{variant} {epochs}"
        )
        for family, networks in PUBLISHED_COMPUTE.items()
        for variant, epochs in networks
    ]


COMPUTE = Study(
    name="compute",
    question="Which architecture is most accurate for a given amount of training compute?",
    paper=(
        "Figure 5 and Table 6 of 2010.11929: Vision Transformers need 2 to 4 times less compute than ResNets for equal "
        "accuracy. Hybrids are slightly better at small budgets, and the difference vanishes for larger models."
    ),
    points=_compute_points,
    claims=_compute_claims,
    x_name="training FLOPs",
    published=_compute_published,
)


# The study `shape`: which dimension of a Vision Transformer to enlarge (2010.11929, Figure 8).


SHAPE_BASE: dict[str, Any] = {"width": 64, "depth": 4, "heads": 2, "mlp_width": 256}

SHAPE_ARMS: dict[str, dict[str, Any]] = {
    "base": {},
    "depth": {"depth": 8},
    "width": {"width": 96, "heads": 3, "mlp_width": 384},
    "MLP": {"mlp_width": 640},
    "patches": {},
    "everything": {"depth": 6, "width": 80, "heads": 2, "mlp_width": 320},
}
"""Changes of the base network. Those of depth, width and MLP about double its compute. `patches` and `everything` also
have smaller patches, which triple the number of tokens."""

WITH_SMALLER_PATCHES = ("patches", "everything")


def _shape_points(settings: Settings) -> list[Point]:
    found = []
    for arm, changes in SHAPE_ARMS.items():
        patch = patch_side(settings, 7 if arm in WITH_SMALLER_PATCHES else 4)
        config = small_config(
            settings, images=settings.of(2000, 7000), epochs=settings.of(5.0, 10.0), variant=f"ViT-Pico/{patch}",
            position_std=0.3, **SHAPE_BASE | changes,
        )  # fmt: skip
        found.append(point(arm, config, (1e-3, 3e-3)))
    return found


def _shape_claims(points: Sequence[Point]) -> list[Claim]:
    return [
        Better("A deeper network is better", (("depth", "base"),)),
        Better("Smaller patches are better", (("patches", "base"),)),
        Better("Depth helps more than width, for about the same compute", (("depth", "width"),)),
        Better("Enlarging everything is better than enlarging one dimension",
               tuple(("everything", arm) for arm in ("depth", "width", "MLP", "patches"))),
    ]  # fmt: skip


def _shape_published() -> list[Point]:
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
    points=_shape_points,
    claims=_shape_claims,
    published=_shape_published,
)


# The study `head`: class token, mean of the patches, or attention pooling (2010.11929, Figure 9 and D.3).


POOLS = {"class-token": "cls", "mean": "gap", "attention": "map"}
"""Pooling of each arm."""

PUBLISHED_HEAD_RATES = (1e-4, 3e-4, 8e-4)
"""Learning rates to try in the published size. The paper's are 8e-4 for the class token and 3e-4 for the mean."""


def _head_points(settings: Settings) -> list[Point]:
    # 16 patches, not 49: the answer needs long training, and each step costs a third.
    config = small_config(
        settings, images=settings.of(2000, 7000), epochs=settings.of(6.0, 20.0),
        variant=f"ViT-Pico/{patch_side(settings, 4)}", **VIT,
    )  # fmt: skip
    rates = settings.of((1e-3, 3e-3, 8e-3), (5e-4, 1.5e-3, 4e-3, 1e-2))
    return [point(arm, config.override(pool=pool), rates) for arm, pool in POOLS.items()]


def _head_claims(points: Sequence[Point]) -> list[Claim]:
    return [
        Alike("The mean of the patches works as well as the class token, each at its own learning rate",
              ("class-token", "mean")),
        Better("Attention pooling is better than the class token", (("attention", "class-token"),)),
        Better("The class token is better than the mean of the patches", (("class-token", "mean"),)),
    ]  # fmt: skip


def _head_published() -> list[Point]:
    config = pretraining("ViT-H/14", "jft", epochs=14, learning_rate=3e-4)
    return [point(arm, config.override(pool=pool, head_hidden=0), PUBLISHED_HEAD_RATES) for arm, pool in POOLS.items()]


HEAD = Study(
    name="head",
    question="Does a class token summarise an image better than the mean of the patches?",
    paper=(
        "Figure 9 and appendix D.3 of 2010.11929: the mean of the patches works as well as the class token, but with "
        "another learning rate (8e-4 for the token, 3e-4 for the mean)."
    ),
    points=_head_points,
    claims=_head_claims,
    published=_head_published,
)


# The study `optimizer`: Adam or SGD for the pre-training of ResNets (2010.11929, Table 7).


OPTIMIZER_ARMS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "adamw"},
    "SGD": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
}
"""Optimizer of the pre-training."""

OPTIMIZER_RATES = {"Adam": (3e-3, 1e-2, 3e-2, 1e-1), "SGD": (0.03, 0.1, 0.3, 1.0)}
"""Learning rates of the pre-training to try."""

PUBLISHED_OPTIMIZER_RATES = {"Adam": (1e-3,), "SGD": (0.48,)}
"""Learning rates in the published size: that of Table 3, and BiT's 0.03 for 256 images."""


FINE_TUNED: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0}
"""The fine-tuning of both arms, as in the paper."""


def _optimizer_points(settings: Settings) -> list[Point]:
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
                    Stage(config=pretrained.override(**fields), rates=OPTIMIZER_RATES[arm]),
                    Stage(config=tuned, rates=(0.03, 0.1, 0.3)),
                ),
                x=float(images),
                label=f"{images} images",
            )
            for arm, fields in OPTIMIZER_ARMS.items()
        ]
    return found


def _optimizer_claims(points: Sequence[Point]) -> list[Claim]:
    labels = dict.fromkeys(one.label for one in points)
    return [
        Better(
            f"Pre-training with Adam transfers better than with SGD, with {label}",
            ((f"Adam at {label}", f"SGD at {label}"),),
        )
        for label in labels
    ]


def _optimizer_published() -> list[Point]:
    config = pretraining("BiT-R50x1", "jft", epochs=7, learning_rate=1e-3)
    return [
        Point(arm=arm, stages=(Stage(config=config.override(**fields), rates=PUBLISHED_OPTIMIZER_RATES[arm]),))
        for arm, fields in OPTIMIZER_ARMS.items()
    ]


OPTIMIZER = Study(
    name="optimizer",
    question="Does pre-training a ResNet with Adam transfer better than with SGD?",
    paper=(
        "Table 7 of 2010.11929, accuracy after fine-tuning: R50 pre-trained with Adam 77.54 % on ImageNet and 86.07 % "
        "on CIFAR-100, with SGD 78.24 % and 85.17 %; R152x2 84.97 % and 92.05 % with Adam, 84.37 % and 91.06 % with "
        "SGD."
    ),
    points=_optimizer_points,
    claims=_optimizer_claims,
    x_name="labelled images",
    published=_optimizer_published,
)


# The study `attention`: the accuracy of attention that costs less than N² (2010.11929, D.6).


ATTENTION_ARMS = {
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


def _attention_points(settings: Settings) -> list[Point]:
    # The class token sees all patches in every kind. With the class token as output, the last block's kind would not
    # matter, which is half of the quick version's network.
    config = small_config(
        settings, images=settings.of(2000, 7000), epochs=settings.of(2.0, 10.0),
        variant=f"ViT-Pico/{patch_side(settings, 7)}", width=64, depth=settings.of(2, 4), heads=2, mlp_width=256,
        pool="gap", position_std=0.3,
    )  # fmt: skip
    return [point(arm, config.override(attention=text), (1e-3, 3e-3)) for arm, text in ATTENTION_ARMS.items()]


def _attention_claims(points: Sequence[Point]) -> list[Claim]:
    arms = [one.arm for one in points]
    cheaper = [arm for arm in WINDOWED if arm in arms]
    return [
        Better("Axial attention, with its second MLP, is better than full attention", (("axial", "full"),)),
        *(Better(f"Full attention is better than {arm}", (("full", arm),)) for arm in cheaper),
    ]


def _attention_published() -> list[Point]:
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
    points=_attention_points,
    claims=_attention_claims,
    published=_attention_published,
)


# The study `augmentation`: the gain by augmentation, compared with more data (AugReg, 2106.10270).


PRESETS = {"none": "none", "light": "light1", "medium": "medium1", "strong": "strong1"}
"""Augmentation of each arm: presets of AugReg."""


def _augmentation_points(settings: Settings) -> list[Point]:
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


def _augmentation_claims(points: Sequence[Point]) -> list[Claim]:
    labels = list(dict.fromkeys(one.label for one in sorted(points, key=lambda one: one.x or 0.0)))
    few, more = labels[0], labels[min(1, len(labels) - 1)]
    claims: list[Claim] = [
        claim
        for arm in dict.fromkeys(one.arm for one in points if one.arm != "none")
        for claim in (
            Better(
                f"With few images, {arm} augmentation is better than none", ((f"{arm} at {few}", f"none at {few}"),)
            ),
            Better(
                f"With few images, {arm} augmentation is worth more than three times as many images",
                ((f"{arm} at {few}", f"none at {more}"),),
            ),
        )
    ]
    return claims or [Better("Augmentation is better than none", ())]


def _augmentation_published() -> list[Point]:
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
    points=_augmentation_points,
    claims=_augmentation_claims,
    x_name="training images",
    published=_augmentation_published,
)


# The study `transfer`: the gain by pre-training with few labels (2010.11929, Table 5 and section 4.6).


TRANSFER_TASKS: dict[str, dict[str, Any]] = {
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


def _transfer_points(settings: Settings) -> list[Point]:
    counts = settings.of((100, 1000), (100, 500, 2000, 8000))
    scratch, first = _transfer_network(settings), _transfer_pretraining(settings)
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


def _transfer_network(settings: Settings) -> TrainConfig:
    """Return the config of a run from scratch."""
    variant = f"ViT-Pico/{patch_side(settings, 4)}"
    return small_config(settings, images=settings.images, epochs=1.0, variant=variant, pool="gap", **VIT)


def _transfer_pretraining(settings: Settings) -> dict[str, Stage]:
    """Return the pre-training of each arm. All see the same number of images."""
    config = _transfer_network(settings)
    seen = settings.of(6_000, 100_000)
    classes, samples = settings.of((20, 100), (50, 400))
    supervised = config.override(data=fractals(settings, classes, samples), epochs=seen / (classes * samples))
    stages = {"fractals": supervised}
    patch = patch_side(settings, 4)
    local = patch * (config.images.image_size[0] // patch // 2)  # about half of the image
    for arm, fields in TRANSFER_TASKS.items():
        views = {"local_size": (local, local)} if arm == "DINO" else {}
        stages[arm] = config.override(**fields, **views, epochs=seen / settings.images)
    return {arm: Stage(config=one, rates=(1e-3,)) for arm, one in stages.items()}


def _transfer_claims(points: Sequence[Point]) -> list[Claim]:
    labels = [one.label for one in sorted(points, key=lambda one: one.x or 0.0)]
    few, many = labels[0], labels[-1]
    claims: list[Claim] = []
    for arm in ("fractals", *TRANSFER_TASKS):
        scratch, longer = f"none at {few}", f"none-longer at {few}"
        claims += [
            Better(f"With few labels, {arm} is better than no pre-training", ((f"{arm} at {few}", scratch),)),
            Better(f"With few labels, {arm} is better than four times the training", ((f"{arm} at {few}", longer),)),
            GainShrinks(f"{arm}: the gain is larger with few labels than with many",
                        (f"{arm} at {few}", scratch), (f"{arm} at {many}", f"none at {many}")),
        ]  # fmt: skip
    return claims


def _transfer_published() -> list[Point]:
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
    points=_transfer_points,
    claims=_transfer_claims,
    metrics={"accuracy": "accuracy", "fewshot_5": "5-shot"},
    x_name="labelled images",
    published=_transfer_published,
)


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (POSITIONS, DATA_SIZE, COMPUTE, SHAPE, HEAD, OPTIMIZER, ATTENTION, AUGMENTATION, TRANSFER)
}
"""All studies by name."""
