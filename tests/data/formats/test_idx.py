"""Tests of IDX files, valid and damaged."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.formats.idx import find_idx, idx_samples, read_idx
from vitrail.data.source import Source
from vitrail.errors import DataError

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files that each example overwrites."""
    return tmp_path_factory.mktemp("scratch")


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    name=st.sampled_from(["plain", "packed.gz"]),
    seed=st.integers(0, 99),
)
def test_arrays_of_any_shape_come_back(scratch: Path, write_idx: Write, shape: list[int], name: str, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    found = read_idx(write_idx(scratch / name, array))
    assert found.dtype == np.uint8 and found.shape == array.shape
    np.testing.assert_array_equal(found, array)


def test_the_format_is_the_published_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes.fromhex("00000802 00000002 00000003 010203 040506"))
    np.testing.assert_array_equal(read_idx(path), [[1, 2, 3], [4, 5, 6]])


NO_IDX = "file is not an IDX file of unsigned bytes: it begins with"
DAMAGED = "file is damaged: its header states the shape"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", f"{NO_IDX} nothing$"), (b"\0\0\x08", f"{NO_IDX} 000008$"), (b"<html>", f"{NO_IDX} 3c68746d$"),
        (bytes.fromhex("00000d01 00000001 00000000"), f"{NO_IDX} 00000d01$"),
        (bytes.fromhex("00010801 00000001 00"), f"{NO_IDX} 00010801$"),
        (bytes.fromhex("00000803 00000001"), rf"{DAMAGED} \(1,\), but 0 bytes follow$"),
        (bytes.fromhex("00000803 00000001 00000002"), rf"{DAMAGED} \(1, 2\), but 0 bytes follow$"),
        (bytes.fromhex("00000802 00000002 00000002 010203"), rf"{DAMAGED} \(2, 2\), but 3 bytes follow$"),
        (bytes.fromhex("00000801 00000002 010203"), rf"{DAMAGED} \(2,\), but 3 bytes follow$"),
        (bytes.fromhex("00000802 ffffffff ffffffff 01"), rf"{DAMAGED} \(4294967295, 4294967295\), but 1 bytes follow$"),
        (b"\0\0\x08\xff" + b"\0" * 1020, "is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_idx_or_damaged_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "file")


@given(share=st.floats(0, 0.99))
def test_gzipped_files_cut_anywhere_are_refused(scratch: Path, write_idx: Write, share: float) -> None:
    path = write_idx(scratch / "cut.gz", np.random.default_rng(0).integers(0, 256, (10, 8, 8), dtype=np.uint8))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DataError, match=r"cut\.gz"):
        read_idx(path)


def test_a_plain_or_damaged_file_named_gz_and_a_missing_file_cannot_be_read(tmp_path: Path, write_idx: Write) -> None:
    plain = write_idx(tmp_path / "plain", np.zeros(3)).rename(tmp_path / "plain.gz")
    with pytest.raises(DataError, match=r"cannot read .*plain\.gz: Not a gzipped file"):
        read_idx(plain)
    plain.write_bytes(gzip.compress(b"\0\0\x08\1\0\0\0\1x", mtime=0)[:12] + b"\xff" * 12)
    with pytest.raises(DataError, match="cannot read"):
        read_idx(plain)
    with pytest.raises(DataError, match=r"cannot read .*missing: .*No such file"):
        read_idx(tmp_path / "missing")


def test_source_gives_grey_images_their_labels_and_numbers(tmp_path: Path, write_idx: Write) -> None:
    images = np.arange(24).reshape(3, 4, 2)
    paths = write_idx(tmp_path / "i", images), write_idx(tmp_path / "l.gz", np.array([2, 0, 1]))
    assert idx_samples(*paths, ("cat", "dog", "cow", "owl")).classes == ("cat", "dog", "cow", "owl")
    source = idx_samples(*paths)
    assert isinstance(source, Source)
    assert len(source) == 3 and source.classes == ("0", "1", "2")
    sample = source[1]
    assert (sample.key, sample.target, source.key(1), source.target(1)) == ("1", 0, "1", 0)
    np.testing.assert_array_equal(sample.image, images[1][:, :, None])
    with pytest.raises(DataError, match=r"l\.gz has the label 2, but the 2 classes are numbered from 0"):
        idx_samples(*paths, ("cat", "dog"))


@pytest.mark.parametrize(
    ("images", "labels"), [((3, 2, 2), (2,)), ((2, 4), (2,)), ((2, 2, 2), (2, 1)), ((2, 2, 2, 3), (2,))]
)
def test_arrays_that_do_not_pair_up_are_refused(
    tmp_path: Path, write_idx: Write, images: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    paths = write_idx(tmp_path / "i", np.zeros(images)), write_idx(tmp_path / "l", np.zeros(labels))
    with pytest.raises(DataError, match=r"images must be \(n, height, width\) and labels \(n,\)") as caught:
        idx_samples(*paths)
    assert str(images) in str(caught.value) and str(labels) in str(caught.value)


@pytest.mark.parametrize(
    ("split", "prefix", "suffix"),
    [
        ("train", "train", ""), ("test", "t10k", ".gz"), ("test", "test", ""), ("validation", "val", ".gz"),
        ("validation", "validation", ""),
    ],
)  # fmt: skip
def test_splits_are_found_by_name(idx_folder: Callable[..., Path], split: str, prefix: str, suffix: str) -> None:
    root = idx_folder(suffix=suffix, **{prefix: [0, 1]})
    expected = root / f"{prefix}-images-idx3-ubyte{suffix}", root / f"{prefix}-labels-idx1-ubyte{suffix}"
    assert find_idx(root, split) == expected
    assert all(find_idx(root, other) is None for other in {"train", "test", "validation"} - {split})
