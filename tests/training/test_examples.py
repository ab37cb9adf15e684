"""Tests of example images: they are written as files, named by class, and predicted like the originals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.data.formats.folder import read_folder
from vitrail.data.pixels.decode import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.models.variants import create
from vitrail.training.page import write_examples
from vitrail.weights.bundle import Bundle


@pytest.fixture
def bundle() -> Bundle:
    torch.manual_seed(0)
    network = create("ViT-Pico/7", image_size=(14, 14), channels=3, num_classes=3, width=16, depth=1, heads=2)
    assert network.head is not None
    torch.nn.init.normal_(network.head.weight)
    return Bundle(network, ("blue", "green", "red"), Preprocess(image_size=(14, 14), channels=3))


def test_they_are_spread_over_the_source(bundle: Bundle, colour_folder: Path, tmp_path: Path) -> None:
    source = read_folder(colour_folder).samples
    examples = write_examples(bundle, source, tmp_path / "examples", count=6)
    assert [example.label for example in examples] == ["blue", "blue", "green", "green", "red", "red"]
    assert [example.path.name for example in examples] == [
        "00-blue.png", "01-blue.png", "02-green.png", "03-green.png", "04-red.png", "05-red.png",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "examples").iterdir()) == [e.path.name for e in examples]
    for number, example in enumerate(examples):
        original = (colour_folder / source.key(number * 36 // 6)).read_bytes()
        assert np.array_equal(decode(example.path.read_bytes(), 3), decode(original, 3))
        expected = bundle.predict([original])[0]
        assert example.prediction.label == expected.label
        assert dict(example.prediction.ranking) == pytest.approx(dict(expected.ranking), abs=1e-6)


def test_broken_and_unlabelled_samples_are_left_out(bundle: Bundle, tmp_path: Path) -> None:
    class Mixed:
        classes = ("T-shirt/top", "../escape", "\u4e2d")

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Sample:
            pixels = np.full((20, 10, 3), 50 * index, np.uint8)
            return Sample(self.key(index), b"" if index == 1 else pixels, self.target(index))

        def key(self, index: int) -> str:
            return str(index)

        def target(self, index: int) -> int | None:
            return [0, 0, None, 1, 2][index]

    folder = tmp_path / "run" / "examples"
    examples = write_examples(bundle, Mixed(), folder)
    assert [example.label for example in examples] == ["T-shirt/top", "../escape", "\u4e2d"]
    assert {path.parent for path in (example.path for example in examples)} == {folder}
    assert sorted(path.name for path in folder.iterdir()) == ["00-T-shirt-top.png", "01--escape.png", "02-中.png"]
