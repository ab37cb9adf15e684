"""Recipes that use pre-trained models, fine-tuning, linear protocols, YOLOS and EoMT, and the recipes of DeiT, which
share their augmentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.models.variants import ModelConfig
from vitrail.recipes import PaperRecipe
from vitrail.recipes.papers import DATA, HELD_OUT, IMAGENET_MEAN, IMAGENET_STD
from vitrail.recipes.self_supervised import DECAYED
from vitrail.tasks.classification import Classification
from vitrail.tasks.detection import Detection
from vitrail.tasks.distillation import Distillation
from vitrail.tasks.segmentation import Segmentation
from vitrail.tasks.task import Task
from vitrail.training.config import RunConfig, StartConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig

VALIDATION = "on ImageNet's validation split"

IMAGENET = DataConfig(spec=DATA["i1k"], validation="train", validation_share=0.01)

IMAGES = Preprocess(
    image_size=(224, 224), resize="crop", crop_share=0.875, mean=IMAGENET_MEAN, std=IMAGENET_STD,
    interpolation="bicubic",
)  # fmt: skip

TIMM = Augment(
    flip=True, crop_area=(0.08, 1.0), randaugment_layers=2, randaugment_magnitude=9.0, erase=0.25,
    erase_by="noise", mixup=0.8, mixup_per="timm-batch", cutmix=1.0,
)  # fmt: skip
"""The augmentation of DeiT in timm: rand-m9-mstd0.5-inc1, erasing, mixup and CutMix."""

OF_TIMM = (
    HELD_OUT,
    "RandAugment has the operations of this package, and its magnitude 9 has no noise of 0.5.",
)
"""Differences of all recipes with timm's augmentation."""

ZERO_HEAD = "The head starts at 0 instead of random numbers of a small standard deviation ({})."


def fine_tuned(
    model: str, epochs: float, rate: float, layer_decay: float, drop_path: float, *, warmup: int = 5, **more: Any
) -> TrainConfig:
    """Return the config of a fine-tuning run of MAE or BEiT: AdamW with a learning rate that decays from layer to
    layer, and the augmentation of DeiT.

    `model` is the run of the pre-training recipe, which `--init` replaces, and `rate` is for 256 images. The mean of
    the patches is pooled, and then normalised.
    """
    optimizer = OptimizerConfig(
        learning_rate=rate, base_batch_size=256, schedule="cosine", end_learning_rate=1e-6, warmup=f"{warmup} epochs",
        warmup_from_zero=True, weight_decay=0.05, clip=0.0, layer_decay=layer_decay, **more,
    )  # fmt: skip
    return TrainConfig(
        data=IMAGENET,
        task=Classification(label_smoothing=0.1),
        model=ModelConfig(overrides={"stochastic_depth": drop_path, "pool": "gap", "final_norm": "pooled"}),
        start=StartConfig(init=f"runs/{model}", new_head=True),
        images=IMAGES,
        augment=TIMM,
        optimizer=optimizer,
        run=RunConfig(epochs=epochs, batch_size=1024, keep="last"),
    )


