"""Tests of subsets, mixtures, kinds of targets and fingerprints, and of images that two sources share."""

from __future__ import annotations

import hashlib
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, keys_of, mix_in, targets_of
from vitrail.data import source, sources
from vitrail.data.cuts import cut_slice
from vitrail.data.formats.fractals import FractalSource
from vitrail.data.formats.pack import pack
from vitrail.data.source import (
    Samples,
    Source,
    file_samples,
    fingerprint,
    mixed,
    samples_of,
    shared_files,
    shared_images,
    subset,
    target_kind,
)
from vitrail.data.sources import open_data
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError
from vitrail.testing import check_source


def test_fingerprint_tells_keys_labels_and_order_apart() -> None:
    x, y, z = "xyz"
    pairs = [([x, y], [0, 1]), ([y, x], [1, 0]), ([x, z], [0, 1]), ([x, y], [0, 0]), ([x, y], [0, None]), ([x], [0])]
    variants = [MemorySource(keys=keys, labels=labels) for keys, labels in [*pairs, ([], [])]]
    assert len({fingerprint(source) for source in variants}) == len(variants)


def test_fingerprint_reads_no_image_and_is_the_same_for_equal_sources() -> None:
    sources = [MemorySource(labels=[0, 1]), MemorySource([b"", b""], labels=[0, 1])]
    expected = hashlib.sha256(b"0\0" + b"0\n" + b"1\0" + b"1\n").hexdigest()
    some = np.array([False, True])
    assert fingerprint(subset(sources[0], some)) == fingerprint(subset(sources[0], [1])) != expected, "a mask"
    assert [fingerprint(source) for source in sources] == [expected, expected]
    assert fingerprint(subset(MemorySource(labels=[3, 0, 1], keys=["n", "0", "1"]), [1, 2])) == expected


def test_the_first_target_that_is_known_tells_the_kind_of_all() -> None:
    assert target_kind(MemorySource(labels=[(), (0, 2)])) == "classes"
    assert target_kind(MemorySource(labels=[None, (0.5,)])) == "numbers"
    assert target_kind(MemorySource(labels=[None, None, 1])) == "class"
    assert target_kind(MemorySource(labels=[None])) == target_kind(MemorySource(labels=[])) == "none"
    source = MemorySource(labels=[(1, 2)], classes=("age", "size"))
    source.target_kind = "numbers"
    assert target_kind(source) == target_kind(subset(source, [])) == "numbers", "a source can say its kind"


def test_a_mixture_joins_classes_and_keeps_the_numbers_of_the_first() -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(5)]
    first = MemorySource(images[:2], labels=[1, None], classes=("rose", "daisy"))
    second = MemorySource(images[2:], labels=[0, 1, 2], classes=("lily", "rose", "fern"))
    both = mixed([first, second], [0.75, 0.25])
    check_source(both)
    assert both.classes == ("rose", "daisy", "lily", "fern") and isinstance(both, Source)
    assert targets_of(both) == [1, None, 2, 0, 3]
    assert keys_of(both) == ["1:0", "1:1", "2:0", "2:1", "2:2"]
    assert [int(both[index].image.item()) for index in range(5)] == [0, 1, 2, 3, 4]
    assert both.mixture == ((0, 2, 0.75), (2, 3, 0.25))
    parts = [MemorySource(labels=[(0, 1)], classes=classes) for classes in (("x", "y"), ("y", "x"))]
    several = mixed(parts, [0.5, 0.5])
    assert targets_of(several) == [(0, 1), (0, 1)]


NAN = float("nan")


