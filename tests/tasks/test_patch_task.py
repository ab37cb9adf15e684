"""Tests of what tasks that predict hidden patches share: the networks and fractions that they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from vitrail.errors import ConfigError
from vitrail.models.variants import variant_config
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.tasks.patches import PatchTask

TASKS = (Mae(), MaskedPatches())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("BiT-R50x1", {}, "task='NAME' hides the embeddings of patches, which a ResNet does not have"),
        ("Conv+ViT-Pico/8", {}, "the tokens of a hybrid do, so that the neighbours of a HIDDEN patch"),
        ("R50+ViT-B/16", {}, "task='NAME' needs patches that do not overlap"),
        (
            "ViT-Pico/8",
            {"positions": "none"},
            "needs positions, .* distinguishes HIDDEN patches, .*positions='learned'",
        ),
        ("ViT-Pico/8", {"patch_dropout": 0.25}, "patch_dropout=0.25 removes patches that task='NAME'"),
        ("ViT-Pico/8", {"pool": "map"}, "pool='map' has weights that task='NAME' does not train"),
        ("ViT-Pico/8", {"head_hidden": 9}, "head_hidden=9 is a layer that task='NAME' does not train"),
    ],
)
def test_unfit_networks_are_refused(task: PatchTask, variant: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("NAME", task.name).replace("HIDDEN", task.hidden)):
        task.check_network(variant_config(variant, image_size=32, **fields))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_network_of_the_users_own_class_is_refused(task: PatchTask) -> None:
    with pytest.raises(ConfigError, match="which a network of your own class does not have; choose a Vision"):
        task.check_network(None)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_fractions_leave_hidden_and_visible_patches(task: PatchTask) -> None:
    for fraction in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match=f"{task.fraction}={fraction} is not between 0 and 1, so no patch would"):
            replace(task, **{task.fraction: fraction})
    network = variant_config("ViT-Pico/16", image_size=32)
    for fraction, left in ((0.1, task.hidden), (0.9, "visible")):
        with pytest.raises(ConfigError, match=rf"{task.fraction}={fraction} of 4 .* leaves no {left} patch; choose"):
            replace(task, **{task.fraction: fraction}).check_network(network)