FINE_TUNING_RECIPES = (
    *(
        PaperRecipe(
            f"{model}-tuned",
            partial(
                fine_tuned, model, epochs, rate, layer_decay, drop_path,
                weight_decay_factors=(DECAYED + r"|prefix\.cls=1",),
            ),
            result,
            "2111.06377, table 3, and its code, FINETUNE.md",
            (*OF_TIMM, ZERO_HEAD.format("2e-5"), "The norm after pooling starts as the norm of the pre-trained model."),
            VALIDATION,
        )
        for model, epochs, rate, layer_decay, drop_path, result in (
            ("vit-b16-i1k-mae", 100.0, 5e-4, 0.65, 0.1, "83.6 %"),
            ("vit-l16-i1k-mae", 50.0, 1e-3, 0.75, 0.2, "85.9 %"),
            ("vit-h14-i1k-mae", 50.0, 1e-3, 0.75, 0.3, "86.9 %"),
        )
    ),
    PaperRecipe(
        "vit-b16-i1k-beit-tuned",
        partial(
            fine_tuned, "vit-b16-i1k-beit", 100.0, 1e-3, 0.65, 0.1, warmup=20,
            learning_rate_factors=(rf"positions\..*={0.65**-13}",),
            weight_decay_factors=(DECAYED + r"|positions\..*=1",),
        ),
        "83.2 %",
        "2106.08254 and its code, get_started_for_image_classification.md",
        (
            *OF_TIMM,
            ZERO_HEAD.format("2e-5"),
            "The norm after pooling starts as the norm of the pre-trained model.",
            "All blocks share one table of relative positions, which has the full learning rate. In the published code "
            "each block gets a copy of it, which has the rate of the block.",
        ),
        VALIDATION,
    ),
)  # fmt: skip
"""Fine-tuning of the models of the recipes of MAE and BEiT."""


def linear(model: str, epochs: float, batch_size: int, optimizer: OptimizerConfig, pool: str = "cls") -> TrainConfig:
    """Return the config of a linear protocol, in which only a linear head of frozen features is trained. Images are
    cropped to 8 to 100 % of their area and mirrored."""
    return TrainConfig(
        data=IMAGENET,
        task=Classification(),
        model=ModelConfig(overrides={"pool": pool, "stochastic_depth": 0.0}),
        start=StartConfig(init=f"runs/{model}", new_head=True, train_blocks=0),
        images=IMAGES,
        augment=Augment(flip=True, crop_area=(0.08, 1.0)),
        optimizer=optimizer,
        run=RunConfig(epochs=epochs, batch_size=batch_size, keep="last"),
    )


def _linear_optimizer(kind: Any, rate: float, warmup: int = 0) -> OptimizerConfig:
    return OptimizerConfig(
        kind=kind, momentum=0.9, learning_rate=rate, base_batch_size=256, schedule="cosine",
        warmup=f"{warmup} epochs", warmup_from_zero=warmup > 0, weight_decay=0.0, clip=0.0,
    )  # fmt: skip


LINEAR_RECIPES = tuple(
    PaperRecipe(
        f"{model}-linear",
        partial(linear, model, epochs, batch_size, optimizer),
        result,
        source,
        (HELD_OUT, ZERO_HEAD.format("0.01"), *differences),
        VALIDATION,
    )
    for model, epochs, batch_size, optimizer, result, source, differences in (
        *(
            (
                model, epochs, 16_384, _linear_optimizer("lars", 0.1, 10), result,
                "2111.06377 and its code, FINETUNE.md", ("No batch norm without weights stands before the head.",),
            )
            for model, epochs, result in (
                ("vit-b16-i1k-mae", 90.0, "67.8 %"),
                ("vit-l16-i1k-mae", 50.0, "76.0 %"),
                ("vit-h14-i1k-mae", 50.0, "77.2 %"),
            )
        ),
        *(
            (
                model, 90.0, 1024, _linear_optimizer("sgd", 3.0), result, "2104.02057 and its code, CONFIG.md",
                ("The learning rate falls with every step instead of every epoch.",),
            )
            for model, result in (("vit-s16-i1k-moco", "73.2 %"), ("vit-b16-i1k-moco", "76.7 %"))
        ),
        *(
            (
                model, 100.0, 1024, _linear_optimizer("sgd", 1e-3), result, "2104.14294 and its code, README",
                (
                    "The head reads the class token of the last block instead of the last four.",
                    "The learning rate falls with every step instead of every epoch, and one rate is trained instead "
                    "of the best of several.",
                ),
            )
            for model, result in (("vit-s16-i1k-dino-100", "74.0 %"), ("vit-s16-i1k-dino-300", "76.0 %"))
        ),
    )
)  # fmt: skip
"""Linear protocols of MAE, MoCo v3 and DINO for the models of their recipes."""