def test_numbers_are_mixed_by_their_names() -> None:
    one = MemorySource(labels=[(1.0, 2.0), None], classes=("age", "size"))
    other = MemorySource(labels=[(3.0, 4.0)], classes=("weight", "age"))
    both = mixed([one, other], [0.5, 0.5])
    assert both.classes == ("age", "size", "weight") and target_kind(both) == "numbers"
    assert [str(both.target(index)) for index in range(3)] == ["(1.0, 2.0, nan)", "None", "(4.0, nan, 3.0)"]
    wider = samples_of(one).renumbered([0, 1], both.classes)
    assert [str(wider.target(index)) for index in range(2)] == ["(1.0, 2.0, nan)", "None"]
    assert target_kind(wider) == "numbers"


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        ([0, 4], r"target\(1\) is 4, but the targets .* None or an index from 0 to 3"),
        ([0, True], r"target\(1\) is True, but .* an index from 0 to 3"),
        ([0, (1,)], r"target\(1\) is \(1,\), but .* an index from 0 to 3"),
        ([(1,), 0], r"target\(1\) is 0, but .* tuples of indices from 0 to 3"),
        ([(0, 2), (2, 1)], r"the labels of '1' must be in rising order, not \(2, 1\)"),
        ([(0, 2), (1, 1)], r"the labels of '1' must be in rising order, not \(1, 1\)"),
    ],
)
def test_labels_that_break_the_contract_are_named(labels: list[Any], rule: str) -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(2)]
    with pytest.raises((AssertionError, ConfigError), match=rule):
        check_source(MemorySource(images, labels=labels))


def test_sources_of_numbers_keep_the_contract() -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(3)]

    def source(*targets: object) -> Source:
        made = MemorySource(images[: len(targets)], labels=targets, classes=("age", "size"))
        made.target_kind = "numbers"
        return made

    check_source(source((1.0, NAN), None, (2.0, -3.5)))
    check_source(mixed([source((1.0, 2.0)), source((3.0, 4.0))], [0.5, 0.5]))
    for targets, message in (
        ([(1.0,)], r"target\(0\) is \(1\.0,\), but .* None or tuples of 2 floats, one for each name in classes"),
        ([(1, 2)], r"target\(0\) is \(1, 2\), but .* None or tuples of 2 floats"),
        ([(1.0, float("inf"))], r"target\(0\) is \(1\.0, inf\), but .* finite or NaN"),
    ):
        with pytest.raises((AssertionError, ConfigError), match=message):
            check_source(source(*targets))


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
    keys = [f"{number}/1.png" for number in range(700)]
    train, held_out = (MemorySource(some, labels=[0] * 700, keys=keys) for some in (images, images[::-1]))
    tracemalloc.start()
    try:
        shared_images(train, held_out)  # 490,000 pairs
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def source_of(root: Path, names: list[str], inode: int | None = None) -> Samples:
    """Return a source of files. `inode` is given to all of them, as if they were on several disks."""
    inodes = [inode or (root / name).lstat().st_ino for name in names]
    return file_samples(root, names, inodes, Targets("class", ("a",), np.zeros(len(names), np.int64)))


def test_samples_without_a_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 target for 2 images"):
        file_samples(tmp_path, ["1.png", "2.png"], [1, 2], Targets.unknown("none", (), 1))


def test_every_file_of_an_inode_is_compared(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "3.png"):
        (tmp_path / name).write_bytes(b"image")
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out" / "4.png").hardlink_to(tmp_path / "2.png")
    train = source_of(tmp_path, ["1.png", "2.png"], inode=5)
    (fault,) = shared_files(train, source_of(tmp_path, ["3.png", "held-out/4.png"], inode=5), "test")
    assert fault.count == 1 and f"such as {tmp_path}/2.png and {tmp_path}/held-out/4.png;" in fault.text
    assert not list(shared_files(train, source_of(tmp_path, ["3.png"], inode=5), "test"))


def test_names_of_one_file_are_counted_once_and_lost_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"image")
    for name in ("2.png", "3.png", "4.png"):
        (tmp_path / name).hardlink_to(tmp_path / "1.png")
    train, test = source_of(tmp_path, ["1.png", "2.png"]), source_of(tmp_path, ["3.png", "4.png"])
    (fault,) = shared_files(train, test, "test")
    assert fault.count == 1 and f"such as {tmp_path}/1.png and {tmp_path}/3.png;" in fault.text
    (tmp_path / "3.png").unlink()
    (fault,) = shared_files(train, test, "test")
    assert fault.count == 1 and f"such as {tmp_path}/1.png and {tmp_path}/4.png;" in fault.text
