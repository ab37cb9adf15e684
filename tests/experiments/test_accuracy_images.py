"""Tests of the images that are written for other libraries."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.source import Sample, Source
from vitrail.data.splits import Splits
from vitrail.experiments.accuracy import write_images


class Fixed:
    """A source of given samples."""

    classes = ("b", "a", "c")

    def __init__(self, *samples: Sample) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def key(self, index: int) -> str:
        return self.samples[index].key

    def target(self, index: int) -> int:
        target = self.samples[index].target
        assert isinstance(target, int)
        return target


def encoded(pixels: np.ndarray, form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def pixels(seed: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (5, 7, channels), dtype=np.uint8)


def splits() -> Splits:
    jpeg, webp = encoded(pixels(0), "JPEG"), encoded(pixels(1), "BMP")
    train: Source = Fixed(Sample("x", jpeg, 2), Sample("y", webp, 0), Sample("z", pixels(2, 1), 0))
    return Splits(train, Fixed(Sample("v", pixels(3), 1)), None)


def test_every_image_is_a_file_in_the_folder_of_its_class(tmp_path: Path) -> None:
    data = splits()
    write_images(data, tmp_path / "images")
    files = sorted(path.relative_to(tmp_path / "images").as_posix() for path in tmp_path.rglob("*.*g"))
    assert files == [
        "train/00000/0000001.png", "train/00000/0000002.png", "train/00002/0000000.jpg", "validation/00001/0000000.png",
    ]  # fmt: skip
    assert (tmp_path / "images/train/00001").is_dir()  # a class without an image in this split keeps its index
    assert (tmp_path / "images" / files[2]).read_bytes() == data.train[0].image  # JPEG and PNG are not encoded again
    for name, expected in ((files[0], pixels(1)), (files[1], pixels(2, 1)[:, :, 0]), (files[3], pixels(3))):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "images" / name)), expected)


def test_images_are_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_images(splits(), folder)
    kept = folder / "train/00000/0000001.png"
    kept.write_bytes(b"untouched")
    write_images(splits(), folder)
    assert kept.read_bytes() == b"untouched"
    other = Splits(Fixed(Sample("new", pixels(4), 1)), None, None)
    write_images(other, folder)
    assert [path.name for path in folder.rglob("*.png")] == ["0000000.png"]
