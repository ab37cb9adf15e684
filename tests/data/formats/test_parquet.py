"""Tests of Parquet files of images that pyarrow wrote in the ways of other programs."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import encode, targets_of
from vitrail.data.formats import parquet
from vitrail.data.formats.parquet import ParquetFile, looks_like_parquet, open_parquet
from vitrail.data.source import Source, target_kind
from vitrail.data.sources import open_data, open_whole
from vitrail.data.splits import Splits, choice_in
from vitrail.errors import DataError, SaveError
from vitrail.testing import check_source

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parquet"


RANDOM = np.random.default_rng(0)
PICTURES = [
    encode(RANDOM.integers(0, 256, (5 + number % 4, 9 - number % 5, 3), dtype=np.uint8), ("PNG", "JPEG")[number % 2])
    for number in range(30)
]
"""Encoded images of odd sizes. No two of them are equal."""


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    is_dictionary = pa.types.is_dictionary(kind)
    return pa.array(values, kind.value_type).dictionary_encode() if is_dictionary else pa.array(values, kind)


def images(pieces: Sequence[bytes | None], kind: pa.DataType = IMAGE) -> pa.Array:
    """Return a column of images. None is a row without an image."""
    if pa.types.is_struct(kind):
        return pa.array([piece if piece is None else {"bytes": piece, "path": None} for piece in pieces], kind)
    return column(pieces, kind)


def class_label(*names: str) -> dict[str, Any]:
    return {"names": list(names), "_type": "ClassLabel"}


def write(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write a Parquet file whose schema describes the columns as Hugging Face's library does."""
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"row_group_size": 7, **options})
    return path


def labelled(path: Path, labels: Any, *names: str, **options: Any) -> Path:
    """Write a Parquet file of images with these labels, whose classes are named in the schema if names are given."""
    features = {"label": class_label(*names)} if names else None
    return write(path, {"image": images(PICTURES[: len(labels)]), "label": labels}, features, **options)


def samples_of(source: Source | None) -> list[tuple[str, Any, Any]]:
    return [(sample.key, sample.image, sample.target) for sample in map(source.__getitem__, range(len(source)))]


def opened(path: Path | str, classes: tuple[str, ...] | None = None) -> Splits:
    """Open a file, of which "?" and a choice of columns can follow the path."""
    location, choice = choice_in(str(path))
    return open_parquet(Path(location), classes, choice=choice)


def message(path: Path | str, classes: tuple[str, ...] | None = None, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as caught:
        opened(path, classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        (IMAGE, "none"),
        (pa.struct({"path": pa.string(), "bytes": pa.large_binary()}), "snappy"),
        (pa.struct({"bytes": pa.binary()}), "gzip"),
        (pa.binary(), "zstd"),
        (pa.large_binary(), "brotli"),
        (pa.binary_view(), "none"),
        (pa.dictionary(pa.int32(), pa.binary()), "snappy"),
    ],
    ids=str,
)
def test_the_contract_of_a_source(tmp_path: Path, kind: pa.DataType, compression: str) -> None:
    labels = [number % 3 for number in range(30)]
    path = write(
        tmp_path / "a.parquet",
        {"width": list(range(30)), "image": images(PICTURES, kind), "label": labels, "caption": ["x"] * 30},
        {"label": class_label("rose", "daisy", "tulip")},
        compression=compression,
    )
    splits = opened(path, None)
    assert splits.validation is None and splits.test is None and splits.classes == ("rose", "daisy", "tulip")
    assert samples_of(splits.train) == [(f"a.parquet:{n}", PICTURES[n], labels[n]) for n in range(30)]
    check_source(splits.train)


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_any_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    row = st.tuples(st.none() | st.binary(max_size=40), st.none() | st.integers(-1, 4))
    rows = data.draw(st.lists(row, min_size=1, max_size=40))
    path = write(
        tmp_path_factory.mktemp("any") / "a.parquet",
        {"img": images([piece for piece, _ in rows]), "label": pa.array([label for _, label in rows], pa.int64())},
        {"label": class_label(*"abcde")},
        row_group_size=data.draw(st.integers(1, 41)),
        use_dictionary=data.draw(st.booleans()),
        data_page_size=data.draw(st.sampled_from([1, 64, 2**20])),
    )
    source = opened(path, None).train
    expected = [(piece or b"", None if label == -1 else label) for piece, label in rows]
    assert [sample[1:] for sample in samples_of(source)] == expected
    check_source(source, decodes=False)


