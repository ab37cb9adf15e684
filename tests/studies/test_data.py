"""Tests of the data of a study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.errors import DataError
from vitrail.studies.study import check_subsets, open_study_data, point, small_config


def write_folder(
    folder: Path, *, splits: tuple[str, ...] = ("train", "test"), count: int = 12, colour: bool = True
) -> str:
    """Write two classes of `count` images of 9 x 7 pixels for each split."""
    draws = np.random.default_rng(0)
    for split in splits:
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                shape = (7, 9, 3) if colour else (7, 9)
                picture = Image.fromarray(draws.integers(0, 256, shape, dtype=np.uint8))
                picture.save(folder / split / name / f"{number}.png")
    return str(folder)


@pytest.mark.slow
def test_settings_follow_from_the_data(tmp_path: Path) -> None:
    found = open_study_data(write_folder(tmp_path), "quick")
    assert (found.images, found.classes, found.channels, found.scale) == (22, 2, 3, "quick")
    found = open_study_data("bundled", "default")
    assert (found.images, found.classes, found.channels) == (9000, 10, 1)


def test_an_image_that_cannot_be_decoded_is_tolerated(tmp_path: Path) -> None:
    write_folder(tmp_path, colour=False)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"not an image")
    assert open_study_data(str(tmp_path), "quick").channels == 1


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    one = open_study_data(write_folder(tmp_path / "a"), "quick").fingerprint
    assert one == open_study_data(write_folder(tmp_path / "b"), "quick").fingerprint
    assert one != open_study_data(write_folder(tmp_path / "c", count=11), "quick").fingerprint


def test_data_without_a_test_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no test split; a study reports results on test images, so add a folder"):
        open_study_data(write_folder(tmp_path, splits=("train",)), "quick")


def test_data_without_classes_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "train.csv"
    image = tmp_path / "0.png"
    Image.new("L", (4, 4)).save(image)
    table.write_text("image,labels\n0.png,a b\n0.png,a\n")
    (tmp_path / "test.csv").write_text("image,labels\n0.png,b\n")
    with pytest.raises(DataError):
        open_study_data(str(tmp_path), "quick")


@pytest.mark.slow
def test_a_subset_smaller_than_its_classes_is_refused() -> None:
    data = open_study_data("bundled", "quick")
    small = [point("a", small_config(data, images=images, epochs=1.0), (1e-3,)) for images in (7200, 9)]
    with pytest.raises(DataError, match=r"data 'bundled\[:9\]': a subset of 9 images is smaller than its 10 cla"):
        check_subsets(small, data)
    check_subsets([point("a", small_config(data, images=10, epochs=1.0), (1e-3,))], data)


def test_a_subset_without_a_class_is_refused(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path, count=40, colour=False))
    for number in range(1, 40):
        (folder / "train" / "dog" / f"{number}.png").unlink()
    data = open_study_data(str(folder), "quick")
    config = small_config(data, images=4, epochs=1.0)
    with pytest.raises(DataError, match=r"a subset of 4 images has none of the class 'dog'; choose data of more"):
        check_subsets([point("a", config, (1e-3,))], data)
