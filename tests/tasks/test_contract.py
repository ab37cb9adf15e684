"""Tests of what all tasks have in common: the contract, gradients of parts of a batch, and values that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.tasks.images import Pictures
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


OUT_OF_RANGE: dict[str, dict[str, tuple[Any, ...]]] = {
    "classification": {"label_smoothing": (1.0, -0.1, math.nan), "loss": ("hinge",)},
    "regression": {"loss": ("cube",)},
    "distillation": {"teacher_weight": (0.0, math.nan), "teacher_temperature": (0.0,)},
    "simclr": {"contrast_temperature": (0.0, math.nan), "projection_width": (1,), "projection_hidden": (0,)},
    "moco": {"contrast_temperature": (0.0,), "projection_width": (1,), "teacher_momentum": (1.0,)},
    "dino": {
        "student_temperature": (0.0,), "target_temperature": (math.nan,), "local_views": (-1,), "prototypes": (1,),
        "teacher_momentum": (1.0,), "local_crop_area": ((0.4, 0.1),),
    },
    "mae": {"remove_fraction": (0.0,), "decoder_width": (3,), "decoder_depth": (0,), "decoder_heads": (0,)},
    "masked-patches": {"corrupt_fraction": (0.0,), "mask_fraction": (1.2,), "swap_fraction": (-0.1,)},
    "vqvae": {
        "codes": (1,), "code_width": (0,), "commitment": (-0.1,), "code_decay": (1.0,), "restart_below": (1.0,),
        "decoder_depth": (0,),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        (task, name, value)
        for task, settings in OUT_OF_RANGE.items()
        for name, values in settings.items()
        for value in values
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_a_value_out_of_range_is_named_with_its_rule(task: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        made(task, **{name: value})
    assert str(caught.value).startswith((f"{name}={value!r} is not ", f"{name}={value!r} is less than "))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("classification", {"select": "acuracy"}, "select='acuracy' is not a metric of the task classification; nea"),
        ("regression", {"select": "accuracy"}, "select='accuracy' is not a metric of the task regression; choices: r2"),
        ("regression", {"loss": "huber", "delta": 0.0}, "delta=0.0 is not above 0"),
        ("regression", {"delta": 2.0}, "delta=2.0 needs loss='huber'"),
        ("distillation", {"loss": "sigmoid"}, "loss='sigmoid' cannot be distilled"),
        ("distillation", {"teacher_weight": 1.0, "class_weights": "balanced"}, "class_weights='balanced' .*teacher_we"),
        ("clip", {"initial_bias": -2.0}, "initial_bias=-2.0.* clip"),
        *(
            (task, {"select": "accuracy"}, f"select='accuracy' is not a metric of the task {task}")
            for task in ("simclr", "dino", "vqvae")
        ),
        ("masked-patches", {"mask_fraction": 0.8, "swap_fraction": 0.3}, "mask_fraction=0.8 and swap_fraction=0.3 add"),
        ("masked-patches", {"select": "token_accuracy"}, ".* needs tokens, but patch_target='mean-colour' predicts no"),
        ("masked-patches", {"patch_target": "pixels", "select": "colour_accuracy"}, ".* needs colours, but patch_targ"),
        ("masked-patches", {"patch_target": "tokens"}, "tokenizer: patch_target='tokens' needs a trained tokenizer; n"),
        ("masked-patches", {"tokenizer": "runs/x"}, "tokenizer='runs/x' is not used with patch_target='mean-colour'"),
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


@pytest.mark.parametrize("task", ["simclr", "dino"])
def test_one_image_is_too_few_to_compare(task: str) -> None:
    with pytest.raises(ConfigError, match="the data has fewer than two training images"):
        made(task).check_data(Splits(Pictures(1), None, None))
