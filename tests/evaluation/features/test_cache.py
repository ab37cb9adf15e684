"""Tests of entries of the cache: their folder, similar entries, and files that are no features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import DataError
from vitrail.evaluation.features.cache import Entry, Identity, default_cache, map_features

IDENTITY = Identity("d" * 64, "w" * 64, Preprocess(image_size=(14, 21)), "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))


def test_the_cache_lies_beside_the_other_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache() == tmp_path / "cache" / "features"
    monkeypatch.delenv("VITRAIL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "vitrail" / "features"


def test_of_other_entries_the_closest_is_named(tmp_path: Path) -> None:
    def keep(identity: Identity) -> None:
        entry = Entry(tmp_path, identity, 2, 3)
        with entry.locked() as lock:
            assert lock is not None
            partial = entry.filling()
            partial.write(0, np.zeros((2, 3), np.float32), np.array([True, True]))
            partial.close()
            entry.finish(lambda row: "never")

    entry = Entry(tmp_path, IDENTITY, 2, 3)
    assert entry.others() is None
    keep(replace(IDENTITY, data="e" * 64))
    keep(replace(IDENTITY, data="d" * 16 + "e" * 48, weights="v" * 64))  # whose folder's name begins alike
    assert entry.others() is None
    keep(replace(IDENTITY, weights="v" * 64, precision="bf16"))
    assert entry.others() == "other weights, precision"
    keep(replace(IDENTITY, precision="bf16"))
    assert entry.others() == "other precision"
    for path in tmp_path.glob("*/entry.json"):
        path.write_text("{")
    assert entry.others() is None


def test_a_file_that_is_no_features_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    for array, message in (
        (np.zeros((3, 2), np.float32), r"holds float32 of \(3, 2\), not float32 of \(2, 3\)"),
        (np.zeros((2, 3)), r"holds float64 of \(2, 3\)"),
        (np.asfortranarray(np.zeros((2, 3), np.float32)), "not float32"),
    ):
        np.save(path, array)
        with pytest.raises(DataError, match=message):
            map_features(path, (2, 3))
    Image.new("L", (3, 3)).save(path, "PNG")
    with pytest.raises(DataError, match=r"features.npy cannot be read"):
        map_features(path, (2, 3))
    with pytest.raises(DataError, match="No such file"):
        map_features(tmp_path / "nothing.npy", (2, 3))
