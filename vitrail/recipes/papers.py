"""Recipes of papers: ViT, AugReg, "Better plain ViT baselines", BiT, and their transfers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.data.augment.settings import Augment, Preset
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.models.variants import ModelConfig, variant_config
from vitrail.recipes import PaperRecipe
from vitrail.tasks.classification import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig

# Recipes of papers: one row each, with the command and the published result.


DATA = {
    "i1k": "hf:ILSVRC/imagenet-1k",
    "i21k": "imagenet-21k",
    "jft": "jft-300m",
    "coco": "coco-2017",
    "ade20k": "ade20k",
    "wit": "wit-400m",
    "webli": "webli",
}
"""Data sets of the papers. All but the first are folders of your own: ImageNet-21k has no official copy on the hub,
JFT-300M and the pairs of CLIP and SigLIP are not public, COCO is at cocodataset.org, and ADE20K is at
sceneparsing.csail.mit.edu. With `--data`, the data can be in another folder."""


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels, with which most papers normalise images."""

HELD_OUT = "One percent of the training images is held out, and the publication trains with them."
"""Difference of recipes whose publication trains with all images."""


REGULARISATION = (0.0, 0.1)
"""Rates of dropout and stochastic depth in AugReg's grid. Within a run, both have the same rate."""

WEIGHT_DECAYS = (0.1, 0.03)
"""Weight decays in AugReg's grid, to be multiplied by the learning rate."""


def augreg(
    variant: str,
    data: str,
    *,
    augmentation: Preset,
    weight_decay: float = 0.1,
    regularisation: float = 0.0,
    epochs: int = 300,
) -> TrainConfig:
    """Return the config of a run of AugReg's grid: Adam, batches of 4,096, 10,000 steps of warm-up, a cosine schedule.

    `data` is i1k or i21k. The grid has seven presets `augmentation` (augreg-none to augreg-strong2), the rates
    `regularisation` of both dropout and stochastic depth (`REGULARISATION`), and `WEIGHT_DECAYS`. On ImageNet-21k the
    grid has runs of 30 and of 300 epochs. The loss is the sigmoid loss, with the initial biases of big_vision's
    configs, which store Adam's momentum in bfloat16. Networks for ImageNet have a hidden layer before the head, as in
    big_vision's config.
    """
    overrides = {
        "activation": "gelu-tanh", "dropout": regularisation, "stochastic_depth": regularisation,
        "head_bias": {"i1k": -6.9, "i21k": -10.0}[data],
        "head_hidden": variant_config(variant).embed_width if data == "i1k" else 0,
    }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="sigmoid"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
        augment=Augment(preset=augmentation, flip=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup="10000 steps", warmup_from_zero=True, weight_decay=weight_decay, clip=1.0,
            momentum_format="bfloat16",
        ),
        run=RunConfig(epochs=float(epochs), batch_size=4096, keep="last"),
    )  # fmt: skip


def plain_vit_s16(epochs: int = 90) -> TrainConfig:
    """Return the config of the S/16 of "Better plain ViT baselines", in every detail of big_vision's config.

    The network has mean pooling, fixed sin-cos positions and a hidden layer before the head. big_vision multiplies its
    weight decay of 1e-4 by the schedule alone. AdamW also multiplies by the learning rate of 1e-3, so the weight decay
    of this recipe is 0.1.
    """
    variant = "ViT-S/16"
    overrides = {
        "pool": "gap", "positions": "sincos-2d", "activation": "gelu-tanh",
        "head_hidden": variant_config(variant).embed_width,
    }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=Classification(loss="softmax"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
        augment=Augment(preset="augreg-light2", flip=True),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup="10000 steps", warmup_from_zero=True, weight_decay=0.1, clip=1.0,
            momentum_format="bfloat16",
        ),
        run=RunConfig(epochs=float(epochs), batch_size=1024, keep="last"),
    )  # fmt: skip


class AugRegRow(NamedTuple):
    """A network of AugReg with the settings of its recommended model."""

    variant: str
    augmentation: Preset
    weight_decay: float
    regularisation: float
    accuracy: float | None = None
    """Published top-1 accuracy on ImageNet in percent, after fine-tuning at 384 pixels."""


