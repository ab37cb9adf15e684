"""Tests of the forecast of a run's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.jobs import Make
from vitrail.data.pipeline import Readers, queue_bytes
from vitrail.errors import ConfigError
from vitrail.models.cost import prediction_bytes, training_bytes
from vitrail.training import job as forecast
from vitrail.training.job import Job, check_run_memory, evaluation_batch, prepare, run_bytes
from vitrail.training.run import train


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
