"""Recipes of Noisy Student: rounds of training on labelled images and on others, which the last network labels."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.experiments.noisy_student import Labelling, NoisyStudentConfig, Rounds
from vitrail.models.variants import ModelConfig
from vitrail.recipes.papers import DATA, IMAGENET_MEAN, IMAGENET_STD
from vitrail.recipes.small import demo, folder
from vitrail.tasks.classification import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig


def noisy_demo() -> NoisyStudentConfig:
    """Return two rounds on 500 labelled images of Fashion-MNIST and about 9,000 others, whose labels are not used.

    The network is that of the recipe `demo` of vitrail train. Its noise is dropout, stochastic depth, RandAugment,
    mirroring and random boxes. The first teacher and both students train for 1,000 steps each.

    Command: `vitrail noisy-student`.
    Hardware: two CPU cores; any GPU.
    Time and result were not measured.
    """
    student = demo().override(
        data="bundled[:500]", name="noisy-student", steps=1000, batch_size=64, randaugment_layers=2, erase=0.25,
        dropout=0.1, stochastic_depth=0.1, keep="best",
    )  # fmt: skip
    return NoisyStudentConfig(student=student, rounds=Rounds(rounds=2))


def noisy_folder() -> NoisyStudentConfig:
    """Return three rounds on images of 64 x 64 pixels, with the network of the recipe `folder` of vitrail train.

    Command: `vitrail noisy-student --data LABELLED --unlabelled IMAGES`.
    Hardware: two CPU cores; any GPU.
    Time and result depend on the images.
    """
    student = folder().override(randaugment_layers=2, dropout=0.1, stochastic_depth=0.1)
    return NoisyStudentConfig(student=student, rounds=Rounds(unlabelled="IMAGES"))


def noisy_vit_l16_i1k() -> NoisyStudentConfig:
    """Return the paper's rounds, with a Vision Transformer in place of EfficientNet-L2.

    These settings are those of the published code (google-research/noisystudent) for its largest networks:
    probabilities of at least 0.3, 130,000 images of each class, soft labels, 350 epochs of the labelled images,
    RandAugment with two operations of magnitude 27, a stochastic depth of 0.2, and a running mean of the weights with a
    decay of 0.9999. The paper has 300 million unlabelled
    images, and steps of 2,048 labelled images with 14 unlabelled ones for each. It has three rounds, the last of which
    has 28 for each; only these two numbers were not checked against its text. The recipe has 14 in every round.

    These are not published: the network, its optimizer, its weight decay and its learning rate, which are usual for
    Vision Transformers; dropout in all blocks instead of 0.5 before the head; no label smoothing, which the code has
    for labelled images (0.1); training at a single image size. The first teacher is the same network, trained on the
    labelled images. The loss is the mean over all images of a batch. That of the code is the mean of the labelled ones
    plus 14 times the mean of the others, which is 15 times as much; the scale has no effect on Adam, which normalises
    gradients. Every teacher chooses the images anew, but the authors' teachers label images that were chosen once.

    Command: `vitrail noisy-student vit-l16-i1k --data IMAGENET --unlabelled IMAGES`.
    Published result: 88.4 % on ImageNet with EfficientNet-L2 (1911.04252, Table 2). It was not repeated here.
    """
    labelled, images = 2048, 1_281_167
    student = TrainConfig(
        data=DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01),
        task=Classification(),
        model=ModelConfig(variant="ViT-L/16", overrides={"dropout": 0.1, "stochastic_depth": 0.2}),
        images=Preprocess(image_size=(224, 224), mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"),
        augment=Augment(flip=True, crop_area=(0.08, 1.0), randaugment_layers=2, randaugment_magnitude=27.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup="10000 steps", weight_decay=0.1, clip=1.0, average=0.9999),
        run=RunConfig(name="noisy-vit-l16-i1k", steps=350 * images // labelled, batch_size=15 * labelled),
    )
    rounds = Rounds(unlabelled=DATA["jft"], rounds=3, pseudo_ratio=14.0)
    return NoisyStudentConfig(student=student, rounds=rounds, labelling=Labelling(images_per_class=130_000))


NOISY_STUDENT_RECIPES: dict[str, Callable[[], NoisyStudentConfig]] = {
    "demo": noisy_demo,
    "folder": noisy_folder,
    "vit-l16-i1k": noisy_vit_l16_i1k,
}
"""Recipes of `vitrail noisy-student`, by name."""
