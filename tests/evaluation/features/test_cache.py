"""Tests of entries of the cache: their folder, similar entries, and files that are no features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.evaluation.features.cache import Entry, Identity, default_cache

IDENTITY = Identity("d" * 64, "w" * 64, Preprocess(image_size=(14, 21)), "float32")


def test_the_cache_lies_beside_the_other_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
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