def deit(variant: str, *, distilled: bool) -> TrainConfig:
    """Return the config of a run of DeiT on ImageNet (2012.12877): AdamW with a learning rate of 5e-4 per 512 images,
    for 300 epochs. With `distilled`, a distillation token learns the most likely class of a teacher, which `--teacher`
    names."""
    overrides: dict[str, Any] = {"stochastic_depth": 0.1, "initial_weights": "timm"}
    if distilled:
        overrides |= {"pool": "cls+dist", "registers": 1, "positions_cover": "all"}
    return TrainConfig(
        data=IMAGENET,
        task=Distillation(label_smoothing=0.1, teacher="runs/teacher") if distilled
        else Classification(label_smoothing=0.1),
        model=ModelConfig(variant=variant, overrides=overrides),
        images=IMAGES,
        augment=TIMM,
        optimizer=OptimizerConfig(
            learning_rate=5e-4, base_batch_size=512, schedule="cosine", end_learning_rate=1e-5, warmup="5 epochs",
            weight_decay=0.05, clip=0.0,
        ),
        run=RunConfig(epochs=300.0, batch_size=1024, keep="last"),
    )  # fmt: skip


def deit3(variant: str, side: int, rate: float, drop_path: float) -> TrainConfig:
    """Return the config of a run of DeiT III on ImageNet (2204.07118): LAMB for 800 epochs, a sigmoid loss, LayerScale,
    and colours that change by up to 30 %."""
    return TrainConfig(
        data=IMAGENET,
        task=Classification(loss="sigmoid"),
        model=ModelConfig(
            variant=variant,
            overrides={
                "stochastic_depth": drop_path, "layer_scale": 1e-4, "positions_cover": "patches",
                "initial_weights": "timm",
            },
        ),
        images=Preprocess(
            image_size=(side, side), resize="crop", mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"
        ),
        augment=Augment(
            flip=True, crop_area=(0.08, 1.0), colour_jitter=(0.3, 0.3, 0.3, 0.0),
            grey=1 / 3, blur=(1 / 3,), solarise=(1 / 3,), mixup=0.8, mixup_per="timm-batch",
            cutmix=1.0,
        ),
        optimizer=OptimizerConfig(
            kind="lamb", learning_rate=rate, schedule="cosine", end_learning_rate=1e-5, warmup="5 epochs",
            weight_decay=0.05, clip=1.0,
        ),
        run=RunConfig(epochs=800.0, batch_size=2048, keep="last"),
    )  # fmt: skip


REPEATED = "Images are not repeated: the published code has three augmented copies of each image in a batch."
WARMUP = "The warm-up begins at 1 / n of the learning rate for n steps instead of 1e-6, and rises with every step."

DEIT_RECIPES = (
    *(
        PaperRecipe(
            f"deit-{size}16-i1k" + ("-distilled" if distilled else ""),
            partial(deit, f"ViT-{size.title()}/16", distilled=distilled),
            result,
            "2012.12877 and its code, README_deit.md",
            (
                *OF_TIMM,
                REPEATED,
                WARMUP,
                *(("The teacher is a model of yours, and not the RegNetY-16GF of the paper.",) if distilled else ()),
            ),
            VALIDATION,
        )
        for size, distilled, result in (
            ("ti", False, "72.2 %"),
            ("s", False, "79.9 %"),
            ("b", False, "81.8 %"),
            ("ti", True, "74.5 %"),
            ("s", True, "81.2 %"),
            ("b", True, "83.4 %"),
        )
    ),
    *(
        PaperRecipe(
            f"deit3-{size}16-i1k",
            partial(deit3, f"ViT-{size.title()}/16", side, rate, drop_path),
            result,
            "2204.07118 and its code, README_revenge.md",
            (
                HELD_OUT,
                "An image turns grey, is solarised and is blurred with probability 1/3 each. The published code does "
                "one of the three to each image, before its colours change.",
                "The targets of a mixed image are fractions instead of 1 for both classes.",
                "Stochastic depth grows from block to block instead of having one rate.",
                REPEATED,
                WARMUP,
                *differences,
            ),
            VALIDATION,
        )
        for size, side, rate, drop_path, result, differences in (
            ("s", 224, 4e-3, 0.05, "81.4 %", ()),
            (
                "b", 192, 3e-3, 0.2, "83.8 %",
                ("The published result has 20 more epochs at 224 pixels, which this recipe leaves out.",),
            ),
        )
    ),
)  # fmt: skip
"""Recipes of DeiT and DeiT III."""


