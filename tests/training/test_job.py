"""Tests of the job of a run: the boxes of its training images, and the forecast of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import MemorySource
from tests.training.jobs import Make
from vitrail.data.augment.draws import tensorflow_crop
from vitrail.data.pipeline import Readers, queue_bytes
from vitrail.data.splits import Splits
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.models.cost import prediction_bytes, training_bytes
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.training import job as forecast
from vitrail.training import state as assembly
from vitrail.training.job import Job, check_run_memory, evaluation_batch, prepare, run_bytes
from vitrail.training.run import train
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


@pytest.fixture
def setup(small: Make, tmp_path: Path) -> Callable[..., Job]:
    return lambda **fields: prepare(small(tmp_path / "run", **fields))


def test_the_need_is_the_sum_of_its_parts(setup: Callable[..., Job]) -> None:
    made = setup(batch_size=60, accumulation=4, threads=3)
    network, images = made.network, made.config.images
    assert network is not None
    queue = queue_bytes(images, 60, Readers(3))
    assert queue == (3 + 2 + 2) * 60 * 28 * 28
    evaluation = prediction_bytes(network, 256, (28, 28)) + queue_bytes(images, 256, Readers(3))
    step = training_bytes(network, 15, (28, 28), "float32")
    assert run_bytes(made.config, network) == queue + max(step, 12 * network.parameters() + evaluation)
    copied = made.config.override(background_checkpoints=True)
    assert run_bytes(copied, network) == run_bytes(made.config, network) + 12 * network.parameters()
    assert queue_bytes(images, 60, Readers(0)) == 2 * 60 * 28 * 28
    assert run_bytes(made.config, None) == queue


def test_batches_of_evaluations_shrink_with_the_memory(
    setup: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = setup()
    assert evaluation_batch(made.config, made.network) == evaluation_batch(made.config, None) == 256
    monkeypatch.setattr(forecast, "total_memory", lambda: 8 * 1_000_000)
    smaller = evaluation_batch(made.config, made.network)
    assert smaller in (2, 4, 8, 16, 32)
    monkeypatch.setattr(forecast, "total_memory", lambda: 8)
    assert evaluation_batch(made.config, made.network) == 1


def test_a_run_beyond_the_machine_is_refused_before_it_writes_anything(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path / "run", image_size=(28_000, 28_000), batch_size=64, precision="float32")
    with pytest.raises(ConfigError) as caught:
        train(config)
    assert str(caught.value).startswith("training with 28000 x 28000 pixels and batches of 64 images needs about ")
    assert all(option in str(caught.value) for option in ("--image-size", "--batch-size", "--accumulation"))
    assert not (tmp_path / "run").exists()


def test_other_devices_are_never_refused(setup: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup()
    monkeypatch.setattr("vitrail.machine.available_memory", lambda device: 10)
    assert check_run_memory(made.config, made.network, torch.device("cuda")).endswith("0 MB are free")
    with pytest.raises(ConfigError, match="0 MB are free on this machine"):
        check_run_memory(made.config, made.network, torch.device("cpu"))
