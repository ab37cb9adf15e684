"""Recipes of images with texts: drawn scenes, CLIP, SigLIP and LiT."""

from __future__ import annotations

from functools import partial
from typing import Any

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.models.variants import ModelConfig
from vitrail.recipes import PaperRecipe
from vitrail.recipes.papers import DATA, HELD_OUT
from vitrail.tasks.pairs import Clip, SigLip
from vitrail.training.config import RunConfig, StartConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of pixels in OpenAI's code."""

ZERO_SHOT = "on ImageNet without training on it, by the names of the classes"


def scenes() -> TrainConfig:
    """Return the config of a run that learns an image tower and a text tower from 20,000 drawn scenes.

    The towers are small, and images are not changed at random, because a mirrored scene has another sentence. The test
    split has combinations of colour and shape that no training scene has.

    Command: `vitrail train scenes`, or `vitrail train --task clip`.
    Hardware: two CPU cores; any GPU.
    Time: 950 seconds on two cores with AVX512-BF16 (AMD EPYC 9004, 2026-11-26) beside other programs.
    Result: among 1,000 new scenes 92.4, 90.8 and 95.1 % of the images find a text of theirs first (seeds 0 to 2), and
    92.1, 90.9 and 94.2 % of the texts their image. With combinations that no training scene has, 78.4, 70.1 and 82.5 %,
    and 76.4, 71.5 and 83.4 %.
    """
    return TrainConfig(
        data=DataConfig(spec="scenes:20000", validation_share=0.05),
        task=Clip(text_width=96, text_depth=2, text_context=32, vocabulary=1024),
        model=ModelConfig(
            variant="ViT-Pico/4", overrides={"width": 96, "depth": 3, "heads": 3, "mlp_width": 384, "pool": "gap"}
        ),
        images=Preprocess(image_size=(32, 32)),
        augment=Augment(),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, beta2=0.98, warmup=0.2),
        run=RunConfig(name="scenes", epochs=20.0, batch_size=256),
    )


def pairs() -> TrainConfig:
    """Return the config of a run on your own images with texts, without random changes of the images.

    A mirrored or cropped image may not fit its text any more. With a frozen image tower (LiT), each image is embedded
    once.

    Command: `vitrail train pairs --data TABLE`, or `vitrail train --data TABLE --task clip`.
    Hardware: two CPU cores for a frozen image tower; else a GPU.
    Time and result: not measured.
    """
    return TrainConfig(
        data=DataConfig(spec="pairs.csv"),
        task=Clip(),
        model=ModelConfig(variant="ViT-S/16"),
        images=Preprocess(image_size=(224, 224)),
        augment=Augment(),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, beta2=0.98, clip=1.0),
        run=RunConfig(epochs=20.0, batch_size=256),
    )


def clip_wit(variant: str) -> TrainConfig:
    """Return the config of a run of CLIP's paper: 32 epochs of 400 million pairs in batches of 32,768."""
    overrides = {"projection": 512, "pre_norm": True, "activation": "quick-gelu", "norm_eps": 1e-5}
    return TrainConfig(
        data=DataConfig(spec=DATA["wit"], validation="train", validation_share=0.0001),
        task=Clip(),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=Preprocess(image_size=(224, 224), mean=CLIP_MEAN, std=CLIP_STD, interpolation="bicubic"),
        augment=Augment(crop_area=(0.9, 1.0)),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, schedule="cosine", warmup="2000 steps", weight_decay=0.2, beta2=0.98, clip=0.0
        ),
        run=RunConfig(epochs=32.0, batch_size=32_768, keep="last"),
    )


def siglip_webli() -> TrainConfig:
    """Return the config of a run of SigLIP's paper: 40 billion pairs in batches of 32,768, with images of 256 pixels
    and 64 tokens."""
    overrides: dict[str, Any] = {"pool": "map", "activation": "gelu-tanh"}
    return TrainConfig(
        data=DataConfig(spec=DATA["webli"], validation="train", validation_share=0.0001),
        task=SigLip(text_width=768, vocabulary=32_000),
        model=ModelConfig(variant="ViT-B/16", overrides=overrides),
        images=Preprocess(image_size=(256, 256), resize="squash"),
        augment=Augment(),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup="20000 steps", weight_decay=0.1, beta2=0.95, clip=1.0
        ),
        run=RunConfig(steps=1_220_703, batch_size=32_768, keep="last"),
    )


def lit_coco() -> TrainConfig:
    """Return the config of big_vision's example of LiT with the sigmoid loss: 5,000 steps of 512 pairs of COCO."""
    return TrainConfig(
        data=DataConfig(spec=DATA["coco"], validation="train", validation_share=0.01),
        task=SigLip(freeze="image", text_width=768, text_context=16, initial_bias=-2.71, vocabulary=30_522),
        start=StartConfig(init="runs/vit-b16-i21k"),
        images=Preprocess(image_size=(224, 224), resize="squash"),
        augment=Augment(flip=True, randaugment_layers=2, randaugment_magnitude=10.0),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup="150 steps", weight_decay=10.0, clip=1.0
        ),
        run=RunConfig(steps=5000, batch_size=512, keep="last"),
    )


OWN_TOKENIZER = (
    "The tokenizer is learned from the training texts; `--text-tokenizer` takes the published one of a model."
)

IMAGE_TEXT_RECIPES = (
    *(
        PaperRecipe(
            name,
            partial(clip_wit, variant),
            result,
            "2103.00020, tables 18 and 19",
            (
                "The data is not public.",
                OWN_TOKENIZER,
                "Adam's epsilon is 1e-8, and 1e-6 in the paper. Embeddings of tokens and positions do not decay.",
                "Random crops are 90 to 100 % of the area, because the paper does not state the range.",
            ),
            ZERO_SHOT,
        )
        for name, variant, result in (("clip-b32-wit", "ViT-B/32", "63.2 %"), ("clip-b16-wit", "ViT-B/16", "68.6 %"))
    ),
    PaperRecipe(
        "siglip-b16-webli",
        siglip_webli,
        "76.0 % (at 224 pixels)",
        "2303.15343, section 4",
        (
            "The data is not public.",
            OWN_TOKENIZER,
            "The optimizer is AdamW, and Adafactor with a decay of at most 0.95 in the authors' code.",
            "Texts have 64 tokens, as in the published models.",
            "Settings that the paper does not state were not compared with the authors' config, which is not public.",
        ),
        ZERO_SHOT,
    ),
    PaperRecipe(
        "lit-b16-coco",
        lit_coco,
        "not stated",
        "2111.07991, and siglip_lit_coco.py of google-research/big_vision",
        (
            HELD_OUT,
            OWN_TOKENIZER,
            "The text tower is new, and BERT-Base in the example.",
        ),
        ZERO_SHOT,
    ),
)
"""Recipes of CLIP, SigLIP and LiT."""