def test_several_files_are_one_split(tmp_path: Path) -> None:
    for number, some in enumerate((PICTURES[:4], PICTURES[4:4], PICTURES[4:11])):
        label = pa.array([number] * len(some), pa.int32())
        write(tmp_path / f"data/train-{number:05}-of-00003.parquet", {"image": images(some), "label": label})
    source = open_parquet(tmp_path, None).train
    check_source(source)
    assert [sample.image for sample in map(source.__getitem__, range(11))] == PICTURES[:11]
    assert [source.key(index) for index in (0, 3, 4, 10)] == [
        f"data/train-{file:05}-of-00003.parquet:{row}" for file, row in ((0, 0), (0, 3), (2, 0), (2, 6))
    ]
    assert source.classes == ("0", "1", "2")
    assert source[-1].key == source.key(10) and source[-1].target == source.target(10)


@pytest.mark.parametrize(
    "names",
    [
        {"train": "data/train-00000-of-00001.parquet", "validation": "data/validation-00000-of-00001-0f3.parquet",
         "test": "data/test-00000-of-00001.parquet"},
        {"train": "plain/train/0000.parquet", "validation": "plain/val/0000.parquet", "test": "plain/test/0.parquet"},
    ],
)  # fmt: skip
def test_splits_by_names(tmp_path: Path, names: dict[str, str]) -> None:
    for place, name in enumerate(names.values()):
        write(tmp_path / "set" / name, {"image": images(PICTURES[place : place + 2]), "label": [0, 1]})
    (tmp_path / "set/.cache").mkdir()
    (tmp_path / "set/.cache/other.parquet").write_bytes(b"hidden")
    splits = open_parquet(tmp_path / "set", None)
    for place, split in enumerate(names):
        assert [piece for _, piece, _ in samples_of(getattr(splits, split))] == PICTURES[place : place + 2]
    alone = opened(tmp_path / "set" / names["test"])
    assert len(alone.train) == 2 and alone.test is None, "a file is to train on whatever its name"


def test_folders_of_several_data_sets(tmp_path: Path) -> None:
    for name in ("large/train", "small/train", "small/test"):
        labelled(tmp_path / f"{name}-00000-of-00001.parquet", [0] * 30)
    assert "several data sets, in the folders large, small; open one of them, such as " in message(tmp_path)
    assert len(open_parquet(tmp_path / "small", None).test) == 30


