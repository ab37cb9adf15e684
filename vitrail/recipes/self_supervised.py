"""Recipes of training without labels: masked patches, tokens (BEiT), MAE, SimCLR, MoCo v3 and DINO."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.models.variants import ModelConfig
from vitrail.recipes import PaperRecipe
from vitrail.recipes.papers import DATA, HELD_OUT, IMAGENET_MEAN, IMAGENET_STD
from vitrail.tasks.contrast import MoCo, SimClr
from vitrail.tasks.dino import Dino
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.tasks.vqvae import VqVae
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig

BYOL_VIEWS = Augment(
    flip=True,
    crop_area=(0.08, 1.0),
    colour_jitter=(0.4, 0.4, 0.2, 0.1),
    colour_jitter_probability=0.8,
    grey=0.2,
    blur=(1.0, 0.1),
    solarise=(0.0, 0.2),
)
"""The two views of BYOL (2006.07733), with which MoCo v3 and DINO are trained."""

WITH_LOCAL: dict[str, Any] = {"blur": (1.0, 0.1, 0.5), "solarise": (0.0, 0.2, 0.0)}
"""Probabilities of `BYOL_VIEWS` in DINO, whose third numbers hold for local views."""

DECAYED = r"(?!.*norm).*weight"
"""Pattern of the weights that decay in the codes of MAE and BEiT, apart from tokens and positions."""


def vqvae() -> TrainConfig:
    """Return the config of a run that learns tokens of patches from the 10,000 bundled images of Fashion-MNIST.

    The network is a Vision Transformer of two blocks with patches of 4 x 4 pixels, and so is the decoder. There are 512
    codes of 16 numbers, and codes that are hardly used are restarted. The recipe `beit` predicts the tokens.

    Command: `vitrail train vqvae`, or `vitrail train --task vqvae`.
    Hardware: two CPU cores; any GPU.
    Time: 8 minutes on one core beside other programs, with `--threads 0` (AMD EPYC 9004, 2026-11).
    Result: a mean squared error of 0.040 of the normalised pixels of the 2,000 test images, a perplexity of 236, and
    all 512 codes used (seed 0, one run). It was measured when codes began as standard normal numbers with a count of 1,
    which gives the same error after 5 epochs (0.0492, now 0.0491; three seeds).
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=VqVae(codes=512, code_width=16, restart_below=0.1),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"depth": 2, "pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.0, beta2=0.95),
        run=RunConfig(name="vqvae", epochs=20.0, batch_size=64, keep="last"),
    )


def beit() -> TrainConfig:
    """Return the config of a run that predicts the tokens of masked patches of the 10,000 bundled images.

    The tokenizer is the one that `vitrail train vqvae` trains into `runs/vqvae`. The network is a small Vision
    Transformer with patches of 4 x 4 pixels, which pools the mean of its patches. As in BEiT, 40 % of the patches are
    masked in blocks, and none of them keeps its embedding.

    Command: `vitrail train beit`, after `vitrail train vqvae`. `--tokenizer RUN` names another tokenizer.
    Hardware: two CPU cores; any GPU.
    Time and result: 12 minutes on one core beside other programs, with `--threads 0`. Of 531 validation images, 20
    nearest neighbours classify 81.4 % (64.8 % with the initial weights), and a linear model 82.5 % (73.4 %), with seed
    0. The mean colour as the target (the recipe `masked-patches`) has 72.5 and 83.1 %. Both were measured before the
    tokenizer's codes and the mask embedding started as published, which makes no difference after 5 epochs (three
    seeds; docs/log.md).
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=MaskedPatches(
            patch_target="tokens",
            tokenizer="runs/vqvae",
            corrupt_fraction=0.4,
            corrupt_blocks=True,
            mask_fraction=1.0,
            swap_fraction=0.0,
        ),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="beit", epochs=20.0, batch_size=64, keep="last"),
    )


def vqvae_i1k() -> TrainConfig:
    """Return the config of a tokenizer for the recipe `vit-b16-i1k-beit`.

    BEiT uses the tokenizer of DALL-E, a convolutional network whose training data is not public. This recipe has its
    sizes: 14 x 14 tokens of images of 112 x 112 pixels, and 8,192 codes. The width and the depth of both transformers
    and the 32 numbers of a code are those of the small ViT-VQGAN (2110.04627). The learning rate of Adam, the batch
    size and the number of steps are those of VQ-VAE on CIFAR-10 (1711.00937, section 4.1), since that paper states none
    for ImageNet. The commitment and the decay of the codes are that paper's as well.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=VqVae(codes=8192, code_width=32, commitment=0.25, code_decay=0.99),
        model=ModelConfig(variant="ViT-M/8", overrides={"depth": 8, "pool": "gap"}),
        images=Preprocess(image_size=(112, 112), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic"),
        augment=Augment(flip=True, crop_area=(0.08, 1.0)),
        optimizer=OptimizerConfig(
            learning_rate=2e-4, schedule="constant", warmup="0 steps", weight_decay=0.0, clip=0.0
        ),
        run=RunConfig(epochs=25.0, steps=250_000, batch_size=128, keep="last"),
    )


