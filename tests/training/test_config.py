"""Every rule that a config checks, replacing fields, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.errors import ConfigError
from vitrail.models.variants import ModelConfig, override_fields
from vitrail.recipes import RECIPES
from vitrail.settings import bare_names, raise_problems, setting
from vitrail.tasks import TASKS
from vitrail.tasks.classification import Classification
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.training.config import RunConfig, TrainConfig

PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"clip": math.nan}, "clip=nan is not a finite number"),
    ({"update_clip": 1.0}, "update_clip=1.0 is for optimizer='adafactor'; use clip, or leave it out"),
    ({"end_learning_rate": 0.1}, "end_learning_rate=0.1 is above learning_rate=0.001"),
    ({"end_learning_rate": 1e-5, "schedule": "rsqrt"}, "end_learning_rate=1e-05 is for the schedules cosine"),
    ({"schedule": "staircase", "stair_at": (0.5,), "stair_factors": (0.1, 0.2)}, "stair_factors=(0.1, 0.2) are 2"),
    ({"stair_at": (0.5,)}, "stair_at=(0.5,) and stair_factors=() are for the schedule staircase"),
    ({"spike_window": 1, "max_faults": 0}, "spike_window=1 is less than 2\nmax_faults=0 is less than 1"),
    ({"new_head": True}, "new_head=True is a new head for a model, so it needs a model to start from; give init=..."),
    ({"linear_head": True}, "linear_head=True is a new head for a model, so it needs a model"),
    ({"init": "m", "lora_alpha": 2.0}, "lora_alpha=2.0 needs lora_rank; give both"),
    ({"accumulation": 9, "batch_size": 8}, "accumulation=9 is more than batch_size=8"),
]


@pytest.mark.parametrize(("fields", "message"), PROBLEMS, ids=[message for _, message in PROBLEMS])
def test_a_value_out_of_range_is_named_with_its_rule(
    fields: dict[str, Any], message: str, types_unchecked: None
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig().override(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("task", ["simclr", "mae", "clip"])
@pytest.mark.parametrize("fields", [{"new_head": True}, {"linear_head": True}, {"head_bias": -1.0},
                                    {"head_normalises": True}])  # fmt: skip
def test_settings_of_a_head_are_refused_in_a_task_without_one(task: str, fields: dict[str, Any]) -> None:
    """Runs of earlier versions, in which such settings did nothing, can be read."""
    start = {"init": "m"} if "new_head" in fields or "linear_head" in fields else {}
    config = TrainConfig().override(task=task, crop_area=(0.2, 1.0), **fields, **start)
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}=.* head, but the task {task}"):
        raise_problems(config.new_problems())


EQUAL = {"crop_area": (1.0, 1.0), "flip": False}


@pytest.mark.parametrize("task", ["simclr", "moco"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 1}, "^batch_size=1: .* at least 2"),
        ({"early_batch_size": ("1:0.5",)}, "^early_batch_size=1: .* at least 2"),
        ({"init": "m", "train_blocks": 0}, "^train_blocks=0 .*has none"),
        ({**EQUAL, "channels": 1, "mean": (0.5,), "std": (0.5,), "grey": 0.5}, "equal"),
        ({**EQUAL, "colour_jitter": (0.4,) * 4, "colour_jitter_probability": 0.0}, "equal"),
    ],
)
def test_runs_in_which_views_teach_nothing_are_refused(task: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_problems(TrainConfig().override(task=task, **{"crop_area": (0.2, 1.0), **fields}).new_problems())


def test_the_limits_themselves_are_allowed() -> None:
    TrainConfig().override(
        batch_size=1, accumulation=1, steps=1, evaluations=0, checkpoints=1, threads=0, seed=2**32 - 1, clip=0.0,
        weight_decay=0.0, validation_share=0.0, warmup=0.0, beta1=0.0, beta2=0.0, momentum=0.0, label_smoothing=0.0,
        max_skipped=1.0, average=0.0, layer_decay=1.0, patience=1, init="m", train_blocks=0, dropout=0.1,
        stochastic_depth=0.1, patch_dropout=0.1,
    )  # fmt: skip
    TrainConfig().override(init="m", lora_rank=1, lora_alpha=0.5)
    TrainConfig().override(max_skipped=0.0, seed=0, accumulation=8, batch_size=8)


def test_override_replaces_the_fields_of_all_sections() -> None:
    before = TrainConfig()
    after = before.override(steps=7, width=64, heads=2, mean=(0.1, 0.2, 0.3), shift=3, clip=0.5, label_smoothing=0.2)
    assert (after.run.steps, after.model.overrides) == (7, {"width": 64, "heads": 2})
    assert (after.images.mean, after.augment.shift, after.optimizer.clip) == ((0.1, 0.2, 0.3), 3, 0.5)
    assert after.task == Classification(label_smoothing=0.2)
    restored = after.override(steps=None, width=None, heads=None, mean=(0.5,), shift=0, clip=1.0, label_smoothing=0.0)
    assert restored == before == TrainConfig(), "nothing else changed"


def test_new_epochs_replace_the_steps() -> None:
    assert TrainConfig().override(steps=7).override(epochs=2.0).total_steps(640) == 10
    assert TrainConfig().override(epochs=2.0, steps=7).total_steps(640) == 7, "as in a config with both"


def test_settings_that_are_given_together_are_judged_together() -> None:
    changed = RECIPES["demo"]().override(task="detection", erase=0.0)
    assert (changed.task.name, changed.augment.erase) == ("detection", 0.0)
    with pytest.raises(ConfigError, match=r"erase=0\.\d+ changes images"):
        RECIPES["demo"]().override(task="detection")


def test_another_variant_drops_sizes_and_overrides_that_it_has_no_field_for() -> None:
    model = ModelConfig(variant="ViT-S/16", overrides={"position_std": 0.3, "norm_eps": 1e-5, "width": 32})
    assert model.override(variant="BiT-R26x1").overrides == {"norm_eps": 1e-5}
    assert model.override(variant="BiT-R26x1", width=48).overrides == {"norm_eps": 1e-5, "width": 48}
    assert model.override(variant="ViT-B/16").overrides == {"position_std": 0.3, "norm_eps": 1e-5}
    assert model.override(variant="ViT-S/16", depth=2).overrides == {**model.overrides, "depth": 2}
    fields = {"heads": 2, "patch_size": (7, 4), "qkv_bias": False, "final_norm": "pooled"}
    config = model.override(**fields).resolve(num_classes=3, image_size=(14, 12), channels=1)
    assert {name: getattr(config, name) for name in fields} == fields
    assert (config.num_classes, config.image_size, config.channels) == (3, (14, 12), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 5.5), ("steps", "5"), ("seed", True), ("batch_size", 8.0), ("optimizer", None), ("mean", 0.5),
        ("learning_rate", "1e-3"), ("image_size", (16,)), ("width", 16.0), ("qkv_bias", "no"), ("device", 0),
    ],
)  # fmt: skip
def test_override_refuses_values_of_other_types(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value))} is not "):
        TrainConfig().override(variant="ViT-Pico/7", **{name: value})


def test_override_reads_lists_paths_and_numbers_of_numpy() -> None:
    given = {"image_size": [14, 21], "run": Path("runs/x"), "seed": np.int64(3), "width": np.int64(48)}
    config = TrainConfig().override(**given, learning_rate=np.float32(0.5), mean=[0.5])
    assert TrainConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config
    assert (config.images.image_size, config.run.folder, config.run.seed) == ((14, 21), "runs/x", 3)
    assert config.model.overrides["width"] == 48


def test_override_names_the_nearest_field() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field 'lerning_rate'; nearest: learning_rate"):
        TrainConfig().override(lerning_rate=1.0)
    with pytest.raises(ConfigError, match=r"^unknown field 'patch_width'; nearest: .*width"):
        TrainConfig().override(patch_width=1)


@pytest.mark.parametrize("task", TASKS)
def test_no_two_sections_have_a_field_of_the_same_bare_name(task: str) -> None:
    config = TrainConfig().override(task=task)
    sections = [getattr(config, item.name) for item in dataclasses.fields(config)]
    names = [name for one in sections if not isinstance(one, ModelConfig) for name in bare_names(type(one))]
    names += ["variant", *override_fields()]
    assert len(set(names)) == len(names) and set(names) == set(config.settings())


def test_a_task_whose_setting_has_the_name_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = dataclasses.make_dataclass(
        "Wide", [("width", int, 3)], bases=(Classification,), namespace={"name": "wide"}, frozen=True, kw_only=True
    )
    monkeypatch.setitem(TASKS, "wide", wide)
    with pytest.raises(ConfigError, match=r"^width is a setting of task and of model"):
        TrainConfig().override(task="wide", width=48)


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
    assert TrainConfig(run=RunConfig(**fields)).total_steps(images) == steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_json_and_back(recipe: str) -> None:
    own = RECIPES[recipe]()
    chosen = {"cut_uneven": True} if own.start.init else {"width": 96}
    config = own.override(mean=(0.25,), image_size=(56, 28), seed=7, threads=3, run="runs/x", **chosen)
    text = json.dumps(config.to_plain())
    back = TrainConfig.from_plain(json.loads(text))
    assert back == config
    assert isinstance(back.images.image_size, tuple) and isinstance(back.images.mean, tuple)
    assert chosen.items() <= back.model.overrides.items() and back.run.steps == own.run.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Colour(MaskedPatches):
    """A task with a setting of its own. docs/extending.md has one that is trained, which test_documents.py runs."""

    name = "colour"

    hidden: int = setting(4, least=1)


def test_settings_of_an_own_task_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "colour", Colour)
    config = TrainConfig().override(task="colour", hidden=5)
    assert config.task == Colour(hidden=5) and TrainConfig.from_plain(config.to_plain()) == config
    with pytest.raises(ConfigError, match=r"^hidden=0 is less than 1$"):
        config.override(hidden=0)
    with pytest.raises(ConfigError, match=r"^label_smoothing: the task of this run.* classification, distillation"):
        config.override(label_smoothing=0.1)
    assert config.override(task="classification").task == TASKS["classification"]()


@pytest.mark.parametrize("own", [{}, {"name": "theirs"}], ids=["name of the parent", "another name"])
def test_a_task_that_a_resumed_run_would_not_find_is_refused(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = type("Mine", (Classification,), own)
    monkeypatch.setitem(TASKS, "mine", mine)
    with pytest.raises(ConfigError, match=r"the task Mine is not TASKS\['.*'\].* give the class the name"):
        TrainConfig().override(task="mine")
    with pytest.raises(ConfigError, match="the task Mine is not "):
        TrainConfig(task=mine())


def test_a_task_that_is_in_no_table_can_be_trained() -> None:
    """It has a name of its own, under which no other task continues the run."""
    mine = type("Mine", (Classification,), {"name": "mine"})()
    assert TrainConfig(task=mine).override(steps=2).task is mine


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_recipes_of_papers_can_learn_boxes_and_masks(task: str) -> None:
    config = RECIPES["vit-b32-i21k"]().override(task=task)
    assert config.model.overrides["head_bias"] == -10
