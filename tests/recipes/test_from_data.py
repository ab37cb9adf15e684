"""Tests of the settings for training from scratch, on data of several sizes and colours."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, encode, make_voc_folder
from vitrail.cli import main
from vitrail.data.source import Sample
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.variants import variant_config
from vitrail.recipes import from_data
from vitrail.recipes.from_data import Speed, colours_of, plan_for_data, training_speed
from vitrail.training.config import TrainConfig
from vitrail.weights.load import load

Pixels = Callable[[int], np.ndarray | bytes]


class Made(MemorySource):
    """Images made by a function of their number, in two classes."""

    def __init__(self, pixels: Pixels, images: int = 90) -> None:
        super().__init__(labels=[index % 2 for index in range(images)], classes=("first", "second"))
        self.pixels = pixels

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.pixels(index), self.target(index))


def digits(index: int) -> np.ndarray:
    """Grey images of 28 x 28 pixels whose bright side is the class."""
    pixels = np.random.default_rng(index).integers(0, 90, (28, 28, 1), dtype=np.uint8)
    half = pixels[:, :14] if index % 2 else pixels[:, 14:]
    half += 120
    return pixels


def photographs(index: int) -> np.ndarray:
    """Colour images of 120 x 101 pixels without sides."""
    pixels = np.random.default_rng(index).integers(0, 90, (120, 101, 3), dtype=np.uint8)
    pixels[..., index % 2] += 120
    return pixels


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replaces the speed, which takes a second to measure, except in tests of the measurement."""
    if "speed_is_measured" not in request.node.name:
        monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(1e6, None))


def planned(
    pixels: Pixels, seconds: float = 300.0, images: int = 90, *, examined: bool = False, **explicit: Any
) -> from_data.FinetunePlan:
    """Return the plan for images. Mirroring is chosen by an examination only if they are `examined`."""
    explicit = {"device": "cpu", "precision": "float32", **({} if examined else {"flip": True}), **explicit}
    splits = Splits(Made(pixels, images), Made(pixels, 20), None)
    return plan_for_data(TrainConfig().override(data="made", **explicit), splits, explicit, seconds)


@pytest.mark.slow
def test_digits_become_grey_small_and_unmirrored() -> None:
    found = planned(digits, examined=True)
    config = found.config
    assert config.images.channels == 1 and config.images.image_size == (32, 32) and len(config.images.mean) == 1
    assert config.augment.flip is False and config.augment.shift == 4
    assert config.model.variant == "BiT-Pico" and config.run.batch_size == 8
    assert config.run.epochs == 200, "90 images take no time, but more than 200 epochs hardly help"
    assert any(reason.startswith("no mirroring: a linear model of the pixels errs on") for reason in found.reasons)
    reason = "with 90 images, fine-tuning a pre-trained model is usually better: vitrail finetune MODEL --data made"
    assert reason in found.reasons


def test_the_chosen_network_learns_by_muon_unless_told() -> None:
    optimizer = planned(digits).config.optimizer
    assert (optimizer.kind, optimizer.learning_rate) == ("muon", 5e-3)
    for own in ({"learning_rate": 3e-4}, {"optimizer": "adamw"}, {"variant": "ViT-Pico/8"}):
        found = planned(digits, **own)
        assert found.config.optimizer.kind == "adamw" and not any("Muon" in reason for reason in found.reasons)


def test_fields_of_a_transformer_choose_one() -> None:
    found = planned(digits, epochs=1.0, depth=2, heads=4, width=32)
    config = found.config
    assert config.model.variant == "RPico+ViT-Pico/8" and config.optimizer.kind == "muon"
    assert config.model.overrides["depth"] == 2
    assert any("which has the fields that you set" in reason for reason in found.reasons)
    assert planned(digits, epochs=1.0, width=32, norm_eps=1e-4).config.model.variant == "BiT-Pico"
    with pytest.raises(ConfigError, match="unknown field 'depth' of BiT-Pico"):
        planned(digits, epochs=1.0, depth=2, unit="basic")


@pytest.mark.slow
def test_boxes_are_not_examined_by_a_linear_model(tmp_path: Path) -> None:
    data = make_voc_folder(tmp_path / "data", train=40, validation=0)
    network = "--variant ViT-Pico/8 --width 16 --depth 1 --heads 2 --mlp-width 16"
    command = f"train --data {data} {network} --steps 1 --run {tmp_path / 'run'}"
    assert main(shlex.split(command)) == 0
    assert load(tmp_path / "run").output == "boxes", "the task follows from the data"