def beit_i1k() -> TrainConfig:
    """Return the config of the published code's pre-training of BEiT-B/16 on ImageNet (2106.08254), with 800 epochs.

    75 of the 196 patches are masked in blocks, and the tokens of a tokenizer with 8,192 codes are predicted, which sees
    the images with 112 x 112 pixels. The optimizer is AdamW with a learning rate of 1.5e-3, a warm-up of 10 epochs, a
    cosine decay to 1e-5 and a weight decay of 0.05. The norm of the gradient is limited to 3. Images are cropped and
    mirrored, and their brightness, contrast and saturation change by up to 40 %.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=MaskedPatches(
            patch_target="tokens",
            tokenizer="runs/beit-tokenizer-i1k",
            corrupt_fraction=75 / 196,
            corrupt_blocks=True,
            mask_fraction=1.0,
            swap_fraction=0.0,
        ),
        model=ModelConfig(
            variant="ViT-B/16",
            overrides={
                "pool": "gap",
                "class_token": True,
                "positions": "relative-bias-class",
                "positions_at": "shared",
                "position_std": 0.0,
                "initial_weights": "beit",
                "layer_scale": 0.1,
                "stochastic_depth": 0.1,
            },
        ),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"),
        augment=Augment(flip=True, crop_area=(0.08, 1.0), colour_jitter=(0.4, 0.4, 0.4, 0.0)),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-3,
            schedule="cosine",
            end_learning_rate=1e-5,
            warmup="10 epochs",
            warmup_from_zero=True,
            weight_decay=0.05,
            weight_decay_factors=(DECAYED + r"|positions\..*|mask_embedding=1",),
            clip=3.0,
        ),
        run=RunConfig(epochs=800.0, batch_size=2048, keep="last"),
    )


TOKEN_RECIPES = (
    PaperRecipe(
        "beit-tokenizer-i1k",
        vqvae_i1k,
        "not stated",
        "1711.00937, 2110.04627 and 2106.08254",
        (
            HELD_OUT,
            "The error of the pixels is not divided by their variance, which is about 0.3, so the commitment counts "
            "about three times as much.",
        ),
    ),
    PaperRecipe(
        "vit-b16-i1k-beit",
        beit_i1k,
        "83.2 %",
        "2106.08254 and its code, README",
        (
            HELD_OUT,
            "The tokenizer is one of this package (beit-tokenizer-i1k), because that of DALL-E does not exist here.",
            "The tokenizer sees the network's views at half their size, and not a second scaling of the image.",
            "If blocks have fewer than 75 patches, single patches follow. In the published code, 33 % of the masks "
            "have fewer, and the mean is 74.5.",
            "Colours change after the crop instead of before it, and contrast about the mean of the crop. On "
            "photographs of CamVid, this is a mean difference of 3.0 levels, beside 17.7 of the change itself.",
        ),
        "on ImageNet after fine-tuning at 224 pixels",
    ),
)
"""Recipes of BEiT in the paper and its code."""


# Self-distillation (DINO): a recipe for small images, and the pre-training of the paper.


def dino() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 7 x 7 pixels, which pools the mean of its patches. Its two
    global views are crops of 40 to 100 % of an image's area, and its four local views are crops of 15 to 50 % with
    14 x 14 pixels.

    Command: `vitrail train dino`, or `vitrail train --task dino`.
    Hardware: two CPU cores; any GPU.
    Time and result: 27 minutes on half of a core, with `--threads 0`. Of 531 validation images, 20 nearest neighbours
    classify 78.9 % (70.2 % with the initial weights), and a linear model 81.4 % (73.8 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=Dino(
            local_views=4,
            local_size=(14, 14),
            local_crop_area=(0.15, 0.5),
            prototypes=256,
            projection_hidden=256,
            bottleneck=64,
            teacher_momentum=0.98,
        ),
        model=ModelConfig(variant="ViT-Pico/7", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, crop_area=(0.4, 1.0), colour_jitter=(0.4, 0.4, 0.0, 0.0)),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="dino", epochs=20.0, batch_size=64, keep="last"),
    )


def dino_i1k(
    epochs: float,
    batch_size: int,
    *,
    data: str = "i1k",
    patch: int = 16,
    augment: dict[str, Any] | None = None,
    network: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **task: Any,
) -> TrainConfig:
    """Return the config of a pre-training run of the published code on ImageNet with a ViT-S.

    The optimizer is AdamW with a learning rate of 5e-4 per 256 images, a warm-up of 10 epochs and a cosine decay to
    1e-6. The weight decay rises from 0.04 to 0.4. Ten views of an image are processed: two of 224 x 224 pixels with 40
    to 100 % of its area, and eight of 96 x 96 pixels with 5 to 40 %. The other arguments replace fields.
    """
    overrides: dict[str, Any] = {
        "stochastic_depth": 0.1, "position_resize": "bicubic-offset", "initial_weights": "timm", **(network or {}),
    }  # fmt: skip
    published: dict[str, Any] = {
        "learning_rate": 5e-4, "base_batch_size": 256, "end_learning_rate": 1e-6, "warmup": "10 epochs",
        "warmup_from_zero": True, "weight_decay": 0.04, "end_weight_decay": 0.4,
        "weight_decay_factors": (r"(?!.*(bias|norm|gamma)).*=1",), "clip": 3.0, "clip_of": "weight",
    }  # fmt: skip
    sizes: dict[str, Any] = {"local_size": (96, 96), "prototypes": 65_536, "projection_hidden": 2048, "bottleneck": 256}
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=Dino(**{**sizes, **task}),
        model=ModelConfig(variant=f"ViT-S/{patch}", overrides=overrides),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"),
        augment=replace(BYOL_VIEWS, **{"crop_area": (0.4, 1.0), **WITH_LOCAL, **(augment or {})}),
        optimizer=OptimizerConfig(**{**published, **(optimizer or {})}),
        run=RunConfig(epochs=epochs, batch_size=batch_size, keep="last"),
    )


IBOT: dict[str, Any] = {
    "target_temperature": 0.07, "target_temperature_epochs": 30.0, "unit_prototypes": False, "prototypes": 8192,
    "local_views": 10, "local_crop_area": (0.05, 0.25), "patch_weight": 1.0, "smallest_block": 16,
}  # fmt: skip
"""Settings of iBOT's ViT-S/16, as in the README of its code."""

