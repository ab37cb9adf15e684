"""A model to start from, and images with all three splits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import make_colour_folder
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="session")
def tiny_bundle() -> Bundle:
    """A small transformer of four classes for images of 14 x 21."""
    torch.manual_seed(0)
    network = create("ViT-Pico/7", width=32, depth=2, heads=2, mlp_width=48, num_classes=4, image_size=(14, 21))
    return Bundle(network.eval(), ("a", "b", "c", "d"), Preprocess(image_size=(14, 21)))


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of plain colours, in train/ and test/."""
    root = tmp_path_factory.mktemp("colours")
    make_colour_folder(root / "train", images=10)
    make_colour_folder(root / "test", images=4)
    return root