@pytest.mark.slow
def test_photographs_are_in_colour_larger_and_mirrored() -> None:
    config = planned(photographs, examined=True).config
    assert config.images.channels == 3 and config.images.image_size == (96, 96) and config.images.resize == "crop"
    assert config.augment.flip and config.augment.shift == 12
    means = config.images.mean
    assert means[0] == pytest.approx(means[1], abs=0.1) and means[2] == pytest.approx(45 / 255, abs=0.01)


@pytest.mark.slow
def test_little_time_means_smaller_images_and_fewer_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def speed(config: TrainConfig, *_: Any) -> Speed:
        asked.append(config.images.image_size)
        return Speed(1e6 / config.images.image_size[0] ** 2, None)

    monkeypatch.setattr(from_data, "training_speed", speed)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    seconds = 8 * 900 / (1e6 / 64**2) / from_data.TIME_FOR_STEPS + 1
    found = planned(photographs, seconds, images=900)
    assert asked == [(96, 96), (64, 64)] and found.config.images.image_size == (64, 64)
    assert 8 <= found.config.run.epochs < 9
    asked.clear()
    found = planned(photographs, 0.01, images=900)
    assert asked == [(96, 96), (32, 32)], "sizes that are far too slow are not measured"
    assert found.config.images.image_size == (32, 32) and 0 < found.config.run.epochs < 1


