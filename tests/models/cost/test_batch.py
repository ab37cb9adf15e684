"""Tests of the default batch size and of the memory of a prediction."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from vitrail.models import cost
from vitrail.models.cost import prediction_batch, prediction_bytes
from vitrail.models.variants import create, variant_config

CPU = torch.device("cpu")


@pytest.fixture
def dinov2() -> torch.nn.Module:
    """A network of the size of DINOv2 ViT-S/14, without memory for its weights."""
    with torch.device("meta"):
        return create("ViT-S/14", image_size=(518, 518), num_classes=0)


@pytest.mark.parametrize(("threads", "side", "expected"), [(1, 518, 1), (2, 518, 1), (1, 224, 4), (2, 224, 8)])
def test_the_arithmetic_of_a_batch_is_limited(
    threads: int, side: int, expected: int, dinov2: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cost, "total_memory", lambda: 2**35)
    assert prediction_batch(dinov2, (side, side), CPU) == expected


def test_the_memory_of_a_batch_is_limited(dinov2: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = dinov2.config
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for size, limit in (((224, 224), 2**31), ((518, 518), 2**33), ((518, 518), 2**34)):
        monkeypatch.setattr(cost, "total_memory", lambda limit=limit: limit)
        found = prediction_batch(dinov2, size, CPU)
        assert prediction_bytes(config, found, size) <= limit / 8 < prediction_bytes(config, 2 * found, size)
    monkeypatch.setattr(cost, "total_memory", lambda: 2**20)
    assert prediction_batch(dinov2, (518, 518), CPU) == 1


def test_small_networks_and_those_of_the_user() -> None:
    assert prediction_batch(create("ViT-Pico/7", image_size=(14, 21), num_classes=2), (14, 21), CPU) == 64
    assert prediction_batch(torch.nn.Linear(2, 2), (14, 21), CPU) == 64


@pytest.mark.parametrize("name", ["ViT-S/14", "R50+ViT-S/32", "BiT-R50x1"])
def test_memory_grows_with_images_pixels_and_weights(name: str) -> None:
    config = variant_config(name, image_size=(224, 448), num_classes=0)
    zero, one, two = (prediction_bytes(config, count) for count in range(3))
    assert zero == 4 * config.parameters() and two - one == one - zero > 5 * 3 * 224 * 448
    assert prediction_bytes(config, 1, (448, 448)) > one
    assert prediction_bytes(config, 0, precision="bf16") == 6 * config.parameters()


MEASURE = """
import sys, torch
from vitrail.machine import keep_freed_memory, peak_memory
from vitrail.models.predictor import Predictor
from vitrail.models.variants import create
keep_freed_memory()
name, side, count, precision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
predictor = Predictor(create(name, num_classes=0, image_size=(side, side)), precision)
predictor.embed(torch.zeros(1, 3, side, side))
before = peak_memory(torch.device("cpu"))
predictor.embed(torch.zeros(count, 3, side, side, dtype=torch.uint8).float())
print(peak_memory(torch.device("cpu")) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "count", "precision"),
    [
        ("ViT-S/14", 224, 32, "float32"), ("ViT-S/14", 224, 32, "bf16"), ("ViT-S/14", 518, 8, "float32"),
        ("ViT-Ti/16", 160, 64, "float32"),
    ],
)  # fmt: skip
def test_the_formula_is_near_the_peak_of_a_process(name: str, side: int, count: int, precision: Any) -> None:
    command = [sys.executable, "-c", MEASURE, name, str(side), str(count), precision]
    config = variant_config(name, image_size=(side, side), num_classes=0)
    predicted = prediction_bytes(config, count, precision=precision) - prediction_bytes(config, 1, precision=precision)
    measured = []
    for _ in range(3):  # unused bytes between tensors differ from process to process by up to the tensors themselves
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        measured.append(int(run.stdout))
        if min(measured) / 1.6 < predicted < min(measured) * 2.5:
            return
    pytest.fail(f"predicted {predicted:,} bytes, measured {measured}")
