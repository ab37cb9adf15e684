"""Tests of the settings for training from scratch, on data of several sizes and colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.data.source import Sample
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.variants import variant_config
from vitrail.recipes import from_data
from vitrail.recipes.from_data import colours_of, plan_for_data, training_speed
from vitrail.training.config import TrainConfig

Pixels = Callable[[int], np.ndarray]


class Made:
    """Images made by a function of their number, in two classes."""

    classes = ("first", "second")

    def __init__(self, pixels: Pixels, images: int = 90) -> None:
        self.pixels, self.images = pixels, images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.pixels(index), self.target(index))

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> int:
        return index % 2


def digits(index: int) -> np.ndarray:
    """Grey images of 28 x 28 pixels whose bright side is the class."""
    pixels = np.random.default_rng(index).integers(0, 90, (28, 28, 1), dtype=np.uint8)
    half = pixels[:, :14] if index % 2 else pixels[:, 14:]
    half += 120
    return pixels


def photographs(index: int) -> np.ndarray:
    """Colour images of 300 x 251 pixels without sides."""
    pixels = np.random.default_rng(index).integers(0, 90, (300, 251, 3), dtype=np.uint8)
    pixels[..., index % 2] += 120
    return pixels


def planned(pixels: Pixels, seconds: float = 300.0, images: int = 90, **explicit: Any) -> from_data.Plan:
    explicit = {"device": "cpu", "precision": "float32", **explicit}
    config = TrainConfig().override(data="made", **explicit)
    source = Made(pixels, images)
    return plan_for_data(config, Splits(source, Made(pixels, 20), None), explicit, seconds)


def test_digits_become_grey_small_and_unmirrored() -> None:
    found = planned(digits)
    config = found.config
    assert config.images.channels == 1 and config.images.image_size == (32, 32) and len(config.images.mean) == 1
    assert config.augment.flip is False and config.augment.shift == 4
    assert config.model.variant == "Conv+ViT-Pico/8" and config.run.batch_size == 8
    assert config.run.epochs == 200, "90 images take no time, but more than 200 epochs hardly help"
    assert any(reason.startswith("no mirroring: a linear model of the pixels errs on") for reason in found.reasons)
    assert "with 90 images, fine-tuning a pre-trained model is usually better: vitrail finetune MODEL --data made" in (
        found.reasons
    )


def test_photographs_are_in_colour_larger_and_mirrored() -> None:
    config = planned(photographs).config
    assert config.images.channels == 3 and config.images.image_size == (96, 96) and config.images.resize == "crop"
    assert config.augment.flip and config.augment.shift == 12
    means = config.images.mean
    assert means[0] == pytest.approx(means[1], abs=0.1) and means[2] == pytest.approx(45 / 255, abs=0.01)


def test_little_time_means_smaller_images_and_fewer_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def speed(network: Any, *_: Any) -> float:
        asked.append(network.image_size)
        return 1e6 / network.image_size[0] ** 2

    monkeypatch.setattr(from_data, "training_speed", speed)
    seconds = 8 * 900 / (1e6 / 64**2) / from_data.TIME_FOR_STEPS + 1
    found = planned(photographs, seconds, images=900)
    assert asked == [(96, 96), (64, 64)] and found.config.images.image_size == (64, 64)
    assert 8 <= found.config.run.epochs < 9
    found = planned(photographs, 0.01, images=900)
    assert found.config.images.image_size == (32, 32) and 0 < found.config.run.epochs < 1


def test_settings_of_the_user_are_kept() -> None:
    chosen = {"epochs": 2.0, "image_size": (40, 56), "variant": "ViT-Pico/8", "flip": True, "channels": 3}
    config = planned(digits, **chosen, batch_size=5, loss="sigmoid").config
    assert config.run.epochs == 2 and config.images.image_size == (40, 56) and config.model.variant == "ViT-Pico/8"
    assert config.augment.flip and config.images.channels == 3 and config.images.mean == (0.5,)
    assert config.run.batch_size == 5 and config.task.loss == "sigmoid" and config.task.label_smoothing == 0
    assert planned(digits, steps=7).config.run.steps == 7


def test_many_images_get_a_wider_network() -> None:
    config = planned(digits, images=20_000, epochs=1.0).config
    assert config.model.overrides["width"] == 128 and config.run.batch_size == 64


def test_colours_are_those_of_the_images() -> None:
    colours = colours_of(Made(lambda index: np.full((9, 7, 3), (0, 51, 255), np.uint8)))
    assert colours == (3, (0.0, 0.2, 1.0), (0.05, 0.05, 0.05))
    grey = colours_of(Made(lambda index: np.full((9, 7, 3), 51, np.uint8)))
    assert grey == (1, (0.2,), (0.05,))


def test_speed_is_measured_on_this_machine() -> None:
    network = variant_config("ViT-Pico/7", width=16, depth=1, heads=2, mlp_width=16, num_classes=3, image_size=(14, 21))
    assert training_speed(network, 4, "float32", torch.device("cpu")) > 0


def test_data_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="data 'made' has no image"):
        planned(digits, images=0)
