"""A small model to start from, and images with all three splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.make import make_colour_folder
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
def model(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small transformer."""
    return tiny_bundle.save(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def brightness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of grey images of different sizes, with their brightness and a number that is often unknown."""
    root, random = tmp_path_factory.mktemp("brightness"), np.random.default_rng(0)
    lines = ["file,brightness,half <&>,split"]
    for number in range(60):
        grey = int(random.integers(0, 200))
        pixels = random.integers(grey, grey + 30, (11 + number % 7, 19 + number % 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        half = "" if number % 3 == 0 else grey / 2
        lines.append(f"{number}.png,{grey},{half},{'test' if number % 4 == 0 else 'train'}")
    (root / "numbers.csv").write_text("\n".join(lines), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of plain colours, in train/ and test/."""
    root = tmp_path_factory.mktemp("colours")
    make_colour_folder(root / "train", images=10)
    make_colour_folder(root / "test", images=4)
    return root