ON_I21K = {
    "ti16": AugRegRow("ViT-Ti/16", "augreg-none", 0.03, 0.0, 78.22),
    "s32": AugRegRow("ViT-S/32", "augreg-none", 0.1, 0.0, 79.58),
    "s16": AugRegRow("ViT-S/16", "augreg-light1", 0.03, 0.0, 83.73),
    "b32": AugRegRow("ViT-B/32", "augreg-light1", 0.1, 0.0, 83.59),
    "b16": AugRegRow("ViT-B/16", "augreg-medium1", 0.1, 0.0, 85.49),
    "l16": AugRegRow("ViT-L/16", "augreg-strong1", 0.1, 0.0, 85.59),
    "r-ti16": AugRegRow("R+ViT-Ti/16", "augreg-none", 0.03, 0.0, 75.40),
    "r26-s32": AugRegRow("R26+ViT-S/32", "augreg-light1", 0.1, 0.0, 83.85),
    "r50-l32": AugRegRow("R50+ViT-L/32", "augreg-medium1", 0.1, 0.1, 85.99),
}
"""Settings and results of the models that the authors recommend, by the names of their files."""

ON_I1K = {
    "ti16": AugRegRow("ViT-Ti/16", "augreg-light1", 0.1, 0.0),
    "s32": AugRegRow("ViT-S/32", "augreg-medium1", 0.1, 0.0),
    "s16": AugRegRow("ViT-S/16", "augreg-medium2", 0.1, 0.0),
    "b32": AugRegRow("ViT-B/32", "augreg-medium2", 0.1, 0.0),
    "b16": AugRegRow("ViT-B/16", "augreg-medium2", 0.1, 0.0),
    "l16": AugRegRow("ViT-L/16", "augreg-medium2", 0.1, 0.0),
}
"""Default settings of big_vision's config for ImageNet."""

PLAIN_RESULTS = {90: 76.5, 150: 78.5, 300: 80.0}
"""Top-1 accuracy on ImageNet's validation split in percent, by epochs (Table 1 of 2205.01580)."""


def _augreg_recipe(network: str, data: str, row: AugRegRow) -> PaperRecipe:
    make = functools.partial(
        augreg,
        row.variant,
        data,
        augmentation=row.augmentation,
        weight_decay=row.weight_decay,
        regularisation=row.regularisation,
    )
    if row.accuracy is None:
        result, source = "not stated", "2106.10270, configs of google-research/big_vision"
    else:
        result, source = f"{row.accuracy:.2f} %", "2106.10270, README of google-research/vision_transformer"
    return PaperRecipe(f"augreg-{network}-{data}", make, result, source, ())


AUGREG_RECIPES = (
    *(_augreg_recipe(network, "i21k", row) for network, row in ON_I21K.items()),
    *(_augreg_recipe(network, "i1k", row) for network, row in ON_I1K.items()),
)
"""Recipes of AugReg's recommended models on ImageNet-21k, and of big_vision's defaults on ImageNet."""

PLAIN_RECIPES = tuple(
    PaperRecipe(
        f"plain-vit-s16-{epochs}",
        functools.partial(plain_vit_s16, epochs),
        f"{accuracy:.1f} %",
        "2205.01580, Table 1",
        (),
        "on ImageNet's validation split",
    )
    for epochs, accuracy in PLAIN_RESULTS.items()
)
"""The ViT-S/16 of "Better plain ViT baselines", trained for 90, 150 and 300 epochs."""


# Pre-training of Big Transfer (BiT, 1912.11370): ResNets on ImageNet (BiT-S) and on ImageNet-21k (BiT-M).


def upstream(variant: str, data: str) -> TrainConfig:
    """Return the config of a pre-training run of BiT: SGD with momentum 0.9 for 90 epochs, with 5,000 steps of warm-up.

    The learning rate is 0.03 for 256 images and is divided by ten after 30, 60 and 80 epochs. A weight decay of 1e-4
    is added to the gradient, as SGD does by default.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="softmax" if data == "i1k" else "sigmoid"),
        model=ModelConfig(variant=variant),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.9, learning_rate=0.03, base_batch_size=256, schedule="staircase",
            stair_at=("30 epochs", "60 epochs", "80 epochs"), warmup="5000 steps", warmup_from_zero=True,
            weight_decay=1e-4, clip=0.0,
        ),
        run=RunConfig(epochs=90.0, batch_size=4096, keep="last"),
    )  # fmt: skip


BIT_RECIPES = tuple(
    PaperRecipe(
        f"bit-{network}-{data}",
        functools.partial(upstream, f"BiT-{network.upper().replace('X', 'x')}", data),
        result,
        "1912.11370, README of google-research/big_transfer",
        (HELD_OUT,),
        "on ImageNet after fine-tuning by BiT-HyperRule",
    )
    for network, data, result in (
        ("r50x1", "i1k", "not stated"),
        ("r50x1", "i21k", "80.68 %"),
        ("r152x2", "i21k", "85.15 %"),
    )
)
"""Recipes of BiT-S (i1k) and BiT-M (i21k)."""


# Fine-tuning runs of papers: commands of `vitrail finetune` with the published results.


HUB = {
    "ViT-B/16": "google/vit-base-patch16-224-in21k",
    "ViT-B/32": "google/vit-base-patch32-224-in21k",
    "ViT-L/16": "google/vit-large-patch16-224-in21k",
    "ViT-L/32": "google/vit-large-patch32-224-in21k",
    "ViT-H/14": "google/vit-huge-patch14-224-in21k",
}
"""Names on the hub of the paper's networks, pre-trained on ImageNet-21k."""