def test_unlabelled_rows_have_none(tmp_path: Path) -> None:
    labelled(tmp_path / "train.parquet", [1, -1, None, 0], "a", "b")
    labelled(tmp_path / "val.parquet", [-1, 1], "a", "b")
    labelled(tmp_path / "test.parquet", [-1, -1], "a", "b")
    splits = open_parquet(tmp_path, None)
    assert targets_of(splits.train) == [1, None, None, 0] and targets_of(splits.validation) == [None, 1]
    assert splits.test is None
    assert splits.notes[0] == f"{tmp_path}: the test split is skipped, because none of its images has a label"
    write(tmp_path / "test.parquet", {"image": images(PICTURES[6:8])})
    assert open_parquet(tmp_path, None).notes[0] == splits.notes[0]
    labelled(tmp_path / "test.parquet", pa.array([], pa.int64()), "a", "b")
    assert "the test split is skipped, because it is empty" in open_parquet(tmp_path, None).notes[0]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_words_are_classes_in_their_order(tmp_path: Path, kind: pa.DataType) -> None:
    labelled(tmp_path / "train-0.parquet", column(["rose", "daisy"], kind))
    labelled(tmp_path / "train-1.parquet", column(["tulip", None, "daisy"], kind))
    labelled(tmp_path / "test.parquet", column(["tulip", "rose"], kind))
    splits = open_parquet(tmp_path, None)
    assert splits.classes == ("daisy", "rose", "tulip")
    assert targets_of(splits.train) == [1, 0, 2, None, 0] and targets_of(splits.test) == [2, 1]
    given = ("tulip", "rose", "moss", "daisy")
    splits = open_parquet(tmp_path, given)
    assert splits.classes == given and targets_of(splits.train) == [1, 3, 0, None, 3]
    labelled(tmp_path / "test.parquet", column(["tulip", "fern", "rose"], kind))
    (fault,) = (splits := open_parquet(tmp_path, None)).faults
    assert fault.text.endswith("the test split has unknown classes: fern; the known classes are: daisy, rose, tulip")
    assert (fault.kind, fault.severity, fault.count) == ("unknown-class", "error", 1)
    assert splits.classes == ("daisy", "rose", "tulip") and targets_of(splits.test) == [2, None, 1]


@pytest.mark.parametrize(
    ("train", "validation", "largest", "found", "count"),
    [
        (pa.array([0, 1]), pa.array([1, 7, 0]), 7, [1, None, 0], 1),
        (pa.array([[0], [1, 0]]), pa.array([[7, 1, 8, 9], [], [5], [0, 1]]), 9, [(1,), (), (), (0, 1)], 2),
    ],
)
def test_images_with_labels_that_only_a_held_out_split_has_are_counted(
    tmp_path: Path, train: pa.Array, validation: pa.Array, largest: int, found: Any, count: int
) -> None:
    labelled(tmp_path / "train.parquet", train)
    labelled(tmp_path / "val.parquet", validation)
    (fault,) = (splits := open_parquet(tmp_path, None)).faults
    text = f"has the label {largest}, but the labels of 2 classes go from 0 to 1"
    assert fault.text.endswith(text) and fault.count == count
    assert f"counts {count} image" in fault.training and targets_of(splits.validation) == found
    with pytest.raises(DataError, match=text):
        open_data(str(tmp_path), validation_share=0.0)


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        (pa.list_(pa.int64()), {"feature": class_label("a", "b", "c"), "_type": "Sequence"}),
        (pa.large_list(pa.int8()), {"feature": class_label("a", "b", "c"), "_type": "List"}),
        (pa.list_(pa.int64(), 2), [class_label("a", "b", "c")]),
        (pa.list_(pa.int64()), None),
    ],
    ids=["Sequence", "List", "bare", "none"],
)
def test_lists_are_several_labels(tmp_path: Path, kind: pa.DataType, feature: dict[str, Any] | None) -> None:
    fixed = pa.types.is_fixed_size_list(kind)
    rows = [[2, 0], [1, 1], [-1, 0]] if fixed else [[2, 0], [], None, [1, 1], [-1], [0, 1, 2]]
    columns = {"image": images(PICTURES[: len(rows)]), "labels": pa.array(rows, kind)}
    for number in range(2):
        write(tmp_path / f"train-{number}.parquet", columns, {"labels": feature})
    source = open_parquet(tmp_path, None).train
    expected = [(0, 2), (1,), (0,)] if fixed else [(0, 2), (), (), (1,), (), (0, 1, 2)]
    assert targets_of(source) == expected * 2 and target_kind(source) == "classes"
    assert source.classes == (("0", "1", "2") if feature is None else ("a", "b", "c"))
    check_source(source)


