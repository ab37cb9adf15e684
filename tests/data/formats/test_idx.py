"""Tests of IDX files, valid and damaged, of the bundled part of Fashion-MNIST, and of the ways to get the full set."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.server import Server
from tests.make import idx_bytes
from vitrail.data.formats import idx
from vitrail.data.formats.idx import BUNDLED, DEBIAN, find_idx, idx_samples, locate_fashion_mnist, read_idx
from vitrail.data.source import Source
from vitrail.errors import DataError

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files that each example overwrites."""
    return tmp_path_factory.mktemp("scratch")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["plain", "packed.gz"]), st.integers(0, 99))
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


FILES = tuple(idx.SHA256)
NOWHERE = Path("/nowhere")


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve four small IDX files. Their checksums replace the published ones."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    for number, name in enumerate(FILES):
        shape = (3, 28, 28) if "images" in name else (3,)
        data = idx_bytes(np.random.default_rng(number).integers(0, 10, shape, dtype=np.uint8))
        server.files[f"/{name}"] = gzip.compress(data)
        monkeypatch.setitem(idx.SHA256, name, hashlib.sha256(data).hexdigest())
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("split", "each"), [("train", 1000), ("test", 200)])
def test_bundled_holds_as_many_images_of_each_class(split: str, each: int) -> None:
    source = idx_samples(*find_idx(BUNDLED, split), idx.FASHION_MNIST)
    images = np.stack([source[index].image for index in range(len(source))])
    assert images.shape == (10 * each, 28, 28, 1)
    assert np.bincount(source.targets.values).tolist() == [each] * 10
    assert images.reshape(10 * each, -1).any(axis=1).all()
    assert len(np.unique(images.reshape(10 * each, -1), axis=0)) > 9.9 * each


def test_bundled_is_small_and_carries_its_licence() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 6_000_000
    assert sorted(path.name for path in BUNDLED.iterdir()) == sorted([*FILES, "LICENSE"])
    notice = (BUNDLED / "LICENSE").read_text()
    assert "The MIT License (MIT)" in notice and "Zalando SE" in notice and "Permission is hereby granted" in notice


@pytest.mark.skipif(not find_idx(DEBIAN, "train"), reason="the full set is not installed")
@pytest.mark.parametrize(("split", "each"), [("train", 1000), ("test", 200)])
def test_bundled_is_the_first_of_each_class_of_the_full_set(split: str, each: int) -> None:
    images, labels = (read_idx(path) for path in find_idx(DEBIAN, split))
    first = np.sort(np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(10)]))
    bundled = [read_idx(path) for path in find_idx(BUNDLED, split)]
    np.testing.assert_array_equal(bundled[0], images[first])
    np.testing.assert_array_equal(bundled[1], labels[first])


@pytest.mark.skipif(not find_idx(DEBIAN, "train"), reason="the full set is not installed")
def test_checksums_are_those_of_the_full_set() -> None:
    found = {name: hashlib.sha256(gzip.decompress((DEBIAN / name).read_bytes())).hexdigest() for name in FILES}
    assert found == idx.SHA256


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("place", "variable"),
    [("mine/fashion-mnist", "mine"), ("mine", "mine"), ("debian", "other"), (".cache/vitrail/fashion-mnist", "")],
)
def test_a_set_on_the_disk_is_found_without_a_download(
    tmp_path: Path, idx_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, mirror: Server, place: str,
    variable: str, suffix: str,
) -> None:  # fmt: skip
    """Under the variable's folder, in Debian's, and without the variable in the cache in the home folder."""
    debian = idx_folder(name="debian", suffix=suffix, train=[0, 1], t10k=[1])
    root = debian if place == "debian" else idx_folder(name=place, suffix=suffix, train=[0, 1], t10k=[1])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VITRAIL_DATA")
    if variable:
        monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / variable))
    assert locate_fashion_mnist(mirror=mirror.url, debian=debian) == root
    assert not mirror.requests and not (tmp_path / "other").exists()


def test_a_download_is_verified_and_not_repeated(idx_folder: Callable[..., Path], cache: Path, mirror: Server) -> None:
    idx_folder(name="cache", suffix=".gz", train=[0, 1])  # half a set is not taken for the whole
    folder = locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE)
    assert folder == cache / "fashion-mnist"
    assert {f"/{path.name}": path.read_bytes() for path in folder.iterdir()} == mirror.files
    assert [path for _, path, _ in mirror.requests] == [f"/{name}" for name in FILES]
    assert locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE) == folder and len(mirror.requests) == 4
    assert len(idx_samples(*find_idx(folder, "train"))) == 3


def test_the_partial_file_of_another_process_stays(cache: Path, mirror: Server) -> None:
    """Processes that download at once do not disturb each other."""
    other = cache / "fashion-mnist" / f"{FILES[0]}.partial"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"half of")
    folder = locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE)
    assert other.read_bytes() == b"half of"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, other.name])


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_checksum_is_refused_and_not_kept(cache: Path, mirror: Server, position: int) -> None:
    name = FILES[position]
    altered = bytearray(gzip.decompress(mirror.files[f"/{name}"]))
    altered[-1] ^= 1
    mirror.files[f"/{name}"] = gzip.compress(bytes(altered))
    with pytest.raises(DataError, match="the download was discarded") as caught:
        locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE)
    for part in (mirror.url + name, hashlib.sha256(altered).hexdigest(), idx.SHA256[name]):
        assert part in str(caught.value)
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == sorted(FILES[:position])


@pytest.mark.parametrize("served", [b"<html>Sign in to the network</html>", "cut", None, "no server"])
def test_a_broken_download_keeps_nothing_and_advises(cache: Path, mirror: Server, served: bytes | str | None) -> None:
    whole = mirror.files[f"/{FILES[0]}"]
    mirror.files[f"/{FILES[0]}"] = whole[: len(whole) // 2] if isinstance(served, str) else served
    if served == "no server":
        mirror.close()
    with pytest.raises(DataError) as caught:
        locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE)
    message = str(caught.value)
    begin = f"Fashion-MNIST is neither under {cache} nor in {NOWHERE}, and {mirror.url} cannot be downloaded"
    assert message.startswith(begin)
    for advice in ("apt-get install dataset-fashion-mnist", "set VITRAIL_DATA", "--data bundled"):
        assert advice in message
    assert not [path for path in cache.rglob("*") if path.is_file()]