TRANSFER_DATA = {
    "CIFAR-10": "hf:uoft-cs/cifar10",
    "CIFAR-100": "hf:uoft-cs/cifar100?label=fine_label",
    "ImageNet": "hf:ILSVRC/imagenet-1k",
    "Flowers": "hf:dpdl-benchmark/oxford_flowers102",
    "Pets": "hf:timm/oxford-iiit-pet",
}
"""Data sets on the hub. Their names were looked up, but the data was not downloaded."""

TABLE_5 = {
    "ViT-B/16": (98.95, 91.67, 83.97, 99.38, 94.43),
    "ViT-B/32": (98.79, 91.97, 81.28, 99.11, 93.02),
    "ViT-L/16": (99.16, 93.44, 85.15, 99.61, 94.73),
    "ViT-L/32": (99.13, 93.04, 80.99, 99.19, 93.09),
    "ViT-H/14": (99.27, 93.82, 85.13, 99.51, 94.82),
}
"""Accuracies in percent after pre-training on ImageNet-21k, in the order of `DATA` (2010.11929, Table 5)."""


@dataclass(frozen=True)
class Transfer:
    """A fine-tuning run of a paper."""

    network: str
    data: str
    """Title of the data set."""
    command: str
    result: str
    """The published result."""
    source: str
    """The paper or code, with table and arXiv number."""


def _command(model: str, data: str, options: str) -> str:
    return f"vitrail finetune {model} --data {data} {options}"


TRANSFERS = (
    *(
        Transfer(
            network, title, _command(HUB[network], spec, "--protocol paper"), f"{result:.2f} %", "2010.11929, Table 5"
        )
        for network, results in TABLE_5.items()
        for (title, spec), result in zip(TRANSFER_DATA.items(), results, strict=True)
    ),
    Transfer(
        "ViT-L/16",
        "ImageNet",
        _command(HUB["ViT-L/16"], TRANSFER_DATA["ImageNet"], "--protocol paper --image-size 512 512 --average 0.9999"),
        "85.30 %",
        "2010.11929, Table 2",
    ),
    Transfer(
        "ViT-L/16",
        "VTAB-1k",
        _command(HUB["ViT-L/16"], "datasets", "--suite vtab-1k --protocol paper"),
        "72.72 %, mean of 19 tasks",
        "2010.11929, Table 2",
    ),
    *(
        Transfer(
            f"BiT-{network}",
            "ImageNet",
            _command(f"BiT-M-{network}.npz", TRANSFER_DATA["ImageNet"], "--protocol bit"),
            result,
            "1912.11370, README of google-research/big_transfer",
        )
        for network, result in (("R50x1", "80.68 %"), ("R152x2", "85.15 %"))
    ),
)
"""Rows of Table 5 (five networks and five data sets), of Table 2, and of Big Transfer."""


# Pre-training of the paper "An Image is Worth 16x16 Words" (2010.11929): its Table 3, a recipe for each row.


class Table3Row(NamedTuple):
    """One network and data set of Table 3."""

    variant: str
    data: str
    epochs: int
    learning_rate: float
    accuracy: float | None
    """Published top-1 accuracy on ImageNet in percent, after fine-tuning at 384 pixels (Tables 5 and 6)."""


