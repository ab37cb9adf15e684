"""Tests of feature files: what is written can be read, and messages name files that do not fit."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets import multi_labels, number_targets, single_labels
from vitrail.data.batch import Skipped
from vitrail.data.formats import parquet
from vitrail.data.targets import Targets
from vitrail.errors import DataError, SaveError
from vitrail.evaluation.features import feature_files
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.features.feature_files import load_features, save_features, save_parquet
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.files import partial_path

CLASSES = ("rose", "daisy", "oak")


def make(labels: list[int], *, targets: list[list[int]] | None = None, width: int = 4) -> FeatureSet:
    count = len(labels)
    return FeatureSet(
        np.random.default_rng(count).standard_normal((count, width)).astype(np.float32),
        single_labels(np.array(labels, np.int64), 3)
        if targets is None
        else multi_labels(np.array(targets, np.uint8).reshape(count, 3)),
        tuple(f"a folder/{row}.png" for row in range(count)),
        CLASSES,
        (Skipped("broken.png", "is empty (0 bytes)"),),
    )


def assert_same(one: FeatureSet, other: FeatureSet) -> None:
    assert np.array_equal(one.features, other.features) and one.features.shape == other.features.shape
    assert one.truth.kind == other.truth.kind and np.array_equal(one.truth.dense, other.truth.dense)
    assert (one.keys, one.classes, one.skipped) == (other.keys, other.classes, other.skipped)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_reason_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "FEATURES", "/dev/full")
    with pytest.raises(SaveError, match="No space left on device"):
        save_features(make([0, 1] * 5000), tmp_path / "features")


@settings(max_examples=12)  # each of which waits for the disk twice
@given(st.lists(st.integers(-1, 2), max_size=20), st.integers(1, 9))
def test_what_is_saved_is_loaded_and_mapped(labels: list[int], width: int) -> None:
    features = make(labels, width=width)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some" / "features"
        save_features(features, path, {"model": "m"})
        loaded = load_features(str(path))
        assert_same(loaded, features)
        assert isinstance(loaded.features, np.memmap) and not loaded.features.flags.writeable
        assert json.loads((path / "features.json").read_text())["about"] == {"model": "m"}
        assert sorted(entry.name for entry in path.iterdir()) == ["features.json", "features.npy", "keys.jsonl"]
        save_features(make([1]), path)
        assert len(load_features(path)) == 1


@pytest.mark.parametrize("kind", ["float64", "float16", ">f4"])
def test_features_of_another_number_format_are_saved_as_float32(kind: str, tmp_path: Path) -> None:
    features = make([0, 1, 2])
    object.__setattr__(features, "features", features.features.astype(kind))
    save_features(features, tmp_path / "out")
    assert_same(load_features(tmp_path / "out"), features)


def test_several_labels_and_names_that_are_no_text(tmp_path: Path) -> None:
    features = make([-1, -1, -1], targets=[[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    object.__setattr__(features, "keys", (os.fsdecode(b"\xff.png"), "two\nlines", 'a "name" \N{SNOWMAN}'))
    save_features(features, tmp_path / "out")
    assert_same(load_features(tmp_path / "out"), features)
    lines = (tmp_path / "out" / "keys.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == [[0, 2], [], [1]]


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing holds no features: it has no features.json$"):
        load_features(tmp_path / "nothing")
    for split in ("train", "test"):
        save_features(make([1]), tmp_path / split)
    with pytest.raises(DataError, match="it has those of test, train: name one"):
        load_features(tmp_path)
    vectors = tmp_path / "train" / "features.npy"
    vectors.write_bytes(vectors.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"features.npy cannot be read"):
        load_features(tmp_path / "train")
    vectors.unlink()
    with pytest.raises(DataError, match="No such file"):
        load_features(tmp_path / "train")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("features.json", '"format": 2', '"format": 3', "has format 3, written by a newer version"),
        ("features.json", '"images"', '"pictures"', "unknown field 'pictures'.* vitrail embed"),
        ("features.json", '"format": 2', '"format": 1', "has format 1.* vitrail embed"),
        ("features.json", "{", "", "features.json is damaged"),
        ("features.json", '"width": 4', '"width": 5', r"holds float32 of \(3, 4\), not float32 of \(3, 5\)"),
        ("features.json", '"images": 3', '"images": 2', r"not float32 of \(2, 4\)"),
        ("keys.jsonl", '"label": 2', '"label": 3', "line 2 cannot be used: 3 is not a valid target for 3"),
        ("keys.jsonl", '"label": 2', '"label": [2]', "line 2 cannot be used"),
        ("keys.jsonl", '"label": 2', '"label": true', "line 2 cannot be used"),
        ("keys.jsonl", '"label": 2', '"class": 2', "line 2 cannot be used: 'label'"),
        ("keys.jsonl", '"a folder/1.png"', "17", "line 2 cannot be used"),
        ("keys.jsonl", '{"key": "a folder/1.png", "label": 2}\n', "", "has 2 lines for 3 features"),
        ("keys.jsonl", '"label": 2}\n', '"label": 2}\n{"key": "more", "label": 1}\n', "there are 3 features"),
        ("keys.jsonl", '"label": 2}\n', '"label": 2', "line 2 cannot be used"),
    ],
)
def test_files_that_do_not_fit_are_refused(file: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    save_features(make([0, 2, -1]), tmp_path / "out")
    path = tmp_path / "out" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        load_features(tmp_path / "out")


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_parquet_has_keys_labels_and_vectors(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "PARQUET_ROWS", rows)
    features = make([0, 2, -1, 1, 0])
    object.__setattr__(features, "keys", (os.fsdecode(b"\xff.png"), *features.keys[1:]))
    (tmp_path / "new").mkdir()
    partial_path(tmp_path / "new" / "train.parquet").write_bytes(b"left by a killed process")
    save_parquet(features, tmp_path / "new" / "train.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "new" / "train.parquet")
    assert table["key"].to_pylist() == ["\\udcff.png", *features.keys[1:]]
    assert table["label"].to_pylist() == [0, 2, None, 1, 0]
    assert str(table.schema.field("feature").type) == "fixed_size_list<element: float>[4]"
    assert np.array_equal(np.array(table["feature"].to_pylist(), np.float32), features.features)
    assert tuple(json.loads(table.schema.metadata[b"classes"])) == CLASSES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]


def test_parquet_of_several_labels_and_of_nothing(tmp_path: Path) -> None:
    save_parquet(make([-1, -1], targets=[[1, 0, 1], [0, 0, 0]]), tmp_path / "some.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "some.parquet")["label"].to_pylist() == [[0, 2], []]
    (tmp_path / "none.parquet").symlink_to(tmp_path / "linked.parquet")
    save_parquet(make([]), tmp_path / "none.parquet")
    assert not (tmp_path / "linked.parquet").is_symlink() and (tmp_path / "none.parquet").is_symlink()
    assert pyarrow.parquet.read_table(tmp_path / "none.parquet").num_rows == 0


def test_parquet_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"could not save features to .*file/train.parquet"):
        save_parquet(make([1]), tmp_path / "file" / "train.parquet")
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(SaveError, match=r"could not save features to .*folder.parquet"):
        save_parquet(make([1]), tmp_path / "folder.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.parquet"]
    parquet.pyarrow.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"writing Parquet needs pyarrow: pip install 'vitrail\[parquet\]'"):
        save_parquet(make([1]), tmp_path / "train.parquet")


def test_numbers_are_saved_and_loaded(tmp_path: Path) -> None:
    truth = number_targets(np.array([[1.5, -3e30], [math.nan, 7]]))
    features = FeatureSet(np.ones((2, 4), np.float32), truth, ("a", "b"), ("age", "height"))
    save_features(features, tmp_path / "out")
    assert '{"key": "b", "numbers": [null, 7.0]}' in (tmp_path / "out" / "keys.jsonl").read_text()
    found = load_features(tmp_path / "out").truth
    assert found.names == ("age", "height") and np.array_equal(found.values, truth.dense, equal_nan=True)
    save_parquet(features, tmp_path / "out.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet")["numbers"].to_pylist() == [[1.5, -3e30], [None, 7.0]]


def test_texts_of_images_are_their_labels_in_an_index(tmp_path: Path) -> None:
    texts = Targets.of([("a bee", "an insect"), None, ("a wasp",)], "texts", ())
    features = replace(make([0, 1, 2]), truth=texts)
    save_features(features, tmp_path / "out")
    assert FeatureIndex.open(tmp_path / "out").labels == (["a bee", "an insect"], [], ["a wasp"])
    save_parquet(features, tmp_path / "out.parquet")
    written = pyarrow.parquet.read_table(tmp_path / "out.parquet")["label"].to_pylist()
    assert written == [["a bee", "an insect"], [], ["a wasp"]]