DINOV2: dict[str, Any] = {
    "patch": 14, "network": {"layer_scale": 1e-5, "initial_weights": "dinov2"},
    "augment": {"crop_area": (0.32, 1.0), "blur": (0.0, 0.9, 0.5)}, "local_size": (98, 98),
    "local_crop_area": (0.05, 0.32), "teacher_momentum": 0.992, "target_temperature": 0.07,
    "target_temperature_by": "step", "unit_prototypes": False, "koleo_weight": 0.1, "patch_weight": 1.0,
    "centring": "masked-mean",
}  # fmt: skip
"""Settings of DINOv2's ssl_default_config.yaml, which are those of vitl16_short.yaml. Its code blurs a view with the
probability 1 - p, so the views have 0, 0.9 and 0.5 instead of 1, 0.1 and 0.5."""

DINOV2_LARGE: dict[str, Any] = {
    **DINOV2, "teacher_momentum": 0.994, "prototypes": 131_072, "bottleneck": 384, "separate_patch_head": True,
    "centring": "sinkhorn",
}  # fmt: skip
"""Settings of DINOv2's vitl14.yaml."""

DINOV2_SHORT: dict[str, Any] = {
    "learning_rate": 4e-3 * 2**0.5, "base_batch_size": None, "layer_decay": 0.9, "clip_of": "part",
    "learning_rate_factors": (r"patches\..*=0.2",), "warmup": "12500 steps",
}  # fmt: skip
"""Learning rate of 4e-3, times the root of the batch size divided by 1,024."""

DINOV2_LONG: dict[str, Any] = {
    "learning_rate": 2e-4 * 3**0.5, "base_batch_size": None, "warmup": "100000 steps", "end_weight_decay": 0.2,
    "clip_of": "part", "learning_rate_factors": (r"patches\..*=0.2",),
}  # fmt: skip

