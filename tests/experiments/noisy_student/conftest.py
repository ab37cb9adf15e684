"""A teacher that the tests of labelling and of rounds share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.objectives import SMALL
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle

MakeTeacher = Callable[..., str]
"""The fixture that saves teachers."""


@pytest.fixture
def teacher(tmp_path: Path) -> MakeTeacher:
    """Return a function that saves a teacher with random weights for images of 14 x 21 pixels, and returns its path."""

    def make(classes: tuple[str, ...] = ("blue", "green", "red"), output: Any = "softmax", **fields: Any) -> str:
        torch.manual_seed(5)
        size: dict[str, Any] = {"image_size": (14, 21), "channels": 3}
        network = create("ViT-Pico/7", num_classes=len(classes), **{**SMALL, **fields}, **size)
        torch.nn.init.normal_(network.head.weight, std=0.5)
        path = tmp_path / f"teacher-{len(list(tmp_path.iterdir()))}"
        return str(Bundle(network, classes, Preprocess(image_size=(14, 21)), output=output).save(path))

    return make
