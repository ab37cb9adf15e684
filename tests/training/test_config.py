"""Every rule that a config checks, replacing fields, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.resnet import ResNetConfig
from vitrail.plain import from_plain, to_plain
from vitrail.recipes import RECIPES
from vitrail.training.config import FLAT, PARTS, ModelConfig, OptimizerConfig, StartConfig, TrainConfig

PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size=0 is less than 1\naccumulation=1 is more than batch_size=0"),
    ({"accumulation": 0}, "accumulation=0 is less than 1"),
    ({"steps": 0}, "steps=0 is less than 1"),
    ({"evaluations": -1}, "evaluations=-1 is less than 0"),
    ({"checkpoints": 0}, "checkpoints=0 is less than 1"),
    ({"threads": -1}, "threads=-1 is less than 0"),
    ({"seed": -1}, "seed=-1 is less than 0"),
    ({"clip": -0.5}, "clip=-0.5 is less than 0"),
    ({"clip": math.nan}, "clip=nan is less than 0"),
    ({"weight_decay": -0.5}, "weight_decay=-0.5 is less than 0"),
    ({"epochs": 0.0}, "epochs=0.0 is not above 0"),
    ({"epochs": math.inf}, "epochs=inf is not above 0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 is not above 0"),
    ({"learning_rate": math.nan}, "learning_rate=nan is not above 0"),
    ({"learning_rate": -1e-3}, "learning_rate=-0.001 is not above 0"),
    ({"validation_share": 1.0}, "validation_share=1.0 is not in [0, 1)"),
    ({"warmup": 1.0}, "warmup=1.0 is not in [0, 1)"),
    ({"beta1": 1.0}, "beta1=1.0 is not in [0, 1)"),
    ({"beta2": -0.1}, "beta2=-0.1 is not in [0, 1)"),
    ({"momentum": 1.5}, "momentum=1.5 is not in [0, 1)"),
    ({"label_smoothing": math.nan}, "label_smoothing=nan is not in [0, 1)"),
    ({"average": 1.0}, "average=1.0 is not in [0, 1)"),
    ({"layer_decay": 0.0}, "layer_decay=0.0 is not in (0, 1]"),
    ({"layer_decay": math.nan}, "layer_decay=nan is not in (0, 1]"),
    ({"patience": 0}, "patience=0 is less than 1"),
    ({"init": "m", "train_blocks": -1}, "train_blocks=-1 is less than 0"),
    ({"init": "m", "lora_rank": 0}, "lora_rank=0 is less than 1"),
    ({"init": "m", "lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha=0.0 is not above 0"),
    ({"init": "m", "lora_alpha": 2.0}, "lora_alpha=2.0 needs lora_rank"),
    ({"init": "m", "lora_on": ("up",)}, "lora_on=('up',) needs lora_rank"),
    ({"init": "m", "lora_rank": 2, "train_blocks": 1}, "train_blocks=1 and lora_rank=2 exclude each other"),
    ({"train_blocks": 0}, "train_blocks=0 keeps weights as they are: it needs init, a model to start from"),
    ({"lora_rank": 4}, "lora_rank=4 keeps weights as they are: it needs init, a model to start from"),
    (
        {"init": "m", "variant": "ViT-S/16"},
        "variant='ViT-S/16' cannot be given with init='m': the architecture is the "
        "model's; only dropout, stochastic_depth, patch_dropout can",
    ),
    (
        {"init": "m", "depth": 3, "dropout": 0.1},
        "depth=3 cannot be given with init='m': the architecture is the "
        "model's; only dropout, stochastic_depth, patch_dropout can",
    ),
    ({"seed": 2**32}, "seed=4294967296 is not below 2**32"),
    ({"max_skipped": 1.1}, "max_skipped=1.1 is not in [0, 1]"),
    ({"max_skipped": -0.1}, "max_skipped=-0.1 is not in [0, 1]"),
    ({"accumulation": 9, "batch_size": 8}, "accumulation=9 is more than batch_size=8"),
    ({"optimizer": "adam"}, "optimizer='adam' is not one of 'adamw', 'sgd'"),
    ({"schedule": "step"}, "schedule='step' is not one of 'cosine', 'linear', 'constant'"),
    ({"precision": "fp16"}, "precision='fp16' is not one of 'auto', 'float8', 'bf16', 'float32'"),
    ({"compile": "yes"}, "compile='yes' is not one of 'auto', 'on', 'off', 'graphs'"),
    ({"keep": "all"}, "keep='all' is not one of 'best', 'last'"),
    ({"loss": "hinge"}, "loss='hinge' is not one of 'softmax', 'sigmoid'"),
    ({"class_weights": "equal"}, "class_weights='equal' is not one of 'none', 'balanced'"),
]


@pytest.mark.parametrize(("fields", "message"), PROBLEMS, ids=[message for _, message in PROBLEMS])
def test_a_value_out_of_range_is_named_with_its_rule(
    fields: dict[str, Any], message: str, types_unchecked: None
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig().override(**fields)
    assert str(caught.value) == message


def test_the_limits_themselves_are_allowed() -> None:
    TrainConfig().override(
        batch_size=1, accumulation=1, steps=1, evaluations=0, checkpoints=1, threads=0, seed=2**32 - 1, clip=0.0,
        weight_decay=0.0, validation_share=0.0, warmup=0.0, beta1=0.0, beta2=0.0, momentum=0.0, label_smoothing=0.0,
        max_skipped=1.0, average=0.0, layer_decay=1.0, patience=1, init="m", train_blocks=0, dropout=0.1,
        stochastic_depth=0.1, patch_dropout=0.1,
    )  # fmt: skip
    TrainConfig().override(init="m", lora_rank=1, lora_alpha=0.5)
    TrainConfig().override(max_skipped=0.0, seed=0, accumulation=8, batch_size=8)


def test_several_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig().override(batch_size=0, learning_rate=-1.0, warmup=2.0)
    lines = str(caught.value).splitlines()
    assert "batch_size=0 is less than 1" in lines
    assert "learning_rate=-1.0 is not above 0" in lines
    assert "warmup=2.0 is not in [0, 1)" in lines


def test_override_replaces_own_fields_and_those_of_parts() -> None:
    before = TrainConfig()
    after = before.override(steps=7, width=64, heads=2, mean=(0.1, 0.2, 0.3), shift=3, clip=0.5)
    assert (after.steps, after.model.width, after.model.heads) == (7, 64, 2)
    assert (after.images.mean, after.augment.shift, after.optimization.clip) == ((0.1, 0.2, 0.3), 3, 0.5)
    restored = after.override(steps=None, width=None, heads=None, mean=(0.5,), shift=0, clip=1.0)
    assert restored == before == TrainConfig(), "nothing else changed"


def test_override_takes_no_whole_part() -> None:
    names = {item.name for item in dataclasses.fields(TrainConfig)}
    assert set(PARTS) <= names
    with pytest.raises(ConfigError, match="unknown field 'model'"):
        TrainConfig().override(model=ModelConfig(width=8))


def test_override_names_the_nearest_field() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field 'lerning_rate'; nearest: learning_rate"):
        TrainConfig().override(lerning_rate=1.0)
    with pytest.raises(ConfigError, match=r"^unknown field 'patch_width'; nearest: .*width"):
        TrainConfig().override(patch_width=1)


def test_override_checks_the_result() -> None:
    with pytest.raises(ConfigError, match="steps=-1 is less than 1"):
        TrainConfig().override(steps=-1)
    with pytest.raises(ConfigError, match="shift=-1 is negative"):
        TrainConfig().override(shift=-1)


def test_no_two_parts_have_a_field_of_the_same_name() -> None:
    own = [item.name for item in dataclasses.fields(TrainConfig) if item.name not in PARTS]
    parts = [item.name for cls in PARTS.values() for item in dataclasses.fields(cls)]
    assert len(set(own + parts)) == len(own + parts) == len(FLAT)
    assert set(FLAT) == set(own + parts)
    assert {item.name: item.type for item in dataclasses.fields(TrainConfig) if item.name in PARTS} == {
        "start": "StartConfig", "model": "ModelConfig", "images": "Preprocess", "augment": "Augment",
        "optimization": "OptimizerConfig",
    }  # fmt: skip
    assert {
        "start": StartConfig, "model": ModelConfig, "images": Preprocess, "augment": Augment,
        "optimization": OptimizerConfig,
    } == PARTS  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "images", "steps"),
    [
        ({"epochs": 1.0, "batch_size": 10}, 100, 10),
        ({"epochs": 1.0, "batch_size": 10}, 101, 11),
        ({"epochs": 2.5, "batch_size": 10}, 100, 25),
        ({"epochs": 0.01, "batch_size": 10}, 5, 1),
        ({"epochs": 3.0, "batch_size": 10, "steps": 4}, 100, 4),
    ],
)
def test_total_steps(fields: dict[str, Any], images: int, steps: int) -> None:
    assert TrainConfig(**fields).total_steps(images) == steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_json_and_back(recipe: str) -> None:
    config = RECIPES[recipe]().override(width=96, mean=(0.25,), image_size=(56, 28), seed=7, threads=3, run="runs/x")
    text = json.dumps(to_plain(config))
    back = from_plain(TrainConfig, json.loads(text))
    assert back == config
    assert isinstance(back.images.image_size, tuple) and isinstance(back.images.mean, tuple)
    assert back.model.depth is None and back.steps is None


def test_json_with_an_unknown_field_or_a_wrong_type_is_refused() -> None:
    plain = json.loads(json.dumps(to_plain(TrainConfig())))
    with pytest.raises(ConfigError, match=r"unknown field 'stepz'.*; nearest: steps"):
        from_plain(TrainConfig, {**plain, "stepz": 3})
    with pytest.raises(ConfigError, match="batch_size"):
        from_plain(TrainConfig, {**plain, "batch_size": "many"})
    with pytest.raises(ConfigError, match="learning_rate"):
        from_plain(TrainConfig, {**plain, "optimization": {**plain["optimization"], "learning_rate": "fast"}})
    with pytest.raises(ConfigError, match="object of named fields"):
        from_plain(TrainConfig, None)


def test_a_whole_number_where_json_lost_the_point() -> None:
    assert from_plain(TrainConfig, {"epochs": 3}).epochs == 3.0
    assert isinstance(from_plain(TrainConfig, {"epochs": 3}).epochs, float)


def test_the_demo_takes_a_resnet() -> None:
    """It sets how positions begin, which a ResNet does not have."""
    config = RECIPES["demo"]().override(variant="BiT-R26x1", width=32).model
    resolved = config.resolve(num_classes=3, image_size=(40, 56), channels=1)
    assert isinstance(resolved, ResNetConfig) and resolved.width == 32 and resolved.depths == (2, 2, 2, 2)
    with pytest.raises(ConfigError, match="unknown field 'qk_norm' of BiT-R26x1"):
        RECIPES["demo"]().override(variant="BiT-R26x1", qk_norm=True).model.resolve(
            num_classes=3, image_size=(40, 56), channels=1
        )