DINO_SOURCE = "2104.14294 and its code, README"

DINO_DIFFERENCES = (
    HELD_OUT,
    "Step i of n warm-up steps has i / n of the learning rate instead of i / (n - 1), which is 0.004 % less.",
)

DINOV2_DIFFERENCES = (
    "The publication distils its ViT-S from a larger network. This trains a ViT-S with the settings of the ViT-L.",
    "Each view draws by itself whether it is masked. The publication masks exactly half of the views of a process.",
    "Frozen prototypes have no mean gradients. The publication collects these with a learning rate of 0.",
    "Stochastic depth grows with depth to 0.1. The ViT-L has equal rates of 0.3 or 0.4.",
    "The blur is Pillow's. The publication's has a window of 9 pixels.",
    "Durations in epochs of 1,250 steps are those in passes over the data, rounded to two digits.",
    "The mask embedding has the full learning rate, and that of the first layer in the publication.",
)

DINO_RECIPES = tuple(
    PaperRecipe(
        name,
        partial(dino_i1k, epochs, batch_size, **fields),
        result,
        source,
        (*DINO_DIFFERENCES, *differences),
        "on ImageNet by a linear model of the class tokens of the last four blocks",
    )
    for name, epochs, batch_size, result, source, differences, fields in (  # 8, 16 and 32 GPUs with 64 images each
        ("vit-s16-i1k-dino-100", 100.0, 512, "74.0 % (nearest neighbours: 69.3 %)", DINO_SOURCE, (), {}),
        (
            "vit-s16-i1k-dino-300",
            300.0,
            1024,
            "76.0 % (nearest neighbours: 73.3 %)",
            DINO_SOURCE,
            (),
            {"target_temperature": 0.07, "target_temperature_epochs": 30.0, "unit_prototypes": False},
        ),
        (
            "vit-s16-i1k-ibot-800",
            800.0,
            1024,
            "77.9 % (nearest neighbours: 75.2 %)",
            "2111.07832 and its code, README",
            (),
            {"augment": {"crop_area": (0.25, 1.0)}, **IBOT},
        ),
        (
            "vit-s14-i1k-dinov2",
            200.0,
            2048,
            "no published result (ViT-L/16 in 100 epochs of 1,250 steps: 82.9 %)",
            "2304.07193 and its code, vitl16_short.yaml",
            DINOV2_DIFFERENCES,
            {"optimizer": DINOV2_SHORT, "target_temperature_epochs": 60.0, "frozen_epochs": 2.0, **DINOV2},
        ),
        (
            "vit-s14-i21k-dinov2",
            135.0,
            3072,
            "no published result (ViT-L/14 on ImageNet-22k: 84.5 %)",
            "2304.07193 and its code, vitl14.yaml",
            DINOV2_DIFFERENCES,
            {
                "data": "i21k",
                "optimizer": DINOV2_LONG,
                "target_temperature_epochs": 8.1,
                "frozen_epochs": 0.27,
                **DINOV2_LARGE,
            },
        ),
    )
)
"""Recipes of DINO, iBOT and DINOv2 in the published codes."""


# Masked autoencoders: a recipe for small images, and the pre-training of the paper.


def mae() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 4 x 4 pixels, which pools the mean of its patches. It sees
    12 of the 49 patches.

    Command: `vitrail train mae`, or `vitrail train --task mae`.
    Hardware: two CPU cores; any GPU.
    Time and result: 23 minutes on one core beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 81.7 % (68.0 % with the initial weights), and a linear model 85.3 % (75.7 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=Mae(),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"pool": "gap", "positions": "sincos-2d-mae"}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="mae", epochs=40.0, batch_size=64, keep="last"),
    )