def test_the_time_of_the_choice_means_fewer_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(60.0, None))
    clock = iter((0.0, 40.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = planned(digits, 100.0, evaluations=4)
    seconds = 60 * from_data.TIME_FOR_STEPS - (4 + 1) * 20 / 120  # the validation split has 20 images
    assert found.config.run.epochs == pytest.approx(seconds * 60 / 90, abs=0.1)
    assert "36.2 epochs: this machine trains about 60 images/s, and 60 s of the budget are left" in found.reasons


def test_a_budget_counts_from_the_start_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(60.0, None))
    monkeypatch.setattr(time, "perf_counter", lambda: 140.0)
    config = TrainConfig().override(data="made")
    source = Made(digits)
    found = plan_for_data(config, Splits(source, None, None), {"flip": True}, 100.0, started=80.0)
    assert any(reason.endswith("and 40 s of the budget are left") for reason in found.reasons)


def test_evaluations_take_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run lasts 100 s, of which evaluations may take 10 s. One evaluation takes 17 s, so there is only one."""
    monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(60.0, None))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    explicit = {"device": "cpu", "flip": True}
    splits = Splits(Made(digits), Made(digits, 2_000), Made(digits, 1_000))
    run = plan_for_data(TrainConfig().override(data="made"), splits, explicit, 100.0).config.run
    assert run.evaluations == 1
    seconds = 100 * from_data.TIME_FOR_STEPS - (2 * 2_000 + 1_000) / 120
    assert run.epochs == pytest.approx(seconds * 60 / 90, abs=0.1)
    assert plan_for_data(TrainConfig(), splits, {**explicit, "evaluations": 7}, 100.0).config.run.evaluations == 7


@pytest.mark.slow
def test_speed_is_measured_on_this_machine() -> None:
    """The reading of an image takes a hundredth of a second, so the speed is at most that of all reading threads."""

    class Slow(Made):
        def __getitem__(self, index: int) -> Sample:
            time.sleep(0.01)
            return super().__getitem__(index)

    config = TrainConfig().override(
        data="made", variant="ViT-Pico/7", width=16, depth=1, heads=2, mlp_width=16, image_size=(14, 21), channels=1,
        batch_size=4, device="cpu", threads=1,
    )  # fmt: skip
    speed, threads = training_speed(config, Splits(Slow(digits), Made(digits), None), 0.3, 0.3)
    assert 0 < speed < 110 and threads == 1, "the user's number of threads stays"


def test_the_faster_way_of_reading_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_data, "training_speed", training_speed)
    for faster in (None, 0):
        speeds = {faster: 70.0}
        measure = lambda configs, *_: [speeds.get(config.run.threads, 60.0) for config in configs]  # noqa: B023, E731
        monkeypatch.setattr(from_data, "training_speeds", measure)
        found = planned(digits)
        assert found.config.run.threads == faster
        reason = "images are read between the steps, which is faster here than in threads"
        assert (reason in found.reasons) is (faster == 0)


def jpeg(index: int) -> bytes:
    """A JPEG file of 400 x 410 pixels."""
    pixels = np.random.default_rng(index).integers(0, 255, (25, 25, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    return encode(Image.fromarray(pixels).resize((400, 410)), "jpeg")


def test_large_jpegs_are_decoded_at_a_fraction_of_their_size() -> None:
    files, reason = [jpeg(index) for index in range(3)], "JPEG files are decoded at a fraction of their size"
    for explicit, is_scaled in (
        ({}, True),
        ({"image_size": (104, 96)}, False),  # the height is less than four times that of the network's images
        ({"scaled_decode": False}, False), ({"resampler": "tensorflow"}, False), ({"preset": "augreg-light1"}, False),
    ):  # fmt: skip
        found = planned(lambda index: files[index % 3], images=9, epochs=1.0, **explicit)
        assert found.config.images.scaled_decode is is_scaled
        assert any(one.startswith(reason) for one in found.reasons) is is_scaled
    assert not planned(photographs, images=9, epochs=1.0).config.images.scaled_decode, "arrays are not decoded"


def test_settings_of_the_user_are_kept() -> None:
    chosen = {"epochs": 2.0, "image_size": (40, 56), "variant": "ViT-Pico/8", "flip": True, "channels": 3}
    config = planned(digits, **chosen, batch_size=5, loss="sigmoid").config
    assert config.run.epochs == 2 and config.images.image_size == (40, 56) and config.model.variant == "ViT-Pico/8"
    assert config.augment.flip and config.images.channels == 3 and config.images.mean == (0.5,)
    assert config.run.batch_size == 5 and config.task.loss == "sigmoid" and config.task.label_smoothing == 0
    assert planned(digits, steps=7).config.run.steps == 7


def test_colours_are_those_of_the_images_that_can_be_decoded() -> None:
    colour, grey = np.full((9, 7, 3), (0, 51, 255), np.uint8), np.full((9, 7, 1), 51, np.uint8)
    assert colours_of(Made(lambda index: colour)) == (3, (0.0, 0.2, 1.0), (0.05, 0.05, 0.05))
    assert colours_of(Made(lambda index: grey.repeat(3, 2))) == (1, (0.2,), (0.05,))
    cut = encode(np.random.default_rng(0).integers(0, 256, (90, 70), dtype=np.uint8), "PNG")[:2000]
    broken = {4: cut, 8: b"no image"}
    assert colours_of(Made(lambda index: broken.get(index, grey), 9)) == (1, (0.2,), (0.05,))
    assert colours_of(Made(lambda index: b"no image", 3)) == (1, (0.5,), (0.05,))


def test_a_model_is_trained_further_within_the_time(colour_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig().override(data=str(colour_folder), task="dino", **from_data.CONTINUED)
    splits = config.data.cut(config.data.open_whole(unlabelled=True))
    images, held_out = len(splits.train), len(splits.validation or ())
    network, now = variant_config("ViT-Pico/7", image_size=56), time.perf_counter()

    def planned_epochs(started: float, **explicit: Any) -> float:
        plan = from_data.plan_continued(config, network, explicit, 300.0, started=started)
        return plan.config.run.epochs

    assert planned_epochs(now) == 10
    monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(images / 100, None))
    evaluated = held_out / images
    assert planned_epochs(now) == pytest.approx(0.92 * 3 - evaluated, rel=0.05)
    assert planned_epochs(now - 200) == pytest.approx(0.92 - evaluated, rel=0.05)
    assert planned_epochs(now, epochs=7) == 7


@pytest.mark.parametrize(("own", "size"), [((32, 32), (56, 56)), ((29, 401), (56, 56)), ((113, 112), (224, 224))])
def test_small_photographs_are_not_made_larger_than_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], size: tuple[int, int]
) -> None:
    for number in range(20):
        Image.new("RGB", own[::-1], (10 * number, 0, 9)).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(from_data, "training_speed", lambda *_: Speed(1.0, None))
    config = TrainConfig().override(data=str(tmp_path), task="dino", image_size=(224, 224), **from_data.CONTINUED)
    network = variant_config("ViT-S/14", image_size=224)
    plan = from_data.plan_continued(config, network, {}, 300.0, started=time.perf_counter())
    assert plan.config.images.image_size == size and len(plan.reasons) == 1 + (size != (224, 224))
    for explicit in ({"image_size": (98, 98)}, {"local_size": (98, 98)}):
        plan = from_data.plan_continued(config, network, explicit, 300.0, started=time.perf_counter())
        assert plan.config.images.image_size == explicit.get("image_size", (224, 224)) and len(plan.reasons) == 1
    plan = from_data.plan_continued(config, network, {"epochs": 3.0}, 300.0, started=time.perf_counter())
    assert plan.config.images.image_size == size and len(plan.reasons) == (size != (224, 224))