ROWS = {
    "vit-b32-jft": Table3Row("ViT-B/32", "jft", 7, 8e-4, 80.73),
    "vit-b16-jft": Table3Row("ViT-B/16", "jft", 7, 8e-4, 84.15),
    "vit-l32-jft": Table3Row("ViT-L/32", "jft", 7, 6e-4, 84.37),
    "vit-l16-jft-7": Table3Row("ViT-L/16", "jft", 7, 4e-4, 86.30),
    "vit-l16-jft": Table3Row("ViT-L/16", "jft", 14, 4e-4, 87.12),
    "vit-h14-jft": Table3Row("ViT-H/14", "jft", 14, 3e-4, 88.08),
    "resnet-r50x1-jft": Table3Row("BiT-R50x1", "jft", 7, 1e-3, 77.54),
    "resnet-r50x2-jft": Table3Row("BiT-R50x2", "jft", 7, 1e-3, 82.12),
    "resnet-r101x1-jft": Table3Row("BiT-R101x1", "jft", 7, 8e-4, 80.67),
    "resnet-r152x1-jft": Table3Row("BiT-R152x1", "jft", 7, 6e-4, 81.88),
    "resnet-r152x2-jft": Table3Row("BiT-R152x2", "jft", 7, 6e-4, 84.97),
    "hybrid-r50-b32-jft": Table3Row("R50+ViT-B/32", "jft", 7, 8e-4, 84.90),
    "hybrid-r50-b16-jft": Table3Row("R50+ViT-B/16", "jft", 7, 8e-4, 85.58),
    "hybrid-r50-l32-jft": Table3Row("R50+ViT-L/32", "jft", 7, 2e-4, 85.68),
    "hybrid-r50-l16-jft-7": Table3Row("R50+ViT-L/16", "jft", 7, 4e-4, 86.60),
    "hybrid-r50-l16-jft": Table3Row("R50+ViT-L/16", "jft", 14, 4e-4, 87.12),
    "vit-b32-i21k": Table3Row("ViT-B/32", "i21k", 90, 1e-3, 81.28),
    "vit-b16-i21k": Table3Row("ViT-B/16", "i21k", 90, 1e-3, 83.97),
    "vit-l32-i21k-30": Table3Row("ViT-L/32", "i21k", 30, 1e-3, None),
    "vit-l32-i21k": Table3Row("ViT-L/32", "i21k", 90, 1e-3, None),
    "vit-l16-i21k-30": Table3Row("ViT-L/16", "i21k", 30, 1e-3, None),
    "vit-l16-i21k": Table3Row("ViT-L/16", "i21k", 90, 1e-3, None),
    "vit-b32-i1k": Table3Row("ViT-B/32", "i1k", 300, 3e-3, 73.38),
    "vit-b16-i1k": Table3Row("ViT-B/16", "i1k", 300, 3e-3, 77.91),
    "vit-l32-i1k": Table3Row("ViT-L/32", "i1k", 300, 3e-3, 71.16),
    "vit-l16-i1k": Table3Row("ViT-L/16", "i1k", 300, 3e-3, 76.53),
}

OF_BOTH_LENGTHS = {"ViT-L/32": 80.99, "ViT-L/16": 85.15}
"""Accuracies after pre-training on ImageNet-21k. The paper does not state whether they are for 30 or for 90 epochs."""


def pretraining(variant: str, data: str, *, epochs: int, learning_rate: float) -> TrainConfig:
    """Return the config of a pre-training run of Table 3: Adam with decoupled weight decay, batches of 4,096 images,
    10,000 steps of warm-up.

    The head of a transformer has a hidden layer of the network's width. JFT-300M and ImageNet-21k have several labels
    per image, so the loss is the sigmoid loss, and the head's biases start at -10 as in big_vision. Gradients are
    clipped on ImageNet alone. Images are cropped and scaled as in the authors' code.
    """
    network = variant_config(variant)
    overrides: dict[str, object] = {"head_bias": 0.0 if data == "i1k" else -10.0}
    if network.architecture == "ViT":
        overrides |= {
            "head_hidden": network.embed_width, "activation": "gelu-tanh", "dropout": 0.0 if data == "jft" else 0.1,
        }  # fmt: skip
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Classification(loss="softmax" if data == "i1k" else "sigmoid"),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            schedule="cosine" if data == "i1k" else "linear",
            warmup="10000 steps",
            warmup_from_zero=True,
            weight_decay={"jft": 0.1, "i21k": 0.03, "i1k": 0.3}[data],
            clip=1.0 if data == "i1k" else 0.0,
        ),
        run=RunConfig(epochs=float(epochs), batch_size=4096, keep="last"),
    )


def _vit_recipe(name: str, row: Table3Row) -> PaperRecipe:
    accuracy = row.accuracy or OF_BOTH_LENGTHS[row.variant]
    result = f"{accuracy:.2f} %" + ("" if row.accuracy else " (epochs not stated)")
    make = functools.partial(pretraining, row.variant, row.data, epochs=row.epochs, learning_rate=row.learning_rate)
    table = "6" if row.data == "jft" else "5"
    return PaperRecipe(name, make, result, f"2010.11929, Tables 3 and {table}", ())


VIT_RECIPES = tuple(_vit_recipe(name, row) for name, row in ROWS.items())
"""Recipes of Table 3, trained on JFT-300M (jft), ImageNet-21k (i21k) and ImageNet (i1k)."""
