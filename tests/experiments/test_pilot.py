"""Tests of the short runs that measure the speed of a run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tasks.images import Pictures
from vitrail.data.source import Sample
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import Stopped, UndecodableImage
from vitrail.experiments import runner
from vitrail.experiments.runner import training_speeds
from vitrail.training.config import TrainConfig


class Made(Pictures):
    """Noise of 14 x 21 pixels in two classes, sorted by class. The first `broken` images cannot be decoded."""

    def __init__(self, images: int = 90, broken: int = 0) -> None:
        super().__init__(images, ("first", "second"), [2 * index // images for index in range(images)])
        self.broken, self.read = broken, set[int]()

    def __getitem__(self, index: int) -> Sample:
        self.read.add(index)
        if index < self.broken:
            raise UndecodableImage("broken")
        sample = super().__getitem__(index)
        return replace(sample, image=sample.image[:14, :21, :1])


def small(**changes: Any) -> TrainConfig:
    return TrainConfig().override(
        data="made", variant="ViT-Pico/7", width=16, depth=1, heads=2, mlp_width=16, image_size=(14, 21), channels=1,
        device="cpu", **{"batch_size": 4, "threads": 1, "warmup": "500 steps", "steps": 900, **changes},
    )  # fmt: skip


def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Splits]]:
    """Replaces `train` by a function with a speed of 100 images/s, or 200 without reading threads. Returns a list of
    the lengths and the data of its calls."""
    calls: list[tuple[int, Splits]] = []

    def train(config: TrainConfig, data: OpenedData) -> Any:
        assert config.run.steps is not None
        calls.append((config.run.steps, data.whole))
        return SimpleNamespace(summary={"images_per_second": 200.0 if config.run.threads == 0 else 100.0})

    monkeypatch.setattr(runner, "train", train)
    return calls


def test_a_pilot_has_the_epochs_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake(monkeypatch)
    splits = Splits(Made(900), Made(), Made())
    # Of 9,000 images in 90 s, each of the 900 is seen 10 times. 20 s are 500 steps of 4 images: 200 images 10 times.
    assert training_speeds([small()], splits, 20.0, 90.0) == [100.0]
    (first, whole), (steps, few) = calls
    assert (first, steps) == (runner.FIRST_STEPS, 500) and whole.train is splits.train and len(few.train) == 200
    assert {few.train.target(index) for index in range(200)} == {0, 1}, "sorted data keeps its classes"
    assert few.validation is None and few.test is None


def test_each_config_has_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake(monkeypatch)
    configs = [small(), small(threads=0)]
    assert training_speeds(configs, Splits(Made(), None, None), 2.0, 18.0) == [100.0, 200.0]
    assert [steps for steps, _ in calls] == [4, 25, 25]
    calls.clear()
    assert training_speeds(configs, Splits(Made(), None, None), 0.6, 18.0) == [100.0, 100.0]
    assert [steps for steps, _ in calls] == [4, 15], "there is too little time to compare the configs"
    calls.clear()
    assert training_speeds(configs, Splits(Made(), None, None), 0.19, 18.0) == [100.0, 100.0]
    assert len(calls) == 1, "there is too little time for more than the first pilot"


@pytest.mark.slow
def test_images_are_read_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fifth of the images cannot be decoded, which is more than the run would allow."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = Made(90_000, broken=18_000)
    (speed,) = training_speeds([small(patience=2)], Splits(source, Made(), None), 0.5, 1e4)
    assert speed > 0 and len(source.read) < 90_000
    assert not list(tmp_path.glob("*/run"))


def test_a_stop_offers_no_run_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped("stopped", Path("run"))

    monkeypatch.setattr(runner, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        training_speeds([small()], Splits(Made(), None, None), 1.0, 1.0)