def test_without_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"image": images(PICTURES[:3]), "category": ["x", "y", "x"]})
    splits = opened(path, None)
    assert splits.classes == () and targets_of(splits.train) == [None] * 3
    assert "has no column of labels" in splits.notes[0] and "category (string)" in splits.notes[0]
    check_source(splits.train)
    assert opened(f"{path}?label=category", None).classes == ("x", "y")
    with pytest.raises(DataError, match=r"has no labels(.|\n)*category \(string\), add \?label="):
        open_data(str(path), validation_share=0.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [(pa.array([True, False, None]), [1, 0, None]), (pa.array([2, 0, 1], pa.uint8()), [2, 0, 1]),
     (pa.nulls(3), [None] * 3), (pa.array([1.0, None, 0.0, float("nan"), 2.0]), [1, None, 0, None, 2])],
)  # fmt: skip
def test_numbers_of_other_types(tmp_path: Path, values: pa.Array, expected: list[Any]) -> None:
    source = open_parquet(labelled(tmp_path / "a.parquet", values), None).train
    count = max([0, *(label + 1 for label in expected if label is not None)])
    assert targets_of(source) == expected and source.classes == tuple(map(str, range(count)))


def test_a_models_classes(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.parquet", [0, 1, -1], "x", "y")
    splits = opened(path, ("y", "z", "x"))
    assert splits.classes == ("y", "z", "x") and targets_of(splits.train) == [2, 0, None]
    assert "unknown classes: y; the known classes are: x, z" in message(path, ("x", "z"))
    path = labelled(tmp_path / "b.parquet", [0, 1, 2])
    splits = opened(path, ("0", "1", "10", "2"))
    assert splits.classes == ("0", "1", "10", "2") and targets_of(splits.train) == [0, 1, 3]
    assert "unknown classes: 0, 1, 2; the known classes are: y, z, x" in message(path, ("y", "z", "x"))
    assert "unknown classes: 2; the known classes are: 0, 1" in message(path, ("0", "1"))


def test_two_classes_of_one_name(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.parquet", [2, 1, 0], "crane", "maillot", "crane")
    splits = opened(path, None)
    assert splits.classes == ("crane", "maillot", "crane (2)") and targets_of(splits.train) == [2, 1, 0]
    assert targets_of(opened(path, splits.classes).train) == [2, 1, 0]


def test_columns_by_what_the_schema_says(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        {"id": [7, 8], "scan": images(PICTURES[:2], pa.binary()), "thumbnail": pa.array([b"", b""]), "species": [1, 0]},
        {"scan": {"_type": "Image"}, "species": class_label("a", "b")},
    )
    assert samples_of(opened(path, None).train) == [("a.parquet:0", PICTURES[0], 1), ("a.parquet:1", PICTURES[1], 0)]


def test_columns_are_chosen_where_there_are_several(tmp_path: Path, cache: Path) -> None:
    columns = {"left": images(PICTURES[:2]), "right": images(PICTURES[2:4]), "id": [5, 6]}
    features = {"fine_label": class_label("a", "b"), "coarse_label": class_label("c", "d")}
    path = write(tmp_path / "a.parquet", {**columns, "fine_label": [0, 1], "coarse_label": [1, 1]}, features)
    assert "several columns of images: left, right; choose one by adding, for example, ?image=left" in message(path)
    left = Path(f"{path}?image=left")
    assert "several columns of labels: fine_label, coarse_label; choose one by adding" in message(left)
    splits = opened(f"{path}?image=right&label=coarse_label", None)
    assert splits.classes == ("c", "d")
    assert samples_of(splits.train) == [("a.parquet:0", PICTURES[2], 1), ("a.parquet:1", PICTURES[3], 1)]
    assert not any("unpacked" in note for note in opened(f"{path}?label=fine_label&image=right").notes)
    assert len(list(cache.iterdir())) == 1
    assert "has no column 'coarse'; nearest: coarse_label" in message(Path(f"{path}?image=left&label=coarse"))
    assert "has no column 'up'; " in message(Path(f"{path}?image=up"))
    assert "column 'id' has the type int64, which holds no images" in message(Path(f"{path}?image=id"))
    for query in ("", "label", "label=", "labels=id", "label=id&x=1"):
        assert f"ends in ?{query}, which chooses nothing; write ?image=COLUMN" in message(Path(f"{path}?{query}"))


def test_a_question_mark_in_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "why?label=x.parquet", {"image": images(PICTURES[:2]), "label": [0, 1], "x": [1, 0]})
    assert targets_of(opened(path, None).train) == [0, 1]
    assert targets_of(opened(f"{path}?label=x", None).train) == [1, 0]


def test_what_looks_like_parquet(tree: Callable[..., Path]) -> None:
    root = tree("a/x.parquet", "a/banner.png", "b/data/x.PARQUET", "c/d/e/x.parquet", "f/g/h/i/x.parquet", "j/k/1.png",
                "l/.m/x.parquet")  # fmt: skip
    assert {name for name in "abcfjlz" if looks_like_parquet(root / name)} == {"a", "b", "c"}
    assert looks_like_parquet(Path("nowhere/x.parquet"))


def test_images_by_their_paths(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "images").mkdir(parents=True)
    (folder / "images/1.png").write_bytes(PICTURES[1])
    (tmp_path / "outside.png").write_bytes(PICTURES[2])

    def with_path(path: str) -> Path:
        rows = [{"bytes": PICTURES[0], "path": "nowhere.png"}, {"bytes": None, "path": path}]
        return write(folder / "a.parquet", {"image": pa.array(rows, IMAGE), "label": [0, 1]})

    source = open_parquet(with_path("images/1.png"), None).train
    assert [source[0].image, source[1].image] == PICTURES[:2]
    for bad in ("images/2.png", "../outside.png", str(tmp_path / "outside.png"), "images"):
        text = message(with_path(bad))
        assert f"row 1: the row has no image but only the path {bad!r}, and the folder {folder} does" in text


def test_images_are_laid_out_once_and_anew_when_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = labelled(tmp_path / "a.parquet", [0, 1])
    notes = opened(path, None).notes
    size = sum(map(len, PICTURES[:2]))
    assert len(notes) == 1 and f"unpacked once into {cache} ({size / 1e6:.2f} MB)" in notes[0]
    (laid_out,) = cache.iterdir()
    before = laid_out.stat()
    first = opened(path, None)
    assert first.notes == () and laid_out.stat().st_mtime_ns == before.st_mtime_ns
    assert before.st_size == size + 3 * 8 + 24  # the images, where each begins, and the end
    write(path, {"image": images(PICTURES[2:4]), "label": [0, 1]})
    os.utime(path, ns=(1, 1))
    again = opened(path, None)
    assert len(again.notes) == 1 and again.train[0].image == PICTURES[2] and first.train[0].image == PICTURES[0]


def test_a_replaced_file_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    sizes = set()
    for pieces in ([b"first", b"other"], [b"other", b"first"]):
        other = write(tmp_path / "new", {"image": images(pieces), "label": [0, 1]}, None, **plain)
        os.utime(other, (10**9, 10**9))
        other.replace(path)
        sizes.add(path.stat().st_size)
        assert [sample.image for sample in map(opened(path, None).train.__getitem__, range(2))] == pieces
    assert len(sizes) == 1


@pytest.mark.parametrize("more", [{}, {"write_statistics": False}])
def test_images_of_a_file_without_statistics_or_one_image_stay_unpacked(tmp_path: Path, more: dict[str, bool]) -> None:
    rows = [{"bytes": picture, "path": f"once/{place}.png"} for place, picture in enumerate(PICTURES[:3])]
    path = write(tmp_path / "a.parquet", {"image": pa.array([*rows, None], IMAGE), "label": [0, 1, 1, 0]}, **more)
    assert ParquetFile("a.parquet", path, "").files_beside("image") == ""  # as in a cache of an earlier version


def test_a_changed_file_beside_is_read_again(tmp_path: Path) -> None:
    rows = [{"bytes": PICTURES[0], "path": "a.png"}, {"bytes": None, "path": "b.png"}, None]
    (tmp_path / "b.png").write_bytes(PICTURES[1])
    path = write(tmp_path / "a.parquet", {"image": pa.array(rows, IMAGE), "label": [0, 1, 1]}, row_group_size=1)
    before = samples_of(opened(path).train)
    assert [image for _, image, _ in before] == [PICTURES[0], PICTURES[1], b""]
    assert samples_of(opened(path).train) == before
    (tmp_path / "b.png").write_bytes(PICTURES[2])
    assert [image for _, image, _ in samples_of(opened(path).train)] == [PICTURES[0], PICTURES[2], b""]


def test_damage_to_what_was_laid_out(tmp_path: Path, cache: Path) -> None:
    path = labelled(tmp_path / "a.parquet", [0, 1, 2] * 10)
    source = opened(path, None).train
    (laid_out,) = cache.iterdir()
    whole = laid_out.read_bytes()
    laid_out.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="the file is truncated"):
        source[29]
    assert opened(path, None).train[29].image == PICTURES[29] and laid_out.read_bytes() == whole
    laid_out.unlink()
    with pytest.raises(DataError, match="No such file"):
        source[29]


