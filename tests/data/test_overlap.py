"""Tests of images that training data shares with held-out images."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, mix_in
from vitrail.data import source, sources
from vitrail.data.cuts import cut_slice
from vitrail.data.formats.fractals import FractalSource
from vitrail.data.formats.pack import pack
from vitrail.data.source import mixed, samples_of, shared_images, subset
from vitrail.data.sources import open_data
from vitrail.errors import DataError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 different images of two classes."""
    for number in range(40):
        folder = tmp_path / "photos" / ("oak" if number % 2 else "elm")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5 + number % 3, 4), (number, 3 * number, 7)).save(folder / f"{number:02}.png")
    return tmp_path / "photos"


def test_a_mixture_with_held_out_images_is_refused(photos: Path) -> None:
    splits = open_data(str(photos), validation_share=0.25)
    key = splits.validation.key(0)
    with pytest.raises(DataError, match=rf"mix '0\.3:.* contains 10 images of the validation split .* as {key}; "):
        mix_in(splits, (f"0.3:{photos}",))
    assert len(mix_in(open_data(str(photos), validation_share=0.0), (f"0.3:{photos}",)).train) == 80


@pytest.mark.parametrize("how", ["copy", "renamed copy", "symlink", "hard link"])
def test_files_are_found_under_other_folders_and_links_under_any_name(photos: Path, tmp_path: Path, how: str) -> None:
    splits = open_data(str(photos), validation_share=0.25)
    original = photos / splits.validation.key(3)
    (tmp_path / "more" / "fir").mkdir(parents=True)
    (tmp_path / "more" / "yew").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "more" / "yew" / original.name)
    target = tmp_path / "more" / "fir" / (original.name if how == "copy" else "other.png")
    if how == "copy":
        shutil.copy(original, target)
    elif how == "renamed copy":
        target.write_bytes(original.read_bytes())
    else:
        target.symlink_to(original) if how == "symlink" else target.hardlink_to(original)
    with pytest.raises(DataError, match=r"contains 1 image of the validation split of .*, such as "):
        mix_in(splits, (f"0.3:{tmp_path / 'more'}",))


def test_large_mixtures_are_compared_in_part(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = open_data(str(photos), validation_share=0.25)
    for name in ("elm", "oak"):
        (tmp_path / "more" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "more" / name / "1.png")
    monkeypatch.setattr(sources, "MOST_HASHED", 11)
    (note,) = set(mix_in(splits, (f"0.3:{tmp_path / 'more'}",)).notes) - {*splits.notes}
    assert "too many to find copies" in note
    drawn = mix_in(splits, ("0.3:fractals:2:10",))
    assert drawn.notes == splits.notes, "fractals are no copies"


def test_shards_and_subsets_know_where_their_images_are(photos: Path, tmp_path: Path) -> None:
    pack(open_data(str(photos), validation_share=0.0), tmp_path / "shards")
    whole = open_data(str(tmp_path / "shards"), validation_share=0.0).train
    rest, held_out = cut_slice(whole, 35, 40)
    assert shared_images(whole, held_out) == [0, 1, 2, 3, 4] and shared_images(rest, held_out) == []
    nested = subset(whole, range(34, 37)).renumbered(range(len(whole.classes)), (*whole.classes, "fir"))
    assert shared_images(nested, subset(whole, [36, 1, 35])) == [0, 2]
    assert shared_images(subset(whole, []), held_out) == []


def test_fractals_of_the_same_numbers_are_the_same() -> None:
    drawn = FractalSource(3, 10, seed=4, size=16)
    held_out = drawn.held_out(0.5)
    assert shared_images(drawn, held_out) == [] and samples_of(held_out).origin(0) == "fractal 4 16 0 10"
    assert shared_images(FractalSource(3, 12, seed=4, size=16), held_out) == [0, 1, 2, 3, 4, 5]
    assert shared_images(FractalSource(3, 12, seed=5, size=16), held_out) == []


def test_arrays_are_compared_by_their_pixels_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [np.full((3, 2, 1), value, np.uint8) for value in range(30)]
    train, held_out = MemorySource(images, labels=[0] * 30), MemorySource(images[:3] + images[:27], labels=[0] * 30)
    assert shared_images(train, held_out) == list(range(30))
    assert shared_images(train, held_out, of_any_name=False) == [0, 1, 2]
    monkeypatch.setattr(source, "MOST_HASHED", 59)
    assert shared_images(train, held_out) == [0, 1, 2], "of images with the same name"
    assert shared_images(MemorySource([b""] * 3, labels=[0] * 3), MemorySource([b""] * 3, labels=[0] * 3)) == []
    monkeypatch.setattr(source, "MOST_READ", 2)
    assert shared_images(train, train) == [0, 29]
    assert samples_of(train).origin(0) is None and mixed([train], [1.0]).origin(0) is None


def test_memory_does_not_grow_with_the_pairs_of_one_name() -> None:
    images = [np.full((1, 1, 1), value % 251, np.uint8) for value in range(700)]
    train, held_out = (
        MemorySource(some, labels=[0] * 700, keys=[f"{number}/1.png" for number in range(700)])
        for some in (images, images[::-1])
    )
    tracemalloc.start()
    try:
        shared_images(train, held_out)  # 490,000 pairs
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