def mae_i1k(variant: str) -> TrainConfig:
    """Return the config of the paper's pre-training on ImageNet (2111.06377, table 8), with 1,600 epochs.

    The optimizer is AdamW with a learning rate of 1.5e-4 per 256 images, which is 2.4e-3 for batches of 4,096, a
    warm-up of 40 epochs and a cosine decay. Images are cropped to 20 to 100 % of their area and mirrored.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=Mae(decoder_width=512, decoder_depth=8, decoder_heads=16),
        model=ModelConfig(
            variant=variant,
            overrides={
                "pool": "gap",
                "class_token": True,
                "positions": "sincos-2d-mae",
                "initial_weights": "mae",
            },
        ),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"),
        augment=Augment(flip=True, crop_area=(0.2, 1.0)),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4,
            base_batch_size=256,
            schedule="cosine",
            warmup="40 epochs",
            warmup_from_zero=True,
            weight_decay=0.05,
            weight_decay_factors=(DECAYED + r"|prefix\.cls|decoder\.mask_token=1",),
            beta2=0.95,
            clip=0.0,
        ),
        run=RunConfig(epochs=1600.0, batch_size=4096, keep="last"),
    )


MAE_RECIPES = tuple(
    PaperRecipe(
        name,
        partial(mae_i1k, variant),
        result,
        "2111.06377, tables 3 and 8",
        (HELD_OUT,),
        "on ImageNet after fine-tuning at 224 pixels",
    )
    for name, variant, result in (
        ("vit-b16-i1k-mae", "ViT-B/16", "83.6 %"),
        ("vit-l16-i1k-mae", "ViT-L/16", "85.9 %"),
        ("vit-h14-i1k-mae", "ViT-H/14", "86.9 %"),
    )
)
"""Recipes of masked autoencoders in the paper."""


# Masked patch prediction: a recipe for small images, and the pre-training of the paper.


def masked_patches() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 4 x 4 pixels, which pools the mean of its patches. It
    predicts 4 x 4 grey levels of each corrupted patch.

    Command: `vitrail train masked-patches`, or `vitrail train --task masked-patches`.
    Hardware: two CPU cores; any GPU.
    Time and result: 10 minutes on one core beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 72.5 % (64.8 % with the initial weights), and a linear model 83.1 % (73.4 %), with seed 0.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=MaskedPatches(patch_target="colours"),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="masked-patches", epochs=20.0, batch_size=32, keep="last"),
    )


def masked_patches_jft() -> TrainConfig:
    """Return the config of the paper's masked patch prediction with ViT-B/16 on JFT-300M (2010.11929, B.1.2).

    The run has a million steps with batches of 4,096 images, which are about 14 epochs. The optimizer is Adam with a
    learning rate of 2e-4, a warm-up of 10,000 steps and a cosine decay. The mean colours of the corrupted patches are
    predicted. The paper states neither weight decay nor augmentation for this run: there is no weight decay, and images
    are cropped and mirrored as in the paper's other pre-training.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["jft"], validation="train", validation_share=0.01),
        task=MaskedPatches(),
        model=ModelConfig(variant="ViT-B/16", overrides={"activation": "gelu-tanh"}),
        images=Preprocess(image_size=(224, 224)).with_geometry("vision_transformer"),
        augment=Augment(flip=True, crop_area=(0.05, 1.0), crop_rule="tensorflow"),
        optimizer=OptimizerConfig(
            learning_rate=2e-4,
            schedule="cosine",
            warmup="10000 steps",
            warmup_from_zero=True,
            weight_decay=0.0,
            clip=0.0,
        ),
        run=RunConfig(epochs=14.0, steps=1_000_000, batch_size=4096, keep="last"),
    )


MASKED_PATCHES_RECIPES = (
    PaperRecipe("vit-b16-jft-masked", masked_patches_jft, "79.9 %", "2010.11929, section 4.6 and appendix B.1.2", ()),
)
"""Recipes of masked patch prediction in the paper."""


# MoCo v3: a recipe for small images, and the pre-training of the paper.