def yolos(model: str, epochs: float, batch_size: int, image_size: tuple[int, int], every_layer: bool) -> TrainConfig:
    """Return the config of a run of YOLOS on COCO (2106.00666): DeiT with 100 detection tokens, AdamW with a learning
    rate of 2.5e-5 per 8 images and a weight decay of 1e-4. With `every_layer`, every block has positions of its own.

    `model` is the run of the pre-training recipe, which `--init` replaces.
    """
    places = {"positions_at": "every-layer"} if every_layer else {}
    return TrainConfig(
        data=DataConfig(spec=DATA["coco"], validation="train", validation_share=0.01),
        task=Detection(),
        model=ModelConfig(
            overrides={"head_kind": "detection-tokens", "registers": 100, "stochastic_depth": 0.0, **places}
        ),
        start=StartConfig(init=f"runs/{model}"),
        images=Preprocess(
            image_size=image_size, resize="pad", pad_value=(124, 116, 104), mean=IMAGENET_MEAN, std=IMAGENET_STD
        ),
        augment=Augment(flip=True, scale_jitter=(0.5, 1.5)),
        optimizer=OptimizerConfig(
            learning_rate=2.5e-5, base_batch_size=8, schedule="cosine", end_learning_rate=1e-7, warmup="0 steps",
            weight_decay=1e-4, weight_decay_factors=(r"head\..*|" + DECAYED + "=1",), clip=0.1,
        ),
        run=RunConfig(epochs=epochs, batch_size=batch_size, keep="last"),
    )  # fmt: skip


YOLOS_RECIPES = tuple(
    PaperRecipe(
        f"yolos-{size}16-coco",
        partial(yolos, f"deit-{size}16-i1k", epochs, batch_size, image_size, every_layer),
        result,
        "2106.00666, table 1, and its code, README",
        (
            HELD_OUT,
            "Images are scaled by 0.5 to 1.5 times the size at which they fit, and cut or padded to one size. The "
            f"published code scales the short side to {sides} pixels with a random crop of 384 to 600 pixels before in "
            "half of the images, and pads only to the largest image of a batch.",
            "Upright images are scaled down to the height of the network's input, which is that of landscape images.",
            "The learning rate falls with every step instead of every epoch.",
            "The loss of the classes is divided by the weights of all tokens of a batch instead of those of one GPU.",
            *differences,
        ),
        "on COCO's validation split, average precision of boxes",
    )
    for size, epochs, batch_size, image_size, every_layer, sides, result, differences in (
        (
            "ti", 300.0, 16, (512, 864), False, "256 to 608", "28.7 %",
            ("The positions have the size of the images instead of 800 x 1333 pixels.",),
        ),
        (
            "s", 150.0, 8, (800, 1344), True, "480 to 800", "36.1 %",
            (
                "The positions have the size of the images instead of 512 x 864 pixels.",
                "The model has 300 epochs of pre-training instead of 200.",
            ),
        ),
        (
            "b", 150.0, 8, (800, 1344), True, "480 to 800", "42.0 %",
            ("The model is DeiT-B instead of the DeiT-B with a teacher that was tuned at 384 pixels.",),
        ),
    )
)  # fmt: skip
"""Recipes of YOLOS, which start from the models of the recipes of DeiT."""


