"""Tests of the settings of small runs."""

from __future__ import annotations

import pytest

from vitrail.models.variants import ModelConfig
from vitrail.studies.study import Settings, data_config, finetuning_config, small_config


@pytest.mark.slow
def test_subsets_are_nested_and_share_the_held_out_images() -> None:
    few, more = data_config("bundled", 50).open(), data_config("bundled", 120).open()
    keys = [{source.key(index) for index in range(len(source))} for source in (few.train, more.train)]
    assert keys[0] < keys[1] and len(keys[0]) == 50
    held_out = [{one.key(index) for index in range(len(one))} for one in (few.validation, more.validation)]
    assert held_out[0] == held_out[1] and not held_out[0] & keys[1]
    labels = [few.train.target(index) for index in range(50)]
    assert all(labels.count(label) == 5 for label in range(10))  # the classes are equally large


def test_a_subset_is_at_most_the_whole() -> None:
    assert small_config(Settings(images=700), images=2000, epochs=1.0).data.spec == "bundled[:700]"


def test_a_second_stage_has_no_network_of_its_own() -> None:
    config = finetuning_config(Settings(channels=3), images=100, steps=7, linear_head=True)
    assert config.model == ModelConfig() and config.start.init and config.run.steps == 7
    assert config.images.image_size == (32, 32) and config.images.channels == 3
