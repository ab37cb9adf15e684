"""Tokens of patches: recipes for small images, and the pre-training of BEiT with a tokenizer of its size."""

from __future__ import annotations

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.recipes.paper import DATA, IMAGENET_MEAN, IMAGENET_STD, PaperRecipe
from vitrail.tasks import MaskedPatches, VqVae
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["TOKEN_RECIPES", "beit", "beit_i1k", "vqvae", "vqvae_i1k"]


def vqvae() -> TrainConfig:
    """Return the config of a run that learns tokens of patches from the 10,000 bundled images of Fashion-MNIST.

    The network is a Vision Transformer of two blocks with patches of 4 x 4 pixels, and so is the decoder. There are 512
    codes of 16 numbers, and codes that are hardly used are restarted. The recipe `beit` predicts the tokens.

    Command: `vitrail train vqvae`, or `vitrail train --task vqvae`.
    Hardware: two CPU cores; any GPU.
    Time: 8 minutes on one core beside other programs, with `--threads 0` (AMD EPYC 9004, 2026-11).
    Result: a mean squared error of 0.040 of the normalised pixels of the 2,000 test images, a perplexity of 236, and
    all 512 codes used (seed 0, one run).
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
    0. The mean colour as the target (the recipe `masked-patches`) has 72.5 and 83.1 %.
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

    Some details differ from the published code. The tokenizer is one of this package (`beit-tokenizer-i1k`), because
    that of DALL-E does not exist here. The tokenizer sees the network's views at half their size, and not a second
    scaling of the image. If blocks have fewer than 75 patches, single patches follow. Weights start as in the other
    recipes. Relative positions have no bias for pairs with the class token, and neither they nor the mask embedding
    decay.
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
                "positions": "relative-bias",
                "positions_at": "shared",
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
            clip=3.0,
        ),
        run=RunConfig(epochs=800.0, batch_size=2048, keep="last"),
    )


TOKEN_RECIPES = (
    PaperRecipe("beit-tokenizer-i1k", vqvae_i1k, "not stated", "1711.00937, 2110.04627 and 2106.08254"),
    PaperRecipe(
        "vit-b16-i1k-beit",
        beit_i1k,
        "83.2 %",
        "2106.08254 and its code, README",
        "on ImageNet after fine-tuning at 224 pixels",
    ),
)
"""Recipes of BEiT in the paper and its code."""
