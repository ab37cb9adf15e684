"""Tests of the setup of a run: the boxes of its training images."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.jobs import Make
from vitrail.data.augment.draws import tensorflow_crop
from vitrail.errors import ConfigError
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.training import build as assembly
from vitrail.training.build import make_network, make_state
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare


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


def test_the_original_crop_excludes_averaging_while_decoding() -> None:
    with pytest.raises(ConfigError, match=r"^scaled_decode=True averages pixels, and crop_rule='tensorflow' scales"):
        TrainConfig().override(preset="augreg-light1", scaled_decode=True)


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
