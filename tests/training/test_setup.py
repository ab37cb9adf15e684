"""Tests of the setup of a run: the boxes of its training images."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make import MemorySource
from tests.training.jobs import Make
from vitrail.cli.run_options import check_effects
from vitrail.data.augment.draws import tensorflow_crop
from vitrail.data.splits import Splits
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.training import state as assembly
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare
from vitrail.training.state import make_network, make_state


def test_training_crops_as_the_original_code(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path / "run", preset="augreg-none", interpolation="bicubic", seed=5)
    setup = prepare(config)
    batch = next(make_state(setup, make_network(setup, None)[0]).batches)
    train = config.data.open().train
    images = replace(config.images, interpolation="bilinear", antialias=False)
    for row, place in enumerate(batch.samples.tolist()):
        image = train[place].image
        assert isinstance(image, np.ndarray)
        box = tensorflow_crop(5, 0, place, *image.shape[:2], area=(0.05, 1.0))
        assert np.array_equal(batch.images[row].numpy(), images.pixels(image, box))


@pytest.mark.parametrize(
    ("task", "known", "unknown"), [("regression", [(1.0,), (2.0,)], (math.nan,)), ("classification", [0, 1], None)]
)
def test_held_out_images_without_a_target_measure_nothing(
    small: Make, tmp_path: Path, task: str, known: list[Target], unknown: Target
) -> None:
    def source(labels: list[Target], *keys: str) -> MemorySource:
        images = [np.zeros((8, 8, 3), np.uint8)] * len(labels)
        classes = ("a", "b") if task == "classification" else ("a",)
        return MemorySource(images, labels=labels, keys=keys, classes=classes)

    for name in ("validation", "test"):
        config = small(tmp_path / "run", task=task, keep="last", validation_share=0.0)
        splits = Splits(source(known, "v", "w"), None, None)
        with pytest.raises(DataError, match=f"the {name} split .* cannot measure"):
            held_out = source([unknown] * 3, "x", "y", "z")
            prepare(config, data=replace(splits, **{name: held_out}))


def test_settings_without_an_effect_are_named(small: Make, tmp_path: Path) -> None:
    unused = {"optimizer": "sgd", "beta1": 0.3, "stochastic_depth": 0.0, "skip_dropped": True}
    for fields in ({}, unused):
        notes = prepare(small(tmp_path / "run", **fields)).splits.notes
        for name in ("beta1=0.3", "skip_dropped=True"):
            assert any(note.startswith(name) and "effect only with" in note for note in notes) == bool(fields)


def test_muon_is_refused_without_blocks_to_train() -> None:
    for kind in ("muon", "sgd"):
        config = TrainConfig().override(init="a-model", train_blocks=0, optimizer=kind)
        with pytest.raises(ConfigError, match="--optimizer") if kind == "muon" else nullcontext():
            check_effects({"optimizer": kind}, config)


def test_a_limit_of_the_environment_is_recorded(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_MAX_PIXELS", "5000")
    assert prepare(small(tmp_path / "run")).config.data.max_pixels == 5000
    assert prepare(small(tmp_path / "run", max_pixels=4000)).config.data.max_pixels == 4000


@pytest.mark.slow
def test_pixels_are_kept_if_they_fit_and_are_read_again(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(**fields: Any) -> bool:
        setup = prepare(small(tmp_path / "run", **fields))
        batches = make_state(setup, make_network(setup, None)[0]).batches
        next(batches)
        return batches._kept is not None

    assert kept()
    assert not kept(steps=1), "no image is read twice"
    assert not kept(crop_area=(0.5, 1.0)), "the boxes differ"
    config = small(tmp_path / "run")
    own = prepare(config, data=config.data.open())
    batches = make_state(own, make_network(own, None)[0]).batches
    next(batches)
    assert batches._kept is None, "the user's object may return another image"
    count = len(config.data.open().train)
    whole = count * config.images.channels * math.prod(config.images.image_size)
    monkeypatch.setattr(assembly, "available_memory", lambda device: 8 * whole)
    assert kept()
    two = replace(prepare(config), processes=Processes(Launch(local_world=2)))
    assert not assembly._keeps_pixels(two), "each process of the machine has its own pixels"
    monkeypatch.setattr(assembly, "available_memory", lambda device: 8 * whole - 1)
    assert not kept()
