"""BiT-HyperRule: its settings by the size of data and images, the learning rates of the original, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.make import MemorySource
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.models.variants import variant_config
from vitrail.training.config import TrainConfig
from vitrail.training.schedule import RunLength
from vitrail.transfer.facts import DataFacts, FinetunePlan, facts_of
from vitrail.transfer.protocols import plan_by_hyperrule

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pipeline" / "schedules.json").read_text())
FACTS = DataFacts(images=2040, side=300, targets="class", has_validation=True, has_test=True)
R50 = variant_config("BiT-R50x1", num_classes=10)


def planned(facts: DataFacts = FACTS, **explicit: object) -> FinetunePlan:
    preprocess = Preprocess(image_size=(224, 224), resize="crop", crop_share=0.875)
    base = TrainConfig().override(init="BiT-M-R50x1.npz")
    return plan_by_hyperrule(base, R50, preprocess, facts, memory=10**13, explicit=explicit)


def test_the_learning_rate_is_that_of_the_original_at_every_step_it_was_computed_for() -> None:
    compared = 0
    for case in GOLDEN["bit"]:
        run = planned(FACTS._replace(images=case["dataset_size"])).config
        rates = run.optimizer.schedule_of(RunLength(run.run.steps, 512, case["dataset_size"]))
        for step, expected in zip(case["steps"], case["values"], strict=True):
            if expected is None:
                assert step >= run.run.steps
            else:
                assert rates(step) == pytest.approx(expected, abs=1e-6 * 0.003)
                compared += 1
        assert (run.augment.mixup or 0.0) == case["mixup"]
    assert compared > 50


@pytest.mark.parametrize(("side", "scaled", "size"), [(95, 160, 128), (96, 512, 480), (None, 512, 480)])
def test_the_resolution_follows_the_area_of_the_images(side: int | None, scaled: int, size: int) -> None:
    found = planned(FACTS._replace(side=side)).config
    assert found.augment.crop_from == (scaled, scaled) and found.images.image_size == (size, size)
    assert found.images == found.images.with_geometry("vision_transformer") and found.augment.flip
    assert found.augment.training_preprocess(found.images).image_size == (scaled, scaled)


def test_the_resolution_is_that_of_the_original() -> None:
    for case in GOLDEN["bit_resolution"]:
        grey = MemorySource([np.zeros((*case["hw"], 3), np.uint8)] * 2, labels=(0, 0))
        found = planned(facts_of(Splits(grey, None, None))).config
        assert [found.augment.crop_from[0], found.images.image_size[0]] == case["precrop_crop"], case["hw"]


def test_boxes_are_in_proportion_to_an_image_size_that_the_user_chose() -> None:
    assert planned(image_size=(240, 120)).config.augment.crop_from == (256, 128)
    whole = planned(crop_area=(1.0, 1.0))
    assert whole.config.augment.crop_from is None and whole.config.images.image_size == (480, 480)
    assert not any("cut out" in reason for reason in whole.reasons)


def test_large_data_gets_mixup_and_small_data_does_not() -> None:
    few, many = planned(), planned(FACTS._replace(images=20_000))
    assert few.config.augment.settings.mixup == 0
    assert many.config.augment.settings.mixup == 0.1 and many.config.augment.settings.mixup_per == "batch"
    assert (few.config.run.steps, many.config.run.steps) == (500, 10_000)
    for config in (few.config, many.config):
        assert (config.optimizer.kind, config.optimizer.weight_decay, config.optimizer.clip) == ("sgd", 0, 0)
        assert config.start.new_head and config.run.keep == "last" and config.data.validation_share == 0
    assert few.rates == () and few.reasons[0] == "BiT-HyperRule for 2,040 training images"


def test_the_rate_is_in_proportion_to_the_batch_size_and_settings_of_the_user_are_kept() -> None:
    for given, rate in (({}, 0.003 / 8), ({"learning_rate": 0.01}, 0.01)):
        optimizer = planned(batch_size=64, **given).config.optimizer
        assert optimizer.for_batch_size(64).learning_rate == pytest.approx(rate)
    settings = planned(FACTS._replace(images=20_000), preset="augreg-strong2").config.augment.settings
    assert settings.mixup == 0.8 and settings.randaugment_layers == 2
    rates = planned(steps=5).config.optimizer.schedule_of(RunLength(5, 512, 40))
    assert [rates(step) for step in range(5)] == pytest.approx([0.0, 0.003, 0.0003, 0.00003, 0.000003])
    found = planned(schedule="cosine")
    assert found.config.optimizer.stair_at == () and not [one for one in found.reasons if "divided by ten" in one]
