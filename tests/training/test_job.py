"""Tests of the job of a run: the boxes of its training images, cheaper steps at the beginning, and its memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import MemorySource
from tests.training.jobs import Make, Outcome, events_of, train_until
from vitrail.cli.run_options import check_effects
from vitrail.data.augment.draws import tensorflow_crop
from vitrail.data.pipeline import Readers, queue_bytes
from vitrail.data.splits import Splits
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.models.cost import prediction_bytes, training_bytes
from vitrail.models.variants import variant_config
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.tasks.classification import Classification
from vitrail.training import job as forecast
from vitrail.training import state as assembly
from vitrail.training.config import ModelConfig, StartConfig, TrainConfig
from vitrail.training.job import (
    Job,
    check_run_memory,
    cost_text,
    evaluation_batch,
    first_steps,
    phases_of,
    prepare,
    run_bytes,
    run_flops,
    with_flops,
)
from vitrail.training.log import Log
from vitrail.training.run import resume, train
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


ALL: dict[str, Any] = {
    "early_image_size": ("7x14:0.25", "14x21:0.5"), "early_patch_dropout": ("0.5:0.25", "0.25:0.75"),
    "early_batch_size": ("7:0.5",), "shift": 4,
}  # fmt: skip
"""Settings with changes after a quarter, a half and three quarters of the run."""


def network_of(config: TrainConfig) -> Any:
    return config.model.resolve(num_classes=2, image_size=config.images.image_size, channels=config.images.channels)


def test_phases_follow_from_the_settings(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path, **ALL, batch_size=20)
    network = network_of(config)
    found = phases_of(config, network, 24)
    assert [(one.first, one.steps, one.image_size, one.patch_dropout, one.batch_size) for one in found] == [
        (0, 6, (7, 14), 0.5, 7), (6, 6, (14, 21), 0.25, 7), (12, 6, (28, 28), 0.25, 20), (18, 6, (28, 28), 0.0, 20),
    ]  # fmt: skip
    flops = [6 * one.batch_size * variant_config(
        "ViT-Pico/7", image_size=one.image_size, patch_dropout=one.patch_dropout, num_classes=2, width=16, depth=2,
        heads=2, mlp_width=32, channels=1).training_flops() for one in found]  # fmt: skip
    assert run_flops(found, network, config.task) == sum(flops)
    two = type("Two", (Classification,), {"views": 2})()
    assert run_flops(found, network, two) == 2 * sum(flops)
    assert [one.cost for one in found] == pytest.approx([each / flops[-1] for each in flops], rel=1e-12)
    assert run_flops(first_steps(found, 14), network, config.task) == sum(flops[:2]) + flops[2] // 3
    assert first_steps(found, 24) == found
    assert found[0].cost < found[1].cost < found[2].cost < found[3].cost == 1


def test_the_stated_cost_is_that_of_the_trained_blocks_and_classes(small: Make, tmp_path: Path) -> None:
    own = small(tmp_path, **ALL)
    config, network = replace(own, model=ModelConfig(), start=StartConfig(init="m", train_blocks=1)), network_of(own)
    phases = with_flops(phases_of(config, network, 24), config, network, 9)
    tflop = sum(phase.steps * phase.flops for phase in phases) / 1e12
    assert tflop < run_flops(phases, network, config.task) / 1e12
    assert tflop == run_flops(phases, network.with_head(9), config.task, 1) / 1e12
    assert f"compute {tflop:,.3g} TFLOP" in cost_text(phases, network, config.task)


def test_short_runs_have_the_phases_that_fit(small: Make, tmp_path: Path) -> None:
    for early, side in (("14:0.4", 28), ("14:0.9", 14)):
        config = small(tmp_path, early_image_size=(early,))
        (phase,) = phases_of(config, network_of(config), 1)
        assert (phase.first, phase.steps, phase.image_size) == (0, 1, (side, side))


def test_a_phase_without_a_step_is_noticed(small: Make, tmp_path: Path) -> None:
    events: list[Any] = []
    train(small(tmp_path / "run", steps=2, early_image_size=("14:0.1",)), log=Log(events.append))
    assert "the steps in 1 phase compute" in str(events) and "100% of as many steps" in str(events)


def test_epochs_count_the_images_of_all_phases(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path, steps=None, epochs=3.0, early_batch_size=("5:0.5", "10:0.75"))
    assert config.mean_batch_size == 0.5 * 5 + 0.25 * 10 + 0.25 * 20
    steps = config.total_steps(200)
    assert steps == 60
    assert sum(one.steps * one.batch_size for one in phases_of(config, network_of(config), steps)) == 600


NO_VIT = dict.fromkeys(("depth", "heads", "mlp_width", "dropout", "stochastic_depth"))


@pytest.mark.parametrize(("fields", "message"), [
    ({"early_image_size": ("14",)}, "early_image_size='14' is not SIZE:END, with END a fraction of the run"),
    ({"early_patch_dropout": ("1.5:0.5",)}, "early_patch_dropout='1.5:0.5' is not RATE:END, with END a fraction of"),
    ({"early_batch_size": ("8:1.0",)}, "early_batch_size='8:1.0' is not IMAGES:END, with END a fraction of the run"),
    ({"early_batch_size": ("8:0.5", "9:0.4")}, "early_batch_size='8:0.5 9:0.4' has ends that do not increase"),
    ({"early_image_size": ("21:0.2", "14:0.5")},
     "early_image_size='21:0.2 14:0.5' does not grow to image_size=(28, 28)"),
    ({"early_batch_size": ("20:0.2",)}, "early_batch_size='20:0.2' does not grow to batch_size=20"),
    ({"early_patch_dropout": ("0.2:0.2",), "patch_dropout": 0.5},
     "early_patch_dropout='0.2:0.2' does not fall to patch_dropout=0.5"),
    ({"early_image_size": ("15:0.2",)}, "early_image_size: image_size=(15, 15) is not a multiple of patch_size=(7, 7)"),
    ({"early_image_size": ("14:0.2",), "crop_from": (32, 32)},
     "early_image_size and crop_from=(32, 32) cannot be combined"),
    ({"early_patch_dropout": ("0.2:0.2",), "variant": "BiT-R26x1", "image_size": (32, 32), "width": 32, **NO_VIT},
     "early_patch_dropout drops patches of a transformer, but a ResNet has none"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_settings_that_do_not_fit_are_refused_before_the_run(
    small: Make, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        train(small(tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(12, 19), (3, 6, 11, 18)], ids=str)
def test_stopping_in_any_phase_changes_no_bit(
    cuts: tuple[int, ...], small: Make, outcome: Outcome, tmp_path: Path
) -> None:
    fields = {**ALL, "skip_dropped": True, "average": 0.9, "evaluations": 2, "checkpoints": 1}
    train(small(tmp_path / "straight", **fields))
    run = tmp_path / "stopped"
    for number, cut in enumerate(cuts):
        train_until(run if number else small(run, **fields), cut)
    resume(run)
    assert outcome(run) == outcome(tmp_path / "straight")
    for folder in (run, tmp_path / "straight"):
        begun = events_of(folder, "phase")
        values = [(one["step"], one["image_size"], one["patch_dropout"], one["batch_size"]) for one in begun]
        assert values == [
            (0, [7, 14], 0.5, 7), (6, [14, 21], 0.25, 7), (12, [28, 28], 0.25, 20), (18, [28, 28], 0.0, 20),
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("local_size", "expected"), [(None, [(7, 7), (14, 7)]), ((7, 14), [(7, 14), (7, 14)])])
def test_local_views_have_half_the_size_of_the_phase(
    local_size: tuple[int, int] | None, expected: list[tuple[int, int]], small: Make, tmp_path: Path
) -> None:
    early: dict[str, Any] = {"early_image_size": ("14:0.5",), "image_size": (28, 14), "average": 0.0}
    heads: dict[str, Any] = {"prototypes": 24, "projection_hidden": 20, "bottleneck": 12}
    config = small(tmp_path / "run", task="dino", local_views=1, local_size=local_size, **early, **heads)
    setup = prepare(config)
    batches = make_state(setup, make_network(setup, None)[0]).batches
    taken = [next(batches) for _ in range(13)]
    batches.close()
    seen = [(*batch.images.shape[2:], *batch.local.images.shape[2:]) for batch in taken if batch.local is not None]
    assert seen == [(14, 14, *expected[0])] * 12 + [(28, 14, *expected[1])]
