"""Recipes for the bundled images, for CIFAR-10, for fractals and for a folder of images, on one machine."""

from __future__ import annotations

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.models.variants import ModelConfig
from vitrail.tasks.classification import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig

# The recipe for CIFAR-10, from scratch.


def cifar10() -> TrainConfig:
    """Return the config of a run with a small hybrid on CIFAR-10, with 1,000 of the training images held out.

    The network has 1.6 million parameters: the three stages of BiT-Milli, and one block of a Vision Transformer, whose
    patches are the cells of the last feature map. In the time that two CPU cores need, it learns more than a Vision
    Transformer without convolutions, and more than `--variant BiT-Pico --epochs 38` (85.6 % of the test images).

    Command: `vitrail train cifar10`. `--data DIR` names a copy on the disk.
    Hardware: two CPU cores; any GPU.
    Time: 1,181, 1,365 and 1,193 seconds on two cores with AVX512-BF16 (AMD EPYC, Zen 5, 2026-11-28), the first two
    partly beside tests.
    Result: 88.28, 88.27 and 88.88 % of the test images (seeds 0 to 2) of a copy that is stored as JPEG files.
    docs/log.md explains the choice of the settings.
    """
    return TrainConfig(
        data=DataConfig(spec="hf:uoft-cs/cifar10", validation_share=0.02),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(
            variant="RMilli+ViT-Pico/8",
            overrides={"width": 192, "heads": 3, "mlp_width": 384, "depth": 1, "pool": "gap", "position_std": 0.02},
        ),
        images=Preprocess(image_size=(32, 32), channels=3, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262)),
        augment=Augment(flip=True, shift=4, erase=0.5),
        optimizer=OptimizerConfig(kind="muon", learning_rate=1e-2, weight_decay=0.1, beta2=0.95),
        run=RunConfig(name="cifar10", epochs=20.0, batch_size=128, threads="auto"),
    )


# The demo: a small network on bundled images, which trains in a few minutes.


def demo() -> TrainConfig:
    """Return the config of a run on the 10,000 bundled images of Fashion-MNIST.

    The network is a small hybrid of 653 thousand parameters: the three stages of BiT-Pico, and a Vision Transformer of
    three blocks, whose patches are the cells of the last feature map. The convolutions improve the accuracy on a few
    thousand small images. `--variant ViT-Pico/7 --image-size 28 28 --learning-rate 0.002` trains a network without
    convolutions.

    Command: `vitrail train`, or `make demo`.
    Hardware: two CPU cores; any GPU.
    Time: 120, 143 and 143 seconds on two cores with AVX512-BF16 (1,243 to 1,489 images/s; AMD EPYC 9004, 2026-11-27).
    Result: 91.00, 90.50 and 90.40 % of the 2,000 test images, 92.7, 92.1 and 92.8 % of the 531 validation images (seeds
    0 to 2).
    docs/log.md explains the choice of the settings.
    """
    return TrainConfig(
        data=DataConfig(spec="bundled", validation_share=0.05, cut_method="threshold"),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="RPico+ViT-Pico/8", overrides={"depth": 3, "position_std": 0.3}),
        images=Preprocess(image_size=(32, 32), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, erase=0.5),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="demo", epochs=18.0, batch_size=128, keep="last"),
    )


# The recipe for the whole of Fashion-MNIST.


def fashion_mnist() -> TrainConfig:
    """Return the config of a run with a small hybrid on all 60,000 training images of Fashion-MNIST.

    The network has 1.0 million parameters: the three stages of BiT-Micro, and one block of a Vision Transformer, whose
    patches are the cells of the last feature map. Vision Transformers without a ResNet need an `--image-size` that
    their patches divide. `--variant BiT-Pico --epochs 28` has 93.6, 94.3 and 94.1 % of the test images.

    Command: `vitrail train fashion-mnist`.
    Hardware: two CPU cores; any GPU.
    Time: 1,132 seconds on two cores of an AMD EPYC 9004 (seed 0, partly beside tests), and 1,158 and 1,160 seconds on
    one core of an AMD EPYC (Zen 5) each (AVX512-BF16, 2026-11).
    Result: 94.05, 94.21 and 94.04 % of the 10,000 test images (seeds 0 to 2).
    docs/log.md explains the choice of the network.
    """
    return TrainConfig(
        data=DataConfig(spec="fashion-mnist", validation_share=0.05),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(
            variant="RMicro+ViT-Pico/8",
            overrides={"width": 192, "heads": 3, "mlp_width": 384, "depth": 1, "pool": "gap"},
        ),
        images=Preprocess(image_size=(28, 28), channels=1, mean=(0.286,), std=(0.353,)),
        augment=Augment(flip=True, shift=2, erase=0.5),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="fashion-mnist", epochs=15.3, batch_size=128),
    )


# The recipe for training from scratch on any folder of images.


def folder() -> TrainConfig:
    """Return the config of a run with a small network on colour images of 64 x 64 pixels.

    `vitrail train --init MODEL --data DIR` also uses this recipe, with the network and the preprocessing of MODEL.
    Without --init, `vitrail train --data DIR` chooses settings from the data.

    Command: `vitrail train folder --data DIR`. DIR has a folder of images per class, or train/, val/ and test/ with
    such folders.
    Hardware: two CPU cores; any GPU.
    Time and result depend on the images. A network from scratch needs hundreds of images per class to be useful.
    """
    return TrainConfig(
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(variant="ViT-Nano/8", overrides={"position_std": 0.3}),
        images=Preprocess(image_size=(64, 64), channels=3, resize="crop"),
        augment=Augment(flip=True, shift=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(epochs=40.0, batch_size=64),
    )


# Supervised pre-training on pictures of fractals, which needs neither photographs nor labels of people.


def fractals() -> TrainConfig:
    """Return the config of a run in which a small Vision Transformer learns to distinguish 200 fractals (2101.08515).

    The network is that of the demo with a width of 128. It sees 200,000 computed pictures of 32 x 32 pixels in colour,
    each of them six times. `small`, the model in the package, was trained by this recipe. docs/train.md says what
    it is worth: with 500 images of CIFAR-10 about 10 points of accuracy more than from random weights.

    Command: `vitrail train fractals`.
    Hardware: two CPU cores; any GPU.
    Time: 57 minutes on one core beside two other programs on two cores, of which drawing the pictures took about 10;
    at the end, with a core of its own, 600 images/s (AMD EPYC 9004, 2026-11).
    Result: 99.05 % of the 2,000 validation images, which are other pictures of the same 200 fractals (seed 0, one run).
    """
    return TrainConfig(
        data=DataConfig(spec="fractals:200:1000:0:32:colour", validation_share=0.01),
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(
            variant="Conv+ViT-Pico/8",
            overrides={"width": 128, "heads": 4, "mlp_width": 512, "position_std": 0.3, "pool": "gap"},
        ),
        images=Preprocess(
            image_size=(32, 32), channels=3, resize="crop", mean=(0.508, 0.514, 0.492), std=(0.283, 0.295, 0.316)
        ),
        augment=Augment(flip=True, shift=4, erase=0.25),
        optimizer=OptimizerConfig(kind="muon", learning_rate=5e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(name="fractals", epochs=6.0, batch_size=128, threads="auto", keep="last"),
    )