def eomt(size: str, *, of_objects: bool) -> TrainConfig:
    """Return the config of a run of EoMT (2503.19108) on the objects of COCO, or on the masks of ADE20K: DINOv2 with
    queries before the last three blocks, and AdamW with a learning rate of 1e-4, which begins later below the head."""
    task: Task = Segmentation()
    data, side, queries = "ade20k", 518, 100
    augment = Augment(flip=True, scale_jitter=(0.5, 2.0), colour_jitter=(0.125, 0.5, 0.5, 0.05))
    if of_objects:
        task, data, side, queries = Detection(), "coco", 644, 200
        augment = Augment(flip=True, scale_jitter=(0.1, 2.0))
    return TrainConfig(
        data=DataConfig(spec=DATA[data], validation="train", validation_share=0.01),
        task=task,
        model=ModelConfig(
            overrides={"head_kind": "queries", "queries": queries, "query_blocks": 3, "stochastic_depth": 0.0}
        ),
        start=StartConfig(init=f"facebook/dinov2-with-registers-{size}"),
        images=Preprocess(
            image_size=(side, side), resize="pad", pad_value=(0,), mean=IMAGENET_MEAN, std=IMAGENET_STD
        ),
        augment=augment,
        optimizer=OptimizerConfig(
            learning_rate=1e-4, schedule="polynomial", power=0.9, warmup="500 steps", warmup_from_zero=True,
            backbone_wait="500 steps", backbone_warmup="1000 steps", weight_decay=0.05, weight_decay_factors=(".*=1",),
            layer_decay=0.8, learning_rate_factors=(r"blocks\..*=1.25", r"(patches|prefix|positions)\..*=1.5625"),
            clip=0.01,
        ),
        run=RunConfig(epochs=24.0 if of_objects else 31.0, batch_size=16, keep="last"),
    )  # fmt: skip


OF_EOMT = (
    HELD_OUT,
    "Patches have 14 pixels, as in the pre-trained model, and not 16, to which the published code resizes them. Images "
    "have 644 instead of 640 pixels (COCO), or 518 instead of 512 (ADE20K), which are multiples of 14.",
    "Padding is black, as in the published code, and can be on all sides instead of below and on the right.",
)
"""Differences of all recipes of EoMT."""

EOMT_RECIPES = tuple(
    PaperRecipe(
        f"eomt-{size[0]}14-{data}",
        partial(eomt, size, of_objects=of_objects),
        f"no published result ({note})",
        "2503.19108 and its code, configs/dinov2",
        (*OF_EOMT, *differences),
        measured,
    )
    for data, of_objects, measured, differences in (
        (
            "coco", True, "on COCO's validation split",
            (
                "The settings are those of the published panoptic model of this size (24 epochs). Their use for the "
                "masks of objects is ours: for these, only models of the sizes L and larger are published.",
                "Objects of which less than a quarter is seen after a crop are not learned. In the published code they "
                "are, and a crop without any object is drawn again.",
            ),
        ),
        (
            "ade20k", False, "on ADE20K's validation split",
            (
                "The settings of the network are those of the published panoptic model of this size, and the others "
                "those of the published semantic model of the size L. Their use together is ours.",
                "All colours of an image change together. In the published code each change has a probability of 0.5.",
                "Whole images are predicted, padded to a square, and not parts of their shorter side.",
            ),
        ),
    )
    for size, note in (
        ("small", "panoptic quality of S on COCO: 46.7 %; 58.4 % mIoU of L on ADE20K"),
        ("base", "panoptic quality of B on COCO: 51.6 %; 58.4 % mIoU of L on ADE20K"),
    )
)  # fmt: skip
"""Recipes of EoMT for objects and for classes of pixels."""