def moco() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 7 x 7 pixels. The two views of an image are crops of 20 to
    100 % of its area with other brightness and contrast, and half are mirrored.

    Command: `vitrail train moco`, or `vitrail train --task moco`.
    Hardware: two CPU cores; any GPU.
    Time and result: 7 minutes on two cores beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 82.5 % (72.5 % with the initial weights), and a linear model 81.7 % (75.7 %), with seed 0. This was
    measured with layer norms in the heads.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=MoCo(projection_width=64, projection_hidden=256),
        model=ModelConfig(variant="ViT-Pico/7", overrides={"position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, crop_area=(0.2, 1.0), colour_jitter=(0.4, 0.4, 0.0, 0.0)),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="moco", epochs=20.0, batch_size=128, keep="last"),
    )


def moco_i1k(variant: str, overrides: dict[str, Any]) -> TrainConfig:
    """Return the config of a pre-training run of the published code on ImageNet, with 300 epochs.

    The optimizer is AdamW with a learning rate of 1.5e-4 per 256 images, which is 2.4e-3 for batches of 4,096, a
    warm-up of 40 epochs and a cosine decay. The patch projection is not trained.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=MoCo(projection_hidden=4096, projection_width=256),
        model=ModelConfig(
            variant=variant, overrides={"positions": "sincos-2d-mae", "initial_weights": "moco", **overrides}
        ),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD),
        augment=BYOL_VIEWS,
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4,
            base_batch_size=256,
            schedule="cosine",
            warmup="40 epochs",
            warmup_from_zero=True,
            weight_decay=0.1,
            weight_decay_factors=(".*=1",),
            clip=0.0,
        ),
        run=RunConfig(epochs=300.0, batch_size=4096, keep="last"),
    )


MOCO_RECIPES = tuple(
    PaperRecipe(
        name,
        partial(moco_i1k, variant, overrides),
        result,
        "2104.02057 and its code, CONFIG.md",
        (HELD_OUT,),
        "on ImageNet by a linear model of frozen features",
    )
    for name, variant, result, overrides in (
        ("vit-s16-i1k-moco", "ViT-S/16", "73.2 %", {"heads": 12}),
        ("vit-b16-i1k-moco", "ViT-B/16", "76.7 %", {}),
    )
)
"""Recipes of MoCo v3 in the published code."""


# Contrastive learning (SimCLR): a recipe for small images, and the pre-training of the published code.


def simclr() -> TrainConfig:
    """Return the config of a run that learns from the 10,000 bundled images of Fashion-MNIST without their labels.

    The network is a small Vision Transformer with patches of 4 x 4 pixels, which pools the mean of its patches. The two
    views of an image are crops of 20 to 100 % of its area with other brightness and contrast, and half are mirrored.

    Command: `vitrail train simclr`, or `vitrail train --task simclr`.
    Hardware: two CPU cores; any GPU.
    Time and result: 14 minutes on one core beside other programs. Of 531 validation images, 20 nearest neighbours
    classify 79.1 % (64.8 % with the initial weights), and a linear model 82.9 % (73.4 %), with seed 0. This was
    measured with a head of two layers.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=SimClr(contrast_temperature=0.2),
        model=ModelConfig(variant="ViT-Pico/4", overrides={"pool": "gap", "position_std": 0.3}),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, crop_area=(0.2, 1.0), colour_jitter=(0.4, 0.4, 0.0, 0.0)),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="simclr", epochs=20.0, batch_size=128, keep="last"),
    )


def simclr_i1k() -> TrainConfig:
    """Return the config of the published code's pre-training of a ResNet-50 on ImageNet, with 100 epochs.

    The optimizer is LARS with a learning rate of 0.3 per 256 images, which is 4.8 for batches of 4,096, a warm-up of 10
    epochs and a cosine decay. Colours change strongly.
    """
    return TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=SimClr(contrast_temperature=0.1),
        model=ModelConfig(variant="BiT-R50x1"),
        images=Preprocess(image_size=(224, 224), mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bicubic"),
        augment=Augment(
            flip=True,
            crop_area=(0.08, 1.0),
            colour_jitter=(0.8, 0.8, 0.8, 0.2),
            colour_jitter_probability=0.8,
            grey=0.2,
            blur=(0.5,),
        ),
        optimizer=OptimizerConfig(
            kind="lars",
            momentum_of="changes",
            learning_rate=0.3,
            base_batch_size=256,
            schedule="cosine",
            warmup="10 epochs",
            warmup_from_zero=True,
            weight_decay=1e-4,
            clip=0.0,
        ),
        run=RunConfig(epochs=100.0, batch_size=4096, keep="last"),
    )


SIMCLR_RECIPES = (
    PaperRecipe(
        "resnet50-i1k-simclr",
        simclr_i1k,
        "64.5 %",
        "2002.05709 and its code, README",
        (
            HELD_OUT,
            "Colours and blur are Pillow's in whole levels: contrast and saturation refer to the image's grey, not to "
            "each channel or to HSV, and the blur repeats the border instead of adding black.",
            "Each blurred view has its own strength, and not all views of a batch the same.",
            "Boxes of crops follow torchvision's rule and not TensorFlow's.",
            "The network is BiT's ResNet-50 with group norms and standardised weights, not one with batch norms.",
        ),
        "on ImageNet by a linear model of frozen features",
    ),
)
"""Recipes of SimCLR in the published code."""
