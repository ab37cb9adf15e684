"""Tests of targets: how text becomes the name of a class, known values, selections, and conversion to files."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.make import MemorySource, write_tar
from tests.targets import multi_labels, number_targets, numbered, single_labels
from vitrail.data.source import check_known, target_from_plain, truth_of
from vitrail.data.sources import open_data
from vitrail.data.splits import Choice, choice_in, with_choice
from vitrail.data.targets import (
    LabelReader,
    Target,
    TargetKind,
    Targets,
    check_names,
    class_name,
    refuse_joined,
    similar_names,
    whole_numbers,
)
from vitrail.errors import ConfigError, DataError
from vitrail.report.page import printable


@given(st.text(max_size=12))
def test_a_name_has_one_form(text: str) -> None:
    name = class_name(text)
    assert class_name(name) == name == name.strip()
    assert class_name(unicodedata.normalize("NFD", text)) == class_name(unicodedata.normalize("NFC", text)) == name
    assert class_name(f"\u00a0 {text}\ufeff ") == name


@pytest.mark.parametrize("name", [  # Persian, Hindi, an emoji, Sinhala
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "क्\u200dष", "👩\u200d🔬", "ශ්\u200dරී",
    "日本語", "Zürich", "golden retriever",
])  # fmt: skip
def test_names_of_all_scripts_are_accepted(name: str) -> None:
    check_names("data", [name])
    assert class_name(name) == unicodedata.normalize("NFC", name)
    assert printable(name) == name


@pytest.mark.parametrize("name", ["a\tb", "", "a\x00", "a\u202eb"])
def test_control_characters_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="unprintable names"):
        check_names("data", ["cat", name])


def test_words_for_a_missing_value_are_no_label_unless_they_are_kept() -> None:
    words = ["nan", "NaN", "None", "null", "N/A", "<NA>", "NA", ""]
    reader = LabelReader()
    assert {reader(word) for word in (*words, None, float("nan"))} == {None}
    assert reader.missing.total() == 8 and reader("none of these") == "none of these"
    assert "--keep-missing-words" in next(iter(reader.notes("t.csv")))
    keeper = LabelReader(keep_missing=True)
    assert [keeper(word) for word in words] == [*words[:-1], None] and keeper(None) is None
    assert not list(keeper.notes("t.csv"))


@pytest.mark.parametrize(
    ("separator", "cell", "names"),
    [("|", "cat| fox |", ("cat", "fox")), (" ", "scab  rust", ("scab", "rust")), (";", "cat", ("cat",)), (";", "", ()),
     ("none", "cat|fox", "cat|fox"), (None, "cat|fox", "cat|fox"), ("|", ["a", None, "b"], ("a", "b"))],
)  # fmt: skip
def test_a_separator_divides_cells(separator: str | None, cell: object, names: object) -> None:
    assert LabelReader(separator)(cell) == names


def test_cells_without_a_label_are_noted_where_there_can_be_several() -> None:
    reader = LabelReader("|")
    assert [reader(cell) for cell in ("cat|NA", "", None, "NA", " | ", [], [None])] == [("cat",), *[()] * 6]
    notes = list(reader.notes("t.csv"))
    assert reader.blank == 5 and any("5 images without a label" in note for note in notes)
    single = LabelReader()
    assert single("") is None and not single.blank


@pytest.mark.parametrize(
    ("names", "whole"),
    [(["1.0", "0", "12."], {"1.0": "1", "0": "0", "12.": "12"}), (["1", "2"], {}), (["1.0", "2.5"], {}),
     (["1.0", "x"], {}), ([], {})],
)  # fmt: skip
def test_whole_numbers_with_a_point(names: list[str], whole: dict[str, str]) -> None:
    assert whole_numbers(names) == whole


@pytest.mark.parametrize(
    ("counts", "separator"),
    [({"cat": 3, "fox": 4, "cat|fox": 5}, r"\|"), ({"cat|fox": 3, "fox|owl": 4, "cat|owl": 2}, r"\|"),
     ({"cat": 3, "cat; old": 4, "fox; old": 2, "fox": 1}, ";"),
     ({"scab": 5, "rust": 6, "scab rust": 7}, " "), ({"a": 5, "b": 6, "a, b": 2}, ",")],
)  # fmt: skip
def test_joined_labels_are_asked_about(counts: dict[str, int], separator: str) -> None:
    with pytest.raises(DataError, match=f"--label-separator '{separator}'.*--label-separator none"):
        refuse_joined("t.csv", counts)
    refuse_joined("t.csv", counts, "none")


@pytest.mark.parametrize(
    "counts",
    [{"golden retriever": 5, "labrador retriever": 4, "golden": 3}, {"tench, Tinca tinca": 2, "tench": 3},
     {"cat": 3, "fox": 4, "cat|fox": 1}, {"and/or": 9, "or": 9}, {"['cat']": 3, "['fox']": 4}],
)  # fmt: skip
def test_names_with_separators_can_be_classes(counts: dict[str, int]) -> None:
    refuse_joined("t.csv", counts)


def test_names_that_differ_in_case_are_a_fault() -> None:
    (fault,) = similar_names("data", ["Cat", "cat", "dog", "big  owl", "Big Owl", "straße"])
    assert (fault.severity, fault.count) == ("warning", 4) and "'Cat' and 'cat'" in fault.text
    assert not list(similar_names("data", ["cat", "dog"]))


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=",/.=*?[]"), min_size=1, max_size=5)),
    st.sampled_from(["", "|", "&", "=", "none", " ", "+", "%20", "?"]),
    st.booleans(),
)
def test_a_choice_survives_in_the_name_of_data(names: list[str], separator: str, keep: bool) -> None:
    names = [name for name in names if name.strip()]
    words = [f"train={names[0]}", *names[1:], "test=x"] if names else []
    location, choice = choice_in(with_choice("data.csv?label=kind", words, separator, keep_missing=keep))
    assert location == "data.csv" and choice.label == "kind"
    assert (choice.separator or "", choice.keep_missing) == (separator, keep)
    assert choice.splits == ({"train": tuple(name.strip() for name in names), "test": ("x",)} if names else None)


def test_a_choice_is_made_once_and_known() -> None:
    for spec in ("x.csv?separator=;", "x.csv?label=a&separator=;"):
        with pytest.raises(ConfigError, match="has this choice already"):
            with_choice(spec, separator="|")
    with pytest.raises(DataError, match="only choice is missing=keep"):
        choice_in("x.csv?missing=drop")
    with pytest.raises(DataError, match="chooses label twice"):
        choice_in("x.csv?label=a&label=b")
    assert choice_in("https://x/y.tar?label=1&key=2") == ("https://x/y.tar?label=1&key=2", Choice())
    assert choice_in("s3://x/y.tar?key=2&splits=none") == ("s3://x/y.tar?key=2", Choice(splits={}))
    assert choice_in("part-?.tar") == ("part-?.tar", Choice())


def _lists_in(folder: Path, kind: str, lists: list[list[int]]) -> str:
    """Return the name of data whose images have these lists of labels."""
    images, path = [b"image %d" % number for number in range(len(lists))], folder / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"image": images, "label": lists}), path)
    elif kind == "tar":
        parts = [(f"{number}.json", json.dumps({"label": labels}).encode()) for number, labels in enumerate(lists)]
        write_tar(path, [*((f"{number}.png", image) for number, image in enumerate(images)), *parts])
    else:
        for number, image in enumerate(images):
            (folder / f"{number}.png").write_bytes(image)
        lines = (json.dumps({"path": f"{number}.png", "label": labels}) for number, labels in enumerate(lists))
        path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_lists_of_0_and_1_for_each_class_are_no_labels(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match="0 or a 1 for each class"):
        open_data(_lists_in(tmp_path, kind, [[0, 1, 0], [1, 0, 0], [0, 0, 0]]), validation_share=0.0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
@pytest.mark.parametrize("lists", [[[0], [0, 1], []], [[0, 1], [1, 0]], [[0, 1, 2], [2, 1, 0]], [[0, 1, 1], [0], [1]]])
def test_lists_of_labels_are_read(tmp_path: Path, kind: str, lists: list[list[int]]) -> None:
    train = open_data(_lists_in(tmp_path, kind, lists), validation_share=0.0).train
    assert [train.target(index) for index in range(len(train))] == [tuple(sorted({*labels})) for labels in lists]


NAN = math.nan
LABELS = single_labels(np.array([2, -1, 0]), 3)
SEVERAL = multi_labels(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], np.uint8))
NUMBERS = number_targets(np.array([[1.5, NAN], [NAN, NAN], [-2.0, 0.0]]))


def same(one: Targets, other: Targets) -> bool:
    return one.kind == other.kind and one.columns == other.columns and np.array_equal(
        one.dense, other.dense, equal_nan=one.kind == "numbers"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "known", "plain"),
    [
        (LABELS, [True, False, True], [2, None, 0]),
        (SEVERAL, [True, True, True], [[0, 2], [], [1]]),
        (NUMBERS, [True, False, True], [[1.5, None], [None, None], [-2.0, 0.0]]),
    ],
)
def test_what_is_known_and_plain_values(truth: Targets, known: list[bool], plain: list[Any]) -> None:
    assert len(truth) == 3 and truth.known.tolist() == known
    assert [truth.plain(row) for row in range(3)] == plain
    assert truth.rows(slice(1, 3)).plain(1) == plain[2] and len(truth.rows(np.array([True, False, True]))) == 2
    assert [truth.rows(np.array([2, 0])).plain(row) for row in range(2)] == [plain[2], plain[0]]
    again = [target_from_plain(value, truth.kind, truth.columns) for value in json.loads(json.dumps(plain))]
    assert same(Targets.of(again, truth.kind, numbered(truth.columns)), truth)


def test_restricted_to_some_outputs() -> None:
    assert same(LABELS.restricted((1, 2)), single_labels(np.array([1, -1, -1]), 2))
    assert same(SEVERAL.restricted((2, 0)), multi_labels(np.array([[1, 1], [0, 0], [0, 0]], np.uint8)))
    assert same(NUMBERS.restricted((1,)), number_targets(np.array([[NAN], [NAN], [0.0]])))


def test_groups_are_the_classes_of_single_labels_and_the_likeliest_class_can_hit() -> None:
    assert LABELS.groups().tolist() == [2, -1, 0]
    assert SEVERAL.groups().tolist() == NUMBERS.groups().tolist() == [0, 0, 0]
    assert LABELS.hits(np.array([2, 0, 1])).tolist() == [True, False, False]
    assert SEVERAL.hits(np.array([2, 0, 1])).tolist() == [True, False, True]
    with pytest.raises(DataError, match="accuracy needs classes, but these samples have numbers; measure the errors"):
        NUMBERS.hits(np.array([0, 0, 0]))


@pytest.mark.parametrize("label", [3, -2])
def test_labels_outside_of_the_classes_are_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} of row 1 is not one of 3 classes, numbered from 0"):
        single_labels(np.array([0, label, 7]), 3)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([2, None, 0], LABELS), ([(0, 2), (), (1,)], SEVERAL), ([None, None], single_labels(np.array([-1, -1]), 3))],
)
def test_truth_of_a_source_of_classes(targets: list[Target], expected: Targets) -> None:
    source = MemorySource(labels=targets, classes=("a", "b", "c"))
    assert same(truth_of(source), expected)
    assert same(truth_of(source, [1, 0]), expected.rows(np.array([1, 0])))


def test_truth_of_a_source_of_numbers() -> None:
    source = MemorySource(labels=[(1.5, NAN), None, (-2.0, 0.0)], classes=("age", "height"))
    assert same(truth_of(source), NUMBERS)
    check_known(source, "linear")
    with pytest.raises(DataError, match="none of 2 images has a label, but linear needs to know their classes"):
        check_known(MemorySource(labels=[None, None], classes=("a",)), "linear")
    with pytest.raises(DataError, match="none of 1 images has a known number, but linear needs to know their"):
        check_known(MemorySource(labels=[(NAN,)], classes=("a",)), "linear")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, "class"), (-1, "class"), (True, "class"), ([1], "class"), ("a", "class"),
        ([3], "classes"), (1, "classes"), (None, "classes"), ([True], "classes"),
        ([1.0], "numbers"), (1.0, "numbers"), ([1.0, 2.0, "x"], "numbers"), ([1.0, 2.0, True], "numbers"),
    ],
)  # fmt: skip
def test_plain_values_that_do_not_fit_are_refused(value: Any, kind: TargetKind) -> None:
    with pytest.raises(ValueError, match=r"is not a valid target for 3 (classes|numbers)"):
        target_from_plain(value, kind, 3)
