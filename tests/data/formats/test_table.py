"""Tests of tables of images: the meaning of columns, several labels, splits, and the line number of every mistake."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.make import targets_of
from vitrail.data.formats import table as module
from vitrail.data.formats.table import open_table
from vitrail.data.source import Source, target_kind
from vitrail.data.sources import open_data, open_whole
from vitrail.data.splits import Request
from vitrail.errors import ConfigError, DataError, UserError
from vitrail.testing import check_source

Trees = Callable[..., Path]


@pytest.fixture
def table(tree: Trees) -> Callable[..., Path]:
    """Return a function that writes a table beside a/1.jpg, a/2.jpg, b/3.PNG and 4.jpg: `table("path,label",
    "a/1.jpg,rose")`.
    """

    def write(*lines: str, name: str = "labels.csv") -> Path:
        path = tree("a/1.jpg", "a/2.jpg", "b/3.PNG", "4.jpg", name=f"with {name}") / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def beside(path: Path, name: str, *lines: str) -> Path:
    """Write a second table beside one, and leave one folder of images, which cannot be class folders."""
    if (path.parent / "b").exists():
        (path.parent / "b/3.PNG").rename(path.parent / "a/3.PNG")
        (path.parent / "b").rmdir()
    (path.parent / name).write_text("\n".join(lines))
    return path.parent


def opened(path: Path | str, **options: object) -> Source:
    return open_data(str(path), **{"validation_share": 0.0, **options}).train


def rows_of(source: Source) -> list[tuple[str, object]]:
    return [(source.key(index), source.target(index)) for index in range(len(source))]


@pytest.mark.parametrize(
    "lines",
    [
        ("path,label", "b/3.PNG,rose", "a/1.jpg,daisy", "4.jpg,rose"),
        ("Label , File_Name", "rose,b/3.PNG", "daisy,./a/1.jpg", "rose,4.jpg"),
        ("filename,weight,class", "b/3.PNG,1.5,rose", "a/1.jpg,0,daisy", "4.jpg,,rose"),
        ("image,flower", "b/3.PNG,rose", "", "a/1.jpg,daisy", '4.jpg,"rose"'),
        ("\ufeffpath,label", "b/3.PNG,rose", "a/1.jpg,daisy", "4.jpg,rose"),
        ("path,label", "b/3.PNG,rose ", "a/1.jpg, daisy", "4.jpg,rose\u00a0"),
        (",path,label", "0,b/3.PNG,rose", "1,a/1.jpg,daisy", "2,4.jpg,rose"),
        ("Unnamed: 0,path,flower", "7,b/3.PNG,rose", "8,a/1.jpg,daisy", "9,4.jpg,rose"),
        ("path,label,,", "b/3.PNG,rose,,", ",,,", "a/1.jpg,daisy,,", "4.jpg,rose,,", ",,,"),
        ("path;label", "b/3.PNG;rose", "a/1.jpg;daisy", "4.jpg;rose"),
        ("path,label", r"b\3.PNG,rose", r"a\1.jpg,daisy", "4.jpg,rose"),
    ],
)
def test_tables_of_people_pandas_and_spreadsheets_are_read(table: Callable[..., Path], lines: tuple[str, ...]) -> None:
    source = opened(table(*lines))
    assert source.classes == ("daisy", "rose")
    assert rows_of(source) == [("b/3.PNG", 1), ("a/1.jpg", 0), ("4.jpg", 1)]
    check_source(source, decodes=False)


def test_tabs_separate_where_the_suffix_says_so(table: Callable[..., Path]) -> None:
    source = opened(table("path\tlabel", "a/1.jpg\trose, red", "4.jpg\tdaisy", name="labels.TSV"))
    assert source.classes == ("daisy", "rose, red") and rows_of(source) == [("a/1.jpg", 1), ("4.jpg", 0)]


def test_numbers_are_sorted_by_value_and_then_as_text(table: Callable[..., Path]) -> None:
    """The order of a set, which differs from process to process, has no influence."""
    files = ("a/1.jpg", "a/2.jpg", "b/3.PNG", "4.jpg")
    for labels, classes in (
        (("10", "9", "100", "9"), ("9", "10", "100")),
        (("01", "1", "001", "2"), ("001", "01", "1", "2")),
        (("2", "001", "1", "01"), ("001", "01", "1", "2")),
    ):
        path = table("path,label", *(f"{file},{label}" for file, label in zip(files, labels, strict=True)))
        assert opened(path).classes == classes


def test_an_empty_or_missing_label_is_none(table: Callable[..., Path]) -> None:
    expected = [("a/1.jpg", 0), ("4.jpg", None), ("a/2.jpg", 1)]
    assert rows_of(opened(table("path,label", "a/1.jpg,rose", "4.jpg,", "a/2.jpg,x"))) == expected
    for nothing in ("", None, math.nan):
        labels = {"a/1.jpg": "x", "4.jpg": nothing, "a/2.jpg": "y"}
        lines = (json.dumps({"file_name": name, "label": label, "split": None}) for name, label in labels.items())
        source = opened(table(*lines, name="labels.jsonl"))
        assert source.classes == ("x", "y") and rows_of(source) == expected
    several = {"a/1.jpg": ["x", None, ""], "4.jpg": [math.nan], "b/3.PNG": None, "a/2.jpg": ["y", "x"]}
    lines = (json.dumps({"file_name": name, "label": labels}) for name, labels in several.items())
    splits = open_data(str(table(*lines, name="labels.jsonl")), validation_share=0.0)
    assert splits.classes == ("x", "y") and targets_of(splits.train) == [(0,), (), (), (0, 1)]
    assert any("2 images without a label in a column of several labels" in note for note in splits.notes)


@pytest.mark.parametrize("line", ['"label": "x", "label": "y"', '"more": [{"label": "x", "label": "y"}], "label": "x"'])
def test_a_field_that_occurs_twice_in_a_line_is_refused(line: str, table: Callable[..., Path]) -> None:
    path = table('{"path": "4.jpg", "label": "x"}', f'{{"path": "a/1.jpg", {line}}}', name="l.jsonl")
    with pytest.raises(DataError, match=r"l\.jsonl, line 2: .*'label' occurs twice"):
        opened(path)


def test_json_lines_have_one_label_or_a_list(table: Callable[..., Path]) -> None:
    one = [{"file_name": "a/1.jpg", "label": 3, "text": "x"}, {"label": 12, "file_name": "4.jpg"}]
    source = opened(table(*map(json.dumps, one), name="metadata.jsonl"))
    assert source.classes == ("3", "12") and rows_of(source) == [("a/1.jpg", 0), ("4.jpg", 1)]
    several = [{"file_name": "a/1.jpg", "labels": ["x", "y"]}, {"file_name": "4.jpg", "labels": []}]
    source = opened(table(*map(json.dumps, several), name="other.jsonl"))
    assert rows_of(source) == [("a/1.jpg", (0, 1)), ("4.jpg", ())]


@pytest.mark.parametrize(
    ("lines", "label"),
    [
        (("path,checked", "4.jpg,1"), None),
        (("path,flower,checked", "4.jpg,1,0"), 1),
        (("path,label,Flower", "4.jpg,0,1"), 1),
        (("path,label", "4.jpg,1"), 1),
    ],
)
def test_labels_of_a_held_out_table_are_in_the_column_of_the_training_table(
    table: Callable[..., Path], lines: tuple[str, ...], label: int | None
) -> None:
    root = beside(table("path,flower", "a/1.jpg,0", "a/2.jpg,1", name="train.csv"), "test.csv", *lines)
    splits = open_data(str(root), validation_share=0.0)
    assert (None if splits.test is None else splits.test.target(0)) == label


def test_a_held_out_table_has_a_column_of_each_class(table: Callable[..., Path]) -> None:
    path = table("path,x,y,z", "a/1.jpg,1,0,1", "a/2.jpg,0,1,0", name="train.csv")
    root = beside(path, "test.csv", "path,z,x", "4.jpg,1,0")
    for classes in (None, ("z", "y", "x")):
        with pytest.raises(DataError, match=r"test\.csv has no column 'y'"):
            open_data(str(root), validation_share=0.0, classes=classes)
    beside(path, "test.csv", "path,z,x,y", "4.jpg,1,0,0")
    assert rows_of(open_data(str(root), validation_share=0.0).test) == [("4.jpg", (2,))]


def test_tables_named_after_splits_make_a_data_set(table: Callable[..., Path]) -> None:
    path = table("path,label", "a/1.jpg,x", "a/2.jpg,y", name="train.csv")
    root = beside(path, "val.csv", "path,label", "4.jpg,y")
    beside(path, "notes.csv", "what,ever")
    splits = open_data(str(root), validation_share=0.5)
    assert splits.classes == ("x", "y") and rows_of(splits.validation) == [("4.jpg", 1)] and splits.test is None
    beside(path, "valid.csv", "path,label", "a/3.PNG,y")
    with pytest.raises(DataError, match=r"has val\.csv and valid\.csv, but only one"):
        open_data(str(root), validation_share=0.5)


def test_a_folder_with_metadata_is_its_table(table: Callable[..., Path]) -> None:
    path = table("file_name,label", "a/1.jpg,x", "a/2.jpg,y", name="metadata.csv")
    assert len(opened(beside(path, "more.csv", "what,ever"))) == 2


def test_a_million_rows_list_each_folder_once(table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    scandir = module.os.scandir
    monkeypatch.setattr(module.os, "scandir", lambda path: (listed.append(str(path)), scandir(path))[1])
    opened(table("path,label", "a/1.jpg,x", "a/2.jpg,y", "4.jpg,y", "b/3.PNG,x"))
    assert len(listed) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("name,label", "a/1.jpg,x"), r"has no column of paths: its columns are name, label; the column of paths must"),
        (("path,size,weight", "4.jpg,9,1"), r"has no column of labels: its columns are path, size, weight; the column"),
        (("path,a,b", "4.jpg,1,0", "a/1.jpg,,1"), r"one column of 0 and 1 per class; line 3 has '' in column 'a'"),
        (("path,size,weight", "4.jpg,9,"), r"to predict numbers, name their columns: --numbers size$"),
        (("path", "4.jpg"), r"has no column of labels: its columns are path; the column of labels must"),
        (("path,label,Path", "4.jpg,x,4.jpg"), r"names a column twice: path, label, Path"),
        (("path,label", "4.jpg,x,y"), r"labels\.csv, line 2: the line has 3 cells, but the first line names 2 columns"),
        (("path,label",), r"labels\.csv has no rows; each image needs a row"),
        ((), r"has no column of paths: its columns are none"),
        (("path,label", "4.jpg,x", "a/9.jpg,y"), r"1 of 2 rows name a file that does not exist \(line 3: a/9\.jpg\)"),
        (("path,label", "../x.jpg,x"), r"name a file that does not exist \(line 2: \.\./x\.jpg\)"),
        (("path,label", ",x"), r"name a file that does not exist \(line 2: \)"),
        (("path,label", "4.jpg,x", "a/1.jpg,y", "./4.jpg,y"), r"\(line 4: \./4\.jpg, which is also in line 2\)"),
        (("path,label", "4.jpg,", "a/1.jpg,"), r"has no labels: the cells of the label column are all empty"),
        (("path,label,split", "4.jpg,x,mine"), r"line 2: the split 'mine' is not one of .*--splits"),
        (("path,label,split", "4.jpg,x,test"), r"has a test split but no training images"),
        (("path,label", """4.jpg,"['x', 'y']\"""", "a/1.jpg,['y']"), r"\['x', 'y'\] are lists .*as texts"),
        (("path,label", "4.jpg,x"), r"has only one class, 'x'; classification needs at least two"),
        (("path,xmin,label", "4.jpg,1,x", "a/1.jpg,1,y", "4.jpg,9,y"), r"the columns xmin are boxes"),
        (("img,rle_mask", "4.jpg,1 2", "a/1.jpg,3 4"), r"the columns rle_mask are boxes or masks"),
        (('path,label', '"4.jpg,x'), r"cannot read .*labels\.csv as a table in UTF-8: unexpected end of data"),
    ],
)  # fmt: skip
def test_mistakes_are_named(table: Callable[..., Path], lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(table(*lines))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (('{"file_name": "4.jpg", "label": "x"',), r"line 1: the line is not valid JSON \("),
        (('{"file_name": "4.jpg", "label": ' + "[" * 100_000,), r"line 1: the line is not valid JSON \("),
        (("[1]",), r"line 1: the line is a JSON list; it must be an object"),
        (('{"file_name": "4.jpg"}',), r"has no column of labels: its columns are file_name"),
        (('{"file_name": "4.jpg", "eye size": 3.5}',), r"name their columns: --numbers 'eye size'"),
        (('{"file_name": "4.jpg", "label": [1]}', '{"file_name": "a/1.jpg", "label": 2}'), r"some rows have one label"),
        (('{"file_name": "4.jpg", "objects": {"bbox": [[1, 2, 3, 4]]}}',), r"'objects' holds JSON objects .* boxes"),
        (('{"file_name": "4.jpg", "objects": [{"bbox": [1, 2, 3, 4]}]}',), r"'objects' holds JSON objects .* boxes"),
        (('{"file_name": "4.jpg", "label": ["x", ["y"]]}',), r"'label' holds JSON objects or lists"),
        (('{"file_name": "4.jpg", "bbox": [1, 2, 3, 4]}',), r"the columns bbox are boxes"),
        (('{"path": "4.jpg", "label": 0}', '{"path": "a/1.jpg", "label": 1, "label": 2}'), r"line 2: .*'label' occurs"),
    ],
)
def test_mistakes_in_json_lines_are_named(table: Callable[..., Path], lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(table(*lines, name="metadata.jsonl"))


def numbers_of(source: Source | None) -> list[Any]:
    """Return the targets, with a text for NaN, which does not equal itself."""
    return [target and tuple("?" if math.isnan(one) else one for one in target) for target in targets_of(source)]


def test_columns_of_numbers_are_targets(table: Callable[..., Path]) -> None:
    lines = ("path,Age,label,height,split", "a/1.jpg, 1.5 ,x,-2e3,train", "a/2.jpg,,y,7,train", "4.jpg,,x, ,train")
    path = table(*lines, "b/3.PNG,nan,x,0.25,test")
    splits = open_data(str(path), validation_share=0.0, numbers=("height", "age"))
    assert splits.classes == ("height", "age") and splits.target_kind == target_kind(splits.test) == "numbers"
    assert numbers_of(splits.train) == [(-2000.0, 1.5), (7.0, "?"), None] and numbers_of(splits.test) == [(0.25, "?")]
    assert splits.train[0].target == (-2000.0, 1.5)
    assert numbers_of(open_data(str(path), validation_share=0.0, numbers=("Age",)).train) == [(1.5,), None, None]
    assert open_data(str(path), validation_share=0.0).target_kind == "class"  # without numbers, the labels are read


def test_json_lines_have_numbers_too(table: Callable[..., Path]) -> None:
    lines = ('{"path": "4.jpg", "age": 3}', '{"path": "a/1.jpg", "AGE": null}', '{"path": "a/2.jpg", "size": 0.5}')
    path = table(*lines, name="metadata.jsonl")
    source = open_table(Request(str(path), numbers=("age", "size")), [path]).train
    assert numbers_of(source) == [(3.0, "?"), None, ("?", 0.5)]
    with pytest.raises(DataError, match=r"metadata\.jsonl has no column 'ages' of numbers; nearest: age"):
        open_table(Request(str(path), numbers=("ages",)), [path])


@pytest.mark.parametrize("cell", ["old", "1 2", "inf", "1_0", "true"])
def test_text_is_not_a_number(table: Callable[..., Path], cell: str) -> None:
    path = table("path,age", "4.jpg,3", f"a/1.jpg,{cell}")
    message = rf"labels\.csv, line 3: column 'age' holds '{cell}', which is not a finite number; regression needs"
    with pytest.raises(DataError, match=message):
        open_data(str(path), validation_share=0.0, numbers=("age",))
    path = table('{"path": "4.jpg", "age": "old"}', name="metadata.jsonl")
    with pytest.raises(DataError, match=r"metadata\.jsonl, line 1: column 'age' holds 'old', which is not a finite"):
        open_table(Request(str(path), numbers=("age",)), [path])


def test_numbers_that_cannot_be_are_named(table: Callable[..., Path]) -> None:
    path = table("path,age,height", "4.jpg,3,1")
    for numbers, message in (
        (("agee",), r"labels\.csv has no column 'agee' of numbers; nearest: age"),
        (("age", "age"), r"numbers=\('age', 'age'\) names a column twice"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(str(path), validation_share=0.0, numbers=numbers)
    with pytest.raises(ConfigError, match=r"numbers=\('age',\) cannot be combined with classes"):
        open_data(str(path), validation_share=0.0, numbers=("age",), classes=("a", "b"))


def test_a_table_without_labels_opens_when_none_are_needed(table: Callable[..., Path]) -> None:
    rows = ("4.jpg,9,1", "a/1.jpg,2,3")
    plain = str(table("path,size,weight", *rows))
    splits = open_data(plain, validation_share=0.0, unlabelled=True)
    assert open_data(f"{plain}?separator=%7C", validation_share=0.0, unlabelled=True).notes == splits.notes
    assert splits.target_kind == "none" and splits.classes == () and numbers_of(splits.train) == [None, None]
    path = table('{"path": "4.jpg"}', '{"path": "a/1.jpg"}', name="metadata.jsonl")
    assert numbers_of(open_data(str(path), validation_share=0.0, unlabelled=True).train) == [None, None]
    path = table("path,label", "4.jpg,", "a/1.jpg,", name="empty.csv")
    assert open_data(str(path), validation_share=0.0, unlabelled=True).target_kind == "none"


def test_labels_outside_the_classes_are_named(table: Callable[..., Path]) -> None:
    path = table("path,label", "4.jpg,rosa", "a/1.jpg,daisy")
    with pytest.raises(DataError, match=r"line 2: the label 'rosa' is not among the classes; nearest: rose"):
        opened(path, classes=("rose", "daisy"))


def test_bytes_that_are_no_text_are_refused(table: Callable[..., Path]) -> None:
    path = table("path,label")
    path.write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(DataError, match=r"cannot read .*labels\.csv as a table in UTF-8: 'utf-8' codec"):
        opened(path)


@pytest.mark.parametrize(("yes", "no"), [("1", "0"), ("1.0", "0.0"), ("True", "False"), ("true", "false")])
def test_columns_of_yes_and_no_are_classes(table: Callable[..., Path], yes: str, no: str) -> None:
    path = table(",path,rose,fern", f"0,a/1.jpg,{yes},{no}", f"1,a/2.jpg,{yes},{yes}", f"2,4.jpg,{no},{no}")
    source = opened(path)
    assert source.classes == ("rose", "fern")
    assert rows_of(source) == [("a/1.jpg", (0,)), ("a/2.jpg", (0, 1)), ("4.jpg", ())]
    check_source(source, decodes=False)


def test_whole_floats_are_class_numbers_in_all_splits(table: Callable[..., Path]) -> None:
    path = table("path,label,split", "a/1.jpg,0.0,train", "a/2.jpg,10.0,train", "4.jpg,nan,train", "b/3.PNG,10,test")
    splits = open_data(str(path), validation_share=0.0)
    assert splits.classes == ("0", "10") and rows_of(splits.train) == [("a/1.jpg", 0), ("a/2.jpg", 1), ("4.jpg", None)]
    assert rows_of(splits.test) == [("b/3.PNG", 1)]
    assert any("1 label (nan)" in note for note in splits.notes)


@pytest.mark.parametrize(
    ("column", "train", "test"),
    [("split", "train", "test"), ("Set", "Training", "TEST"), ("phase", "train", "test"), ("is_test", "0", "True")],
)
def test_a_column_of_splits_divides(table: Callable[..., Path], column: str, train: str, test: str) -> None:
    path = table(f"path,label,{column}", f"a/1.jpg,x,{train}", f"a/2.jpg,y,{train}", f"4.jpg,x,{test}")
    splits = open_data(str(path), validation_share=0.0)
    assert len(splits.train) == 2 and splits.test is not None and rows_of(splits.test) == [("4.jpg", 0)]
    assert len(opened(f"{path}?splits=none")) == 3


def test_an_empty_cell_of_splits_is_named(table: Callable[..., Path]) -> None:
    path = table("path,label,split", "a/1.jpg,x,train", "a/2.jpg,y,train", "4.jpg,x,")
    splits = open_data(f"{path}?train=train", validation_share=0.0)
    assert len(splits.train) == 2 and "skipped (empty), which no split contains" in splits.notes[-1]
    with pytest.raises(DataError, match=r"nothing named later.* train, \(empty\)"):
        open_data(f"{path}?train=train&test=later", validation_share=0.0)


def test_columns_of_splits_are_no_classes(table: Callable[..., Path]) -> None:
    path = table("path,sick,is_test", "a/1.jpg,1,0", "a/2.jpg,0,0", "4.jpg,1,1")
    source = opened(f"{path}?splits=none")
    assert source.classes == ("0", "1") and [target for _, target in rows_of(source)] == [1, 0, 1]
    path = table("path,sq,ci,subset", "a/1.jpg,1,0,0", "a/2.jpg,0,1,1", "4.jpg,1,1,0")
    splits = open_data(str(path), validation_share=0.0)
    assert splits.classes == ("sq", "ci") and any("1 column not used: subset" in note for note in splits.notes)


def test_yes_and_no_divide_and_a_second_column_is_named(table: Callable[..., Path]) -> None:
    rows = ("a/1.jpg,x,no,train", "a/2.jpg,y,no,train", "4.jpg,x,yes,test")
    path = table("path,label,is_valid", *(row.rpartition(",")[0] for row in rows))
    assert rows_of(open_data(str(path), validation_share=0.0).validation) == [("4.jpg", 0)]
    notes = open_data(str(table("path,label,is_valid,fold", *rows)), validation_share=0.0).notes
    assert any("column 'is_valid' (no, yes) is not used, because 'fold' divides the rows" in note for note in notes)


def test_folds_divide_only_if_they_are_chosen(table: Callable[..., Path]) -> None:
    path = table("path,label,fold", "a/1.jpg,x,0", "a/2.jpg,y,1", "4.jpg,x,2")
    splits = open_data(str(path), validation_share=0.0)
    assert len(splits.train) == 3 and any("'fold' (0, 1, 2) does not divide" in note for note in splits.notes)
    splits = open_data(f"{path}?train=0&train=1&test=2", validation_share=0.0)
    assert len(splits.train) == 2 and splits.test is not None and rows_of(splits.test) == [("4.jpg", 0)]


def test_folders_of_splits_in_paths_divide(tree: Trees) -> None:
    root = tree("img/train/1.jpg", "img/train/2.jpg", "img/test/3.jpg", "img/x/4.jpg")
    rows = "path,label\nimg/train/1.jpg,a\nimg/train/2.jpg,b\nimg/test/3.jpg,a\n"
    (root / "labels.csv").write_text(rows)
    splits = open_data(str(root / "labels.csv"), validation_share=0.0)
    assert len(splits.train) == 2 and splits.test is not None and rows_of(splits.test) == [("img/test/3.jpg", 0)]
    assert any("test, train of its paths divide" in note for note in splits.notes)
    (root / "labels.csv").write_text(f"{rows}img/x/4.jpg,b\n")
    splits = open_data(str(root / "labels.csv"), validation_share=0.0)
    assert len(splits.train) == 4 and any("3 rows begin with test, train" in note for note in splits.notes)


def test_columns_are_chosen_and_the_others_named(table: Callable[..., Path]) -> None:
    path = table("path,label,kind,Weight", "a/1.jpg,x,u,3", "a/2.jpg,y,v,4")
    splits = open_data(f"{path}?label=KIND", validation_share=0.0)
    assert splits.classes == ("u", "v") and any("2 columns not used: label, Weight" in note for note in splits.notes)
    with pytest.raises(DataError, match=r"has no column 'kinds'; nearest: kind"):
        opened(f"{path}?label=kinds")


def test_absolute_paths_in_the_folder_are_accepted(table: Callable[..., Path]) -> None:
    root = table("path,label").parent
    path = table("path,label", f"{root}/a/1.jpg,x", f"{root}/b/3.PNG,y")
    assert [key for key, _ in rows_of(opened(path))] == ["a/1.jpg", "b/3.PNG"]


def test_a_check_names_all_faults_of_a_table(table: Callable[..., Path]) -> None:
    rows = ("a/1.jpg,x", "a/2.jpg,y", "gone,x", "../away,y", "./a/1.jpg,x", "b/gone,x", "nul\0/1.jpg,x")
    faults = open_whole(str(table("path,label", *rows)), tolerant=True).whole.faults
    found = [(fault.kind, fault.count) for fault in faults]
    assert found == [("missing-file", 4), ("repeated-row", 1)]
    with pytest.raises(DataError) as caught:
        opened(table("path,label", *rows))
    assert all(word in str(caught.value) for word in ("gone", "away", "./a/1.jpg", "b/gone"))


@pytest.mark.parametrize(
    ("place", "paths", "keys"),
    [
        ("labels.csv", "{name}", "train/{name}"),
        ("labels.csv", "{stem}", "train/{name}"),
        ("labels.csv", "data/train/{name}", "train/{name}"),
        ("labels.csv", "train/../train/{name}", "train/{name}"),
        ("tables/labels.csv", "../train/{name}", "train/{name}"),
        ("tables/labels.csv", "{root}/train/{name}", "train/{name}"),
    ],
)
def test_files_are_found_beside_and_above_their_table(tree: Trees, place: str, paths: str, keys: str) -> None:
    root = tree("data/train/1.jpg", "data/train/2.PNG") / "data"
    rows = [(name, {"root": root, "name": name, "stem": name[0]}) for name in ("1.jpg", "2.PNG")]
    table = root / place
    table.parent.mkdir(exist_ok=True)
    table.write_text("image_name,label\n" + "".join(f"{paths.format(**fields)},{name}\n" for name, fields in rows))
    train = opened(table)
    assert [key for key, _ in rows_of(train)] == [keys.format(**fields) for _, fields in rows]
    assert [train[index].image for index in range(2)] == [b"", b""]


def test_tables_are_named_after_splits_beside_a_word_that_all_have(tree: Trees) -> None:
    root = tree("images/1.jpg", "images/2.jpg", "images/3.jpg")
    (root / "pets_train.csv").write_text("path,label\n1.jpg,a\n2.jpg,b\n")
    (root / "pets_test.csv").write_text("path,label\n3.jpg,a\n")
    splits = open_data(str(root), validation_share=0.0)
    assert len(splits.train) == 2 and splits.test is not None and len(splits.test) == 1


@pytest.mark.parametrize(("name", "folder"), [("train.csv", "test"), ("labels.csv", "masks")])
def test_files_of_other_splits_and_masks_are_not_those_of_a_table(tree: Trees, name: str, folder: str) -> None:
    root = tree(f"{folder}/1.png", f"{folder}/2.png")
    (root / name).write_text("path,label\n1.png,a\n2.png,b\n")
    with pytest.raises(DataError, match="name a file that does not exist"):
        opened(root / name)


def test_an_empty_path_beside_paths_that_lead_out_names_no_file(tree: Trees) -> None:
    table = tree("1.png", "2.png", "lists/3.png") / "lists" / "labels.csv"
    table.write_text("path,label\n../1.png,a\n../2.png,b\n ,a\n")
    with pytest.raises(DataError, match="1 of 3 rows name a file that does not exist"):
        opened(table)


def test_a_table_beside_one_with_a_usual_column_of_paths_is_not_read(tree: Trees) -> None:
    root = tree("data/1.png", "data/2.png")
    (root / "labels.csv").write_text("path,label\n1.png,a\n2.png,b\n")
    (root / "places.csv").write_text("img,country\n1.png,x\n2.png,y\n")
    assert opened(root).classes == ("a", "b")


def test_numbers_of_images_are_no_paths(tree: Trees) -> None:
    root = tree("1.png", "2.png")
    (root / "summary.csv").write_text("class,images\na,1\nb,2\n")
    with pytest.raises(DataError, match="has no column of paths"):
        opened(root)


def test_files_that_several_folders_hold_are_refused(tree: Trees) -> None:
    root = tree("train/1.jpg", "test/1.jpg", "train/2.jpg")
    (root / "labels.csv").write_text("path,label\n1.jpg,a\n2.jpg,b\n")
    with pytest.raises(DataError, match="such files in test/, train/"):
        opened(root / "labels.csv")


@pytest.mark.parametrize("word", ["nan", "None", "NA", "<NA>", "null", ""])
def test_a_word_for_a_missing_number_is_an_unknown_number(table: Callable[..., Path], word: str) -> None:
    path = table("path,age", "4.jpg,3", f"a/1.jpg,{word}")
    assert numbers_of(open_table(Request(str(path), numbers=("age",)), [path]).train) == [(3.0,), None]
