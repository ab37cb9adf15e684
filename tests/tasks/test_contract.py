"""Tests of what all tasks have in common: the contract, gradients of parts of a batch, and values that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import small_network
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.variants import variant_config
from vitrail.tasks import TASKS
from vitrail.tasks.task import Task
from vitrail.testing import check_task

SPLITS = Splits(Pictures(9), Pictures(5), None)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("simclr", {}),
    ("simclr", {"projection_hidden": 24, "projection_width": 8}),
    ("moco", {}),
    ("moco", {"projection_hidden": 20, "projection_width": 12, "fixed_patches": False}),
    ("dino", {"prototypes": 24, "projection_hidden": 20, "bottleneck": 12, "local_size": (14, 14), "local_views": 2}),
    ("dino", {"prototypes": 24, "projection_hidden": 20, "local_views": 0, "unit_prototypes": False}),
    ("mae", {}),
    ("mae", {"normalise_pixels": False, "remove_fraction": 0.5, "decoder_width": 12}),
    *(("masked-patches", {"patch_target": target}) for target in ("mean-colour", "colours", "pixels")),
    *(("vqvae", {"codes": 24, "code_width": 5, "decoder_width": 8, "restart_below": rate}) for rate in (0.0, 0.3)),
]


def made(name: str, **settings: Any) -> Task:
    task: Any = TASKS[name]
    return task(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_tasks_without_labels_keep_the_contract(name: str, settings: dict[str, Any]) -> None:
    check_task(made(name, **settings), SPLITS)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("classification", {"select": "acuracy"}, "select='acuracy' is not a metric of the task classification; nea"),
        ("regression", {"select": "accuracy"}, "select='accuracy' is not a metric of the task regression; choices: r2"),
        ("regression", {"delta": 2.0}, "delta=2.0 needs loss='huber'"),
        ("distillation", {"teacher_weight": 1.0, "class_weights": "balanced"}, "class_weights='balanced' .*teacher_we"),
        ("clip", {"initial_bias": -2.0}, "initial_bias=-2.0.* clip"),
        ("masked-patches", {"mask_fraction": 0.8, "swap_fraction": 0.3}, "mask_fraction=0.8 and swap_fraction=0.3 add"),
        ("masked-patches", {"select": "token_accuracy"}, ".* needs tokens, but patch_target='mean-colour' predicts no"),
        ("masked-patches", {"patch_target": "pixels", "select": "colour_accuracy"}, ".* needs colours, but patch_targ"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        made(task, **settings)


@pytest.mark.parametrize(
    "task", [name for name in TASKS if name not in ("classification", "regression", "distillation")]
)
def test_networks_that_a_task_cannot_train_are_refused(task: str) -> None:
    with pytest.raises(ConfigError, match=r"a network of your own|needs a Vision Transformer of this package"):
        made(task).check_network(None)
    if task in ("simclr", "moco", "dino", "vqvae"):
        with pytest.raises(ConfigError, match=f"head_hidden=8 is a layer that task='{task}' does not train"):
            made(task).check_network(variant_config("ViT-Pico/7", image_size=28, num_classes=0, head_hidden=8))


BOTH_HEADS: dict[str, Any] = {"pool": "cls+dist", "registers": 1, "positions_cover": "all"}
UNFIT: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = [
    *(
        (task, {}, variant, fields, message.replace("NAME", task).replace("HIDDEN", hidden))
        for task, hidden in (("mae", "removed"), ("masked-patches", "corrupted"))
        for variant, fields, message in (
            ("BiT-R50x1", {}, "task='NAME' hides the embeddings of patches, which a ResNet does not have"),
            ("Conv+ViT-Pico/8", {}, "the tokens of a hybrid do, so that the neighbours of a HIDDEN patch"),
            ("R50+ViT-B/16", {}, "task='NAME' needs patches that do not overlap"),
            ("ViT-Pico/8", {"positions": "none"}, "needs positions, .* distinguishes HIDDEN patches, .*'learned'"),
            ("ViT-Pico/8", {"patch_dropout": 0.25}, "patch_dropout=0.25 removes patches that task='NAME'"),
            ("ViT-Pico/8", {"pool": "map"}, "pool='map' has weights that task='NAME' does not train"),
            ("ViT-Pico/8", {"projection": 9}, "projection=9 is a matrix that task='NAME' does not train"),
            ("ViT-Pico/8", {"head_hidden": 9}, "head_hidden=9 is a layer that task='NAME' does not train"),
        )
    ),
    ("mae", {}, "ViT-Pico/8", {"attention": "axial"}, "attention='axial' needs the whole grid of patches, but task"),
    ("mae", {"decoder_heads": 5}, "ViT-Pico/8", {}, "decoder_width=.* with decoder_heads=5 does not work, because"),
    ("mae", {"decoder_width": 6, "decoder_heads": 1}, "ViT-Pico/8", {}, "decoder_width=6 .* be divisible by 4"),
    ("vqvae", {}, "BiT-Pico", {}, "needs one encoded vector for each patch of pixels, which a ResNet does not have"),
    ("vqvae", {}, "Conv+ViT-Pico/8", {}, "which a hybrid does not have"),
    ("vqvae", {}, "ViT-Pico/8", {"patch_dropout": 0.5}, "patch_dropout=0.5 removes patches that task='vqvae'"),
    ("vqvae", {}, "ViT-Pico/8", {"pool": "map"}, "pool='map' has weights that task='vqvae' does not train"),
    ("vqvae", {"decoder_width": 10}, "ViT-Pico/8", {"heads": 4}, "decoder_width=10 with decoder_heads=4 does not wo"),
    ("distillation", {}, "ViT-Pico/8", {**BOTH_HEADS, "final_norm": "pooled"}, "final_norm='pooled' mixes the class"),
    ("distillation", {}, "ViT-Pico/8", {**BOTH_HEADS, "head_hidden": 8}, "head_hidden=8 mixes the class token with"),
    ("dino", {"patch_weight": 0.7}, "BiT-Pico", {}, "patch_weight=0.7 needs the class token"),
    ("dino", {"patch_weight": 0.7}, "ViT-Pico/8", {"pool": "gap"}, "patch_weight=0.7 needs the class token"),
    ("dino", {"patch_weight": 0.7}, "ViT-Pico/8", {"patch_dropout": 0.5}, "patch_weight=0.7 needs the class token"),
    ("dino", {"patch_weight": 0.7}, "ViT-Pico/8", {"projection": 8}, "patch_weight=0.7 needs the class token"),
    ("dino", {"local_size": (16, 13)}, "ViT-Pico/8", {}, r"local_size=\(16, 13\) does not fit the network: .*13.*"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "settings", "variant", "fields", "message"), UNFIT)
def test_networks_that_do_not_fit_are_refused(
    task: str, settings: dict[str, Any], variant: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(task, **settings).check_network(variant_config(variant, image_size=(32, 48), num_classes=0, **fields))


@pytest.mark.parametrize("task", ["simclr", "moco", "dino"])
def test_resnets_are_compared_too(task: str) -> None:
    small = {"prototypes": 24, "projection_hidden": 20} if task == "dino" else {}
    objective: Any = made(task, **small).objective(small_network("BiT-Pico"), SPLITS)
    batch = batch_of(images_of(6))
    objective(replace(batch, samples=batch.samples // 2, views=batch.samples % 2)).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in objective.parameters() if weight.requires_grad)


@pytest.mark.parametrize("task", ["simclr", "dino"])
def test_one_image_is_too_few_to_compare(task: str) -> None:
    with pytest.raises(ConfigError, match="the data has fewer than two training images"):
        made(task).check_data(Splits(Pictures(1), None, None))
