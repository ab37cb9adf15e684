"""Tests of the bundled part of Fashion-MNIST, and of the ways to get the full set."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.server import Server
from tests.make import idx_bytes
from vitrail.data.formats import idx
from vitrail.data.formats.idx import BUNDLED, DEBIAN, find_idx, idx_samples, locate_fashion_mnist, read_idx
from vitrail.errors import DataError

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


def test_half_a_set_is_not_taken_for_the_whole(idx_folder: Callable[..., Path], cache: Path, mirror: Server) -> None:
    idx_folder(name="cache", suffix=".gz", train=[0, 1])
    assert locate_fashion_mnist(mirror=mirror.url, debian=NOWHERE) == cache / "fashion-mnist"


def test_a_download_is_verified_kept_and_not_repeated(cache: Path, mirror: Server) -> None:
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