def test_a_disk_that_is_too_small(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = labelled(tmp_path / "a.parquet", [0] * 30)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        text = message(path, kind=SaveError)
    size = float(re.search(r" takes (\S+) MB, but only 0\.00 MB are free there", text)[1])
    assert str(cache) in text and "VITRAIL_DATA" in text
    assert size == pytest.approx(sum(map(len, PICTURES)) / 1e6, abs=0.01)
    cache.parent.mkdir()
    cache.write_text("a file where a folder should be")
    assert f"could not save unpacked images to {cache}" in message(path, kind=SaveError)


@pytest.mark.slow
def test_workers_need_no_pyarrow(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.parquet", [0, 1, 2] * 10)
    (tmp_path / "pickled").write_bytes(pickle.dumps(opened(path, None).train))
    script = f"""
import pickle, sys
from pathlib import Path
source = pickle.loads(Path({str(tmp_path / "pickled")!r}).read_bytes())
assert len(source[29].image) == {len(PICTURES[29])} and source.target(29) == 2 and source.classes == ("0", "1", "2")
assert "pyarrow" not in sys.modules
"""
    finished = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = labelled(tmp_path / "a.parquet", [0] * 30)
    parquet.pyarrow.cache_clear()
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
            patch.setitem(sys.modules, name, None)
        assert "needs pyarrow: pip install 'vitrail[parquet]'" in message(path)


def test_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = labelled(path, [0] * 30).read_bytes()
    for content in (b"", b"PAR1", b"not a Parquet file at all, but a text", whole[:-10], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert message(path).startswith(f"{path} cannot be read as Parquet: ")
    path.unlink()
    assert f"there is no file or folder {path}" in message(path)
    assert f"{tmp_path} has no .parquet files in it" in message(tmp_path)
    path.mkdir()
    assert "has no .parquet files" in message(path)


def test_a_damaged_page(tmp_path: Path, cache: Path) -> None:
    pieces = [bytes([number]) * 5000 for number in range(30)]
    path = write(tmp_path / "a.parquet", {"image": images(pieces), "label": [0] * 30}, compression="zstd")
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    content = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = os.urandom(chunk.total_compressed_size)
    path.write_bytes(content)
    assert message(path).startswith(f"{path} cannot be read as Parquet: ")
    assert list(cache.iterdir()) == []


def test_a_file_without_images_or_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"], "label": [0], "image": ["1.png"], "data": [b""]})
    columns = "text (string), label (int64), image (string), data (bin"
    assert f"has no column of images: its columns are {columns}" in message(path)
    labelled(path, pa.array([], pa.int64()))
    assert message(path) == f"{path} has an empty training split; training needs at least one row"


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([0, 2], "ab", "row 1: the label 2 in column 'label' is out of range; the classes are 0 to 1, and -1 means no"),
        ([0, -2], "ab", "row 1: the label -2 in column"),
        ([0, -2], "", "the classes are numbered from 0, and -1 means no label"),
        ([[0], [1, 2]], "ab", "row 1: the label 2 in column"),
        ([0, 2**40], "ab", "row 1: the label 1099511627776 in column"),
        ([0, 2**31], "", "row 1: the label 2147483648 in column"),
        ([0, 123_456], "", "the labels have no names and go up to 123,456, so they are not class numbers"),
        ([0.0, 1.5], "", "column 'label' holds 1.5, which is not a whole number"),
        ([{"a": 1}] * 2, "", "column 'label' has the type struct<a: int64>, which holds no labels"),
        ([[["a"]]] * 2, "", "which holds no labels"),
        ([0, 1], ["a\nx", "b"], "classes with unprintable names: ['a\\nx']"),
    ],
)
def test_bad_labels(tmp_path: Path, labels: Any, names: Any, expected: str) -> None:
    feature = class_label(*names) if names else None
    if names and isinstance(labels[0], list):
        feature = {"feature": feature, "_type": "List"}
    path = write(tmp_path / "a.parquet", {"image": images(PICTURES[:2]), "label": labels}, {"label": feature})
    assert expected in message(path)


@pytest.mark.parametrize("second", ["train-1", "test"])
def test_files_that_disagree(tmp_path: Path, second: str) -> None:
    def text(columns: dict[str, Any], features: dict[str, Any] | None = None) -> str:
        write(tmp_path / f"{second}.parquet", columns, features)
        return message(tmp_path)

    two = images(PICTURES[:2])
    write(tmp_path / "train-0.parquet", {"image": two, "label": [0, 1]}, {"label": class_label("a", "b")})
    different = text({"image": two, "label": [0, 1]}, {"label": class_label("a", "c")})
    assert re.search(r"state different classes: .*class 1 is '[bc]' and '[bc]'", different)
    assert re.search("[23] names and [23] names", text({"image": two, "label": [0, 1]}, {"label": class_label(*"abc")}))
    for kind, labels in {"numbers": [0, 1], "lists of numbers": [[0], [1]], "text": ["a", "b"]}.items():
        expected = f"labels of different kinds: {kind} and numbers with names"
        assert expected in text({"image": two, "label": labels})
    assert "has no column 'image'" in text({"img": two, "label": [0, 1]})
    if second == "train-1":
        assert "only one of the two has the column 'label'" in text({"image": two})


@pytest.mark.slow
def test_memory_is_bounded_by_the_row_groups(tmp_path: Path) -> None:
    """Images of 320 MB in row groups of 20 MB are unpacked and read with a fraction of that memory."""
    piece = np.random.default_rng(0).bytes(200_000)
    table = pa.table({"image": images([piece] * 1600), "label": [0, 1] * 800})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=100)
    script = f"""
from pathlib import Path
import pyarrow.compute, pyarrow.parquet
from vitrail.data.formats.parquet import open_parquet
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024
before = peak()
source = open_parquet(Path({str(tmp_path / "a.parquet")!r}), None).train
assert all(len(source[index].image) == 200_000 for index in range(0, 1600, 3))
print(peak() - before)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < 160


def test_columns_of_numbers_are_targets(tmp_path: Path) -> None:
    columns = {
        "image": images(PICTURES[:9]),
        "Age": pa.array([*range(7), None, 8], pa.int16()),
        "size": pa.array([0.5] * 8 + [None], pa.float32()),
        "price": pa.array([Decimal("1.25")] * 9),
    }
    write(tmp_path / "data" / "train-0.parquet", columns)
    unknown = {"Age": pa.nulls(9, pa.int16()), "size": pa.nulls(9, pa.float64())}
    write(tmp_path / "data" / "test-0.parquet", {**columns, **unknown})
    splits = open_data(str(tmp_path / "data"), validation_share=0.0, numbers=("age", "size"))
    assert splits.classes == ("age", "size") and splits.target_kind == "numbers" and splits.test is None
    assert splits.notes[0].endswith("the test split is skipped, because none of its images has a number")
    assert [str(target) for target in targets_of(splits.train)[6:]] == ["(6.0, 0.5)", "(nan, 0.5)", "(8.0, nan)"]
    assert splits.train[2].target == (2.0, 0.5)
    price = open_data(str(tmp_path / "data"), validation_share=0.0, numbers=("price",))
    assert targets_of(price.train) == targets_of(price.test) == [(1.25,)] * 9
    (tmp_path / "data" / "train-0.parquet").unlink()
    with pytest.raises(DataError, match="has no split in which an image has a number"):
        open_whole(str(tmp_path / "data"), numbers=("age",), needs_training=False)


def test_columns_without_numbers_are_named(tmp_path: Path) -> None:
    words = pa.array([None, "old", "new"])
    path = write(tmp_path / "x.parquet", {"image": images(PICTURES[:3]), "age": words, "size": [1.0, 2.0, math.inf]})

    for column, expected in (
        ("age", "x.parquet: column 'age' is of type string, which holds no numbers, like 'old'; regression"),
        ("sizes", "x.parquet has no column 'sizes' of numbers; nearest: size"),
        ("size", "x.parquet, row 2: column 'size' holds inf, which is not a finite number"),
    ):
        with pytest.raises(DataError, match=expected):
            open_data(str(path), validation_share=0.0, numbers=(column,))


def test_words_for_a_missing_label(tmp_path: Path) -> None:
    words = ["None", "cat ", "cafe\u0301", "nan", "café", ""]
    path = write(tmp_path / "a.parquet", {"image": images(PICTURES[:6]), "label": words, "age": [1] * 6})
    splits = opened(path)
    assert splits.classes == ("café", "cat") and targets_of(splits.train) == [None, 1, 0, None, 0, None]
    assert any("2 labels (None, nan)" in note for note in splits.notes)
    assert any("1 column not used: age" in note for note in splits.notes)
    assert opened(f"{path}?missing=keep").classes == ("None", "café", "cat", "nan")
    lists = opened(labelled(tmp_path / "b.parquet", [["", "b"], [""], ["a", ""], ["b", "a"]])).train
    assert lists.classes == ("a", "b") and targets_of(lists) == [(1,), (), (0,), (0, 1)]


def test_several_labels_in_a_cell(tmp_path: Path) -> None:
    words = ["cat", "fox", "cat|fox", None, "cat|fox"]
    path = labelled(tmp_path / "a.parquet", words)
    assert "join the names of other classes" in message(path)
    splits = opened(f"{path}?separator=%7C")
    assert splits.classes == ("cat", "fox") and targets_of(splits.train) == [(0,), (1,), (0, 1), (), (0, 1)]


def test_a_column_of_splits_divides_the_rows(tmp_path: Path, cache: Path) -> None:
    columns = {
        "image": images(PICTURES[:6]), "label": ["b", "a", "a", "b", "c", "a"], "age": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "set": ["test", "train", "val", "train", "test", "train"],
    }  # fmt: skip
    path = write(tmp_path / "a.parquet", columns)
    splits = opened(path)
    rows = ((1, 0), (3, 1), (5, 0))
    assert samples_of(splits.train) == [(f"a.parquet:{row}", PICTURES[row], label) for row, label in rows]
    assert samples_of(splits.validation) == [("a.parquet:2", PICTURES[2], 0)]
    assert targets_of(splits.test) == [1, None] and splits.faults[0].kind == "unknown-class"
    assert any("column 'set' divides" in note for note in splits.notes)
    check_source(splits.train)
    assert len(opened(f"{path}?splits=none").train) == 6 and len(list(cache.iterdir())) == 1
    splits = opened(f"{path}?train=val&test=test")
    assert len(splits.train) == 1 and splits.test is not None and len(splits.test) == 2
    numbers = open_parquet(path, None, ("age",))
    assert numbers.train.target(1) == (4.0,) and numbers.test is not None and numbers.test.target(1) == (5.0,)
