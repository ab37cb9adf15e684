"""Tests of folders that are classes, splits or neither, and of what lies beside them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.make import encode, keys_of, targets_of
from vitrail.data.formats.folder import read_folder
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.sources import open_data, open_whole
from vitrail.data.splits import Splits, with_choice
from vitrail.errors import ConfigError, DataError
from vitrail.testing import check_source

Trees = Callable[..., Path]

RED = Image.new("RGB", (7, 5), "red")


def test_order_does_not_depend_on_that_of_the_file_system(tree: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(*(f"{name}/{part}/{number}.png" for name in "ba" for part in "yx" for number in range(3)))
    expected = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(reversed(list(scandir(path)))))
    assert keys_of(read_folder(root).samples) == expected


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_counts_in_any_case(tree: Trees, suffix: str) -> None:
    found = read_folder(tree(f"a/lower{suffix}", f"a/upper{suffix.upper()}", f"a/title{suffix.title()}"))
    source = found.samples
    assert len(source) == 3 and len(found.others) == 0


def test_a_class_whose_images_have_other_suffixes_is_an_error(tree: Trees) -> None:
    root = tree("cat/1.png", "dog/2.png", "dog/notes.txt", "fox/1.happy", "fox/2.sad", "owl/3", "bare/")
    for name, file_format in (("fox/1.happy", "GIF"), ("fox/2.sad", "PNG"), ("owl/3", "JPEG2000")):
        (root / name).write_bytes(encode(RED, file_format))
    (fault,) = (fault for fault in read_folder(root).faults if fault.kind == "unread-images")
    assert (fault.severity, fault.count) == ("error", 3) and "fox, owl" in fault.text and ".happy: 1" in fault.text
    with pytest.raises(DataError, match="fox, owl"):
        open_data(str(root), validation_share=0.0)


def test_images_with_other_suffixes_beside_usual_ones_are_named(tree: Trees) -> None:
    root = tree("cat/1.png", "cat/1.png_original", "dog/2.png", "dog/notes.txt", "dog/.3")
    (root / "cat/1.png_original").write_bytes(encode(RED, "PNG"))
    (fault,) = read_folder(root).faults
    assert (fault.kind, fault.severity, fault.count) == ("unread-images", "warning", 1)
    assert any(".png_original" in note for note in open_data(str(root), validation_share=0.0).notes)
    (fault,) = read_folder(root, unlabelled=True).faults
    assert fault.kind == "unread-images"


def test_files_that_are_no_images_are_counted_unless_they_are_hidden(tree: Trees) -> None:
    hidden = "a/.2.png", "a/.thumbs/3.png", "a/.DS_Store", ".cache/4.png", "a/b/.hidden/5.txt"
    found = read_folder(tree("a/1.png", "a/notes.txt", "a/x/png", "b/2.png.bak", "b/3.png", "read.me", *hidden))
    assert keys_of(found.samples) == ["a/1.png", "b/3.png"] and found.samples.classes == ("a", "b")
    assert len(found.others) == 3


def test_folders_of_systems_are_no_classes_and_their_thumbnails_no_images(tree: Trees) -> None:
    root = tree(
        "a/1.png", "a/@eaDir/1.png/THUMB.jpg", "b/2.png", "b/deep/.cache/3.png", "__MACOSX/a/._1.png", "@eaDir/2.jpg",
        ".DS_Store", "a/Thumbs.db", "$RECYCLE.BIN/4.png", "System Volume Information/5.png", "b/Lost+Found/6.png",
    )  # fmt: skip
    found = read_folder(root)
    source = found.samples
    assert source.classes == ("a", "b") and keys_of(source) == ["a/1.png", "b/2.png"] and len(found.others) == 0
    assert found.faults == ()
    assert len(read_folder(root, unlabelled=True).samples) == 2


def test_images_beside_class_folders_are_counted(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png", "cover.jpg", "notes.txt", ".hidden.png")
    (fault,) = read_folder(root).faults
    assert (fault.kind, fault.severity, fault.count) == ("loose-images", "warning", 1)
    assert fault.text == f"{root}: skipped 1 image outside of the class folders"


def test_a_tolerant_source_leaves_out_what_it_does_not_know(tree: Trees) -> None:
    found = read_folder(tree("a/1.png", "b/1.png", "c/1.png"), ("b", "d"), tolerant=True)
    source = found.samples
    assert keys_of(source) == ["b/1.png"] and source.target(0) == 0
    (fault,) = found.faults
    assert (fault.kind, fault.severity, fault.count) == ("unknown-class", "error", 2)
    assert fault.text.endswith("has unknown classes: a, c; the known classes are: b, d")


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on another user takes root")
def test_a_folder_that_may_not_be_read_is_named(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png")
    (root / "b").chmod(0o711)
    for parent in (root, *root.parents[:4]):  # pytest's own folders, of which there is one more with several workers
        if parent.owner() == "root" and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"^folder .*pictures/b cannot be read: Permission denied$"):
            read_folder(root)
        os.seteuid(0)
        root.chmod(0o711)
        os.seteuid(65534)
        with pytest.raises(DataError, match=r"^folder .*pictures cannot be read: Permission denied$"):
            read_folder(root)
    finally:
        os.seteuid(0)


def test_links_are_followed_and_no_folder_is_entered_twice(tree: Trees) -> None:
    root = tree("a/1.png", "a/deep/2.png", "b/3.png")
    (root / "a" / "again").symlink_to(root / "a" / "deep")
    (root / "a" / "deep" / "up").symlink_to(root / "a")
    (root / "b" / "linked.png").symlink_to(root / "a" / "1.png")
    (root / "c").symlink_to(tree("x/4.png", name="elsewhere") / "x")
    source = read_folder(root).samples
    assert keys_of(source) == ["a/1.png", "a/again/2.png", "b/3.png", "b/linked.png", "c/4.png"]
    assert source.classes == ("a", "b", "c")
    check_source(source, decodes=False)


def test_a_link_to_another_class_or_out_of_the_folder_takes_no_images_of_it(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png", "c/3.png")
    for name, target in (("b", root / "b"), ("deep/up", root), ("self", root / "a")):
        (root / "a" / name).parent.mkdir(exist_ok=True)
        (root / "a" / name).symlink_to(target)
    assert keys_of(read_folder(root).samples) == ["a/1.png", "b/2.png", "c/3.png"]
    assert keys_of(read_folder(root, unlabelled=True).samples) == ["a/1.png", "a/b/2.png", "c/3.png"]


def test_a_link_to_itself_is_skipped_and_one_that_leads_nowhere_is_an_image_that_cannot_be_read(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png")
    (root / "a" / "loop").symlink_to("loop")
    (root / "a" / "gone.png").symlink_to(root / "nowhere.png")
    found = read_folder(root)
    assert keys_of(found.samples) == ["a/1.png", "a/gone.png", "b/2.png"] and len(found.others) == 1
    with pytest.raises(DataError, match=r"cannot read .*a/gone\.png: No such file"):
        found.samples[1]


def opened(root: Path | str, *words: str) -> Splits:
    return open_data(with_choice(str(root), words) if words else str(root), validation_share=0.0)


def in_classes(*folders: str) -> list[str]:
    """Return an image of each of two classes in each folder. No two images have the same name."""
    return [f"{folder}/{name}/{folder.replace('/', '-')}.png" for folder in folders for name in ("cat", "dog")]


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [("Training data", "eval-images", "TESTING"), ("asl_alphabet_train", "asl_alphabet_val", "asl_alphabet_test")],
)
def test_the_usual_names_are_splits(tree: Trees, train: str, validation: str, test: str) -> None:
    splits = opened(tree(*in_classes(train, validation, test)))
    assert splits.classes == ("cat", "dog") and splits.notes == () and splits.held_out == ("test", splits.test)
    assert keys_of(splits.train) == [f"cat/{train}.png", f"dog/{train}.png"]
    assert keys_of(splits.validation) == [f"cat/{validation}.png", f"dog/{validation}.png"]
    assert keys_of(splits.test) == [f"cat/{test}.png", f"dog/{test}.png"]


@pytest.mark.parametrize("names", [("learn", "measure"), ("site A", "site B", "site C"), ("fold0", "fold1", "fold2")])
def test_folders_of_the_same_names_are_asked_about(tree: Trees, names: tuple[str, ...]) -> None:
    root = tree(*in_classes(*names))
    with pytest.raises(DataError, match=r"--splits train=.*,test="):
        opened(root)
    splits = opened(root, f"train={names[0]}", f"test={names[1]}")
    assert splits.classes == ("cat", "dog") and keys_of(splits.test) == [f"cat/{names[1]}.png", f"dog/{names[1]}.png"]
    assert [name in "".join(splits.notes) for name in names[2:]] == [True] * len(names[2:])
    assert opened(root, "none").classes == tuple(sorted(names))


def test_folders_of_one_common_name_are_classes(tree: Trees) -> None:
    splits = opened(tree("n01/images/1.png", "n02/images/2.png", "n03/images/3.png"))
    assert splits.classes == ("n01", "n02", "n03")


def test_a_split_can_have_several_folders(tree: Trees) -> None:
    root = tree(*in_classes("fold0", "fold1", "fold2"), "fold2/eel/1.png")
    splits = opened(root, "train=fold0", "fold2", "test=fold1")
    assert splits.classes == ("cat", "dog", "eel")
    assert keys_of(splits.train) == [
        "fold0/cat/fold0.png", "fold0/dog/fold0.png", "fold2/cat/fold2.png", "fold2/dog/fold2.png", "fold2/eel/1.png",
    ]  # fmt: skip
    assert targets_of(splits.train) == [0, 1, 0, 1, 2]
    assert targets_of(splits.test) == [0, 1]
    assert splits.train[4].key == "fold2/eel/1.png"
    assert keys_of(opened(root, "train=fold[02]", "test=fold1").train) == keys_of(splits.train)


def test_the_name_of_data_carries_its_splits(tree: Trees) -> None:
    root = tree(*in_classes("for 100% & more", "rest"))
    name = with_choice(f"{root}[:50%]", ["train=for 100% & more", "test=rest"])
    assert name.endswith("[:50%]") and name.startswith(f"{root}?train=")
    assert len(open_data(name, validation_share=0.0).train) == 1
    with pytest.raises(ConfigError, match="has this choice already"):
        with_choice(name, ["none"])
    with pytest.raises(DataError, match="nothing named absent"):
        opened(root, "train=absent")
    for spec in ("bundled", "fractals:2:4"):
        with pytest.raises(DataError, match="--splits"):
            open_data(f"{spec}?train=a", validation_share=0.0)


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        *(([f"test/{path}1.png"], "not in class folders") for path in ("", "test/", "images/", "unknown/")),
        (["test/"], "no images"), (["test/cat/", "test/dog/"], "no images"), (["test/notes.txt"], "no images"),
    ],
)  # fmt: skip
def test_a_held_out_split_without_labels_is_skipped(tree: Trees, paths: list[str], reason: str) -> None:
    root = tree(*in_classes("train"), *paths, *(path.replace("test", "val") for path in paths))
    splits = opened(root)
    assert (splits.validation, splits.test) == (None, None) and splits.classes == ("cat", "dog")
    for split in ("test", "val"):
        (note,) = [note for note in splits.notes if f"{split}/" in note]
        assert reason in note
    assert len(open_whole(str(root), unlabelled=True).whole.train) == 2


@pytest.mark.parametrize("names", [("valid", "invalid"), ("control", "test"), ("dev", "prod")])
def test_two_classes_of_which_one_has_the_name_of_a_split(tree: Trees, names: tuple[str, str]) -> None:
    root = tree(*(f"{name}/{number}.png" for name in names for number in range(2)))
    splits = opened(root)
    assert splits.classes == tuple(sorted(names)) and splits.test is None and splits.validation is None
    assert any("--splits" in note for note in splits.notes)
    assert opened(root, "none").notes == ()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["fold_1/1.png", "fold_2/2.png"], "has the folds fold_1, fold_2"),
        (["cat/1.png", "dog/2.png", "test/3.png"], "has test beside cat, dog"),
        (in_classes("learn", "test"), "has test beside learn"),
        (["learn/0.tar", "measure/0.tar"], r"shards in the folders learn, measure, .*--splits"),
    ],
)
def test_folders_that_may_be_splits_or_classes_are_asked_about(tree: Trees, paths: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(tree(*paths))


def test_data_without_training_images_opens_only_to_be_measured(tree: Trees) -> None:
    root = tree(*in_classes("Testing"))
    with pytest.raises(DataError, match="has a test split but no training images"):
        opened(root)
    splits = open_whole(str(root), needs_training=False).whole
    assert len(splits.train) == 0 and splits.classes == ("cat", "dog") and splits.held_out == ("test", splits.test)


def test_a_folder_around_the_data_is_entered_with_a_note(tree: Trees) -> None:
    root = tree("outer/inner/cat/1.png", "outer/inner/dog/2.png", "__MACOSX/inner/cat/1.png", "README.txt")
    splits = opened(root)
    assert splits.classes == ("cat", "dog") and keys_of(splits.train) == ["cat/1.png", "dog/2.png"]
    assert any("outer/, the only folder" in note for note in splits.notes)
    parts = opened(tree("images/cat/1.png", "images/dog/2.png", "parts/parts.txt", "meta/", name="with parts"))
    assert parts.classes == ("cat", "dog")
    (root / "cats").mkdir()
    only_cats = tree("cats/old/1.png", "cats/young/2.png", "dogs/", name="only cats")
    known = open_data(str(only_cats), validation_share=0.0, classes=("cats", "dogs"))
    assert keys_of(known.train) == ["cats/old/1.png", "cats/young/2.png"]
    doubled = opened(tree("train/train/cat/1.png", "train/train/dog/2.png", "test/test/cat/3.png", name="doubled"))
    assert keys_of(doubled.train) == ["cat/1.png", "dog/2.png"] and keys_of(doubled.test) == ["cat/3.png"]


@pytest.mark.parametrize(
    "paths",
    [
        ("images/train/1.png", "labels/train/1.txt", "data.yaml"),
        ("train/images/1.png", "train/labels/1.txt", "valid/images/2.png", "valid/labels/2.txt"),
        ("train2017/1.png", "val2017/2.png", "annotations/instances_train2017.json"),
        ("train/1.png", "trainannot/1.gif", "test/2.png", "testannot/2.gif"),
        ("train/1.jpg", "train_masks/1_mask.gif"),
    ],
)
def test_data_with_masks_or_boxes_is_named_as_such(tree: Trees, paths: tuple[str, ...]) -> None:
    root = tree(*paths)
    for unlabelled in (False, True):
        with pytest.raises(DataError, match="layout of data with masks or boxes"):
            open_data(str(root), validation_share=0.0, unlabelled=unlabelled)


def test_folders_called_images_and_masks_can_be_classes(tree: Trees) -> None:
    assert opened(tree("images/1.png", "masks/2.png"), "none").classes == ("images", "masks")
    for number, names in enumerate((("face", "face_mask"), ("mask", "no mask"), ("with_mask", "without_mask"))):
        root = tree(*(f"{name}/1.png" for name in names), name=str(number))
        (root / "licences.csv").write_text("photo,author\n1,Ann\n")
        assert opened(root).classes == names


def test_masks_in_the_folders_of_classes_are_skipped(tree: Trees) -> None:
    kept = ["benign/images/1.png", "benign/images/2.png", "normal/1.png", "normal/3_mask.png"]
    splits = opened(tree(*kept, "benign/masks/1.png", "normal/1_mask.png"))
    assert keys_of(splits.train) == kept and "normal/1_mask.png" in splits.notes[0]


def test_tiny_imagenet_is_read(tree: Trees) -> None:
    root = tree(
        "train/n1/images/n1_0.JPEG", "train/n1/n1_boxes.txt", "train/n2/images/n2_0.JPEG", "train/n2/n2_boxes.txt",
        "val/images/val_0.JPEG", "val/images/val_1.JPEG", "test/images/test_0.JPEG", "wnids.txt",
    )  # fmt: skip
    table = root / "val/val_annotations.txt"
    table.write_text("val_1.JPEG\tn1\t0\t0\t9\t9\nval_0.JPEG\tn2\t0\t0\t9\t9\n")
    splits = opened(root)
    assert splits.classes == ("n1", "n2") and splits.test is None
    assert keys_of(splits.validation) == ["images/val_1.JPEG", "images/val_0.JPEG"]
    assert targets_of(splits.validation) == [0, 1]
    table.write_text("val_1.JPEG\tn3\t0\t0\t9\t9\n")
    with pytest.raises(DataError, match="'n3' is not a class"):
        opened(root)
    table.write_text("val_7.JPEG\tn1\t0\t0\t9\t9\n")
    with pytest.raises(DataError, match=r"the image val_7\.JPEG does not exist"):
        opened(root)


def test_class_folders_win_over_tables_beside_them(tree: Trees) -> None:
    root = tree("cat/1.png", "dog/2.png")
    (root / "licences.csv").write_text("photo,author\n1,Ann\n")
    (root / "other.csv").write_text("path,label\ncat/1.png,x\ndog/2.png,y\n")
    splits = opened(root)
    assert splits.classes == ("cat", "dog")
    (note,) = splits.notes
    assert "licences.csv, other.csv" in note and f"name {root / 'licences.csv'} as the data" in note
    assert opened(root / "other.csv").classes == ("x", "y")
    with pytest.raises(DataError, match="has no column of paths"):
        opened(root / "licences.csv")


@pytest.mark.parametrize("name", ["labels.parquet", "cat.tar", "train.tar", "train/metadata.csv"])
def test_class_folders_win_over_archives_beside_them(tree: Trees, name: str) -> None:
    root = tree("train/cat/1.png", "train/dog/2.png", name)
    splits = opened(root)
    assert splits.classes == ("cat", "dog") and any(name in note for note in splits.notes)


def test_tables_of_splits_beside_class_folders_can_be_chosen(tree: Trees) -> None:
    root = tree("a/1.png", "b/2.png", "a/3.png")
    (root / "train.csv").write_text("path,label\na/1.png,x\nb/2.png,y\n")
    (root / "test.csv").write_text("path,label\na/3.png,y\n")
    (note,) = opened(root).notes
    assert "--splits test=test.csv,train=train.csv" in note
    splits = opened(root, "train=train.csv", "test=test.csv")
    assert splits.classes == ("x", "y") and keys_of(splits.test) == ["a/3.png"]


@pytest.mark.parametrize(("name", "content"), [
    ("predictions.jsonl", {"image": "cat/1.png", "label": "x", "probability": 1.0, "probabilities": {"x": 1.0}}),
    ("numbers.jsonl", {"image": "cat/1.png", "numbers": {"age": 1.0}}),
    ("broken.jsonl", {"image": "cat/1.png", "error": "is truncated"}),
    ("ranks.csv", "image,class_1,probability_1,error\ncat/1.png,x,1,\n"),
    ("numbers.csv", "image,age,error\ncat/1.png,1,\n"),
])  # fmt: skip
def test_predictions_are_never_labels(tree: Trees, name: str, content: object) -> None:
    root = tree("cat/1.png", "dog/2.png")
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    splits = opened(root)
    assert splits.classes == ("cat", "dog") and any(name in note for note in splits.notes)
    with pytest.raises(DataError, match="holds predictions of a model"):
        opened(root / name)
    flat = tree("1.png", name="flat")
    (root / name).rename(flat / name)
    with pytest.raises(DataError, match="no class folders"):
        opened(flat)


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", {"config": {}}), ("report.json", {"saliency": None}), ("explain.json", {"files": []})],
)
def test_folders_that_vitrail_wrote_are_never_classes(tree: Trees, name: str, content: dict[str, object]) -> None:
    root = tree("cat/1.png", "dog/2.png", "out/first/files/3.png", "out/second/4.png", "cat/more/5.png", "mine/6.png")
    for folder in ("out/first", "out/second", "cat/more"):
        (root / folder / name).write_text(json.dumps(content))
    splits = opened(root)
    assert splits.classes == ("cat", "dog", "mine")
    assert keys_of(splits.train) == ["cat/1.png", "dog/2.png", "mine/6.png"]
    (note,) = splits.notes
    assert "2 folders that Vitrail wrote: cat/more, out" in note
    assert keys_of(open_data(str(root), validation_share=0.0, unlabelled=True).train) == keys_of(splits.train)


def test_a_file_of_the_same_name_does_not_make_a_folder_ours(tree: Trees) -> None:
    root = tree("cat/1.png", "dog/2.png", "dog/report.json")
    (root / "cat/run.json").write_text('{"speed": 3}')
    assert opened(root).classes == ("cat", "dog")


def test_the_output_of_vitrail_alone_is_no_data(tree: Trees) -> None:
    root = tree("runs/a/examples/1.png", "runs/b/examples/2.png")
    for name in "ab":
        (root / "runs" / name / "run.json").write_text('{"config": {}}')
    for place in (root, root / "runs", root / "runs/a"):
        with pytest.raises(DataError, match="that Vitrail wrote"):
            open_data(str(place), validation_share=0.0, unlabelled=True)


def test_a_url_of_a_folder_on_the_disk_is_its_path_and_others_are_named_as_they_were_given(tree: Trees) -> None:
    assert opened(f"file://{tree('a b/1.png', 'c/2.png')}".replace(" ", "%20")).classes == ("a b", "c")
    for url in ("https://host/labels.csv", "s3://bucket/flowers.zip", "https://host/x/1.jpg"):
        with pytest.raises(DataError, match=f"data '{url}' is a URL, from which only tar shards are read"):
            open_data(url, validation_share=0.0)


def test_tables_in_folders_of_splits_are_read(tree: Trees) -> None:
    root = tree("train/1.png", "train/2.png", "validation/3.png", "test/4.png")
    lines = (f'{{"file_name": "{number}.png", "label": "{label}"}}\n' for number, label in ((1, "a"), (2, "b")))
    (root / "train/metadata.jsonl").write_text("".join(lines))
    (root / "validation/metadata.csv").write_text("file_name,label\n3.png,b\n")
    splits = opened(root)
    assert splits.classes == ("a", "b") and keys_of(splits.train) == ["1.png", "2.png"] and splits.test is None
    assert splits.validation[0].key == "3.png" and splits.validation.target(0) == 1
    assert len(splits.notes) == 1 and "skipped test" in splits.notes[0]
    (root / "test/metadata.jsonl").write_text('{"file_name": "4.png"}\n')
    assert "test split is skipped" in opened(root).notes[0]


def test_held_out_tables_without_labels_or_rows_are_skipped(tree: Trees) -> None:
    root = tree("images/1.png", "images/2.png", "images/3.png")
    (root / "train.csv").write_text("path,label,age\nimages/1.png,a,3\nimages/2.png,b,4\n")
    for text, reason in (("", "empty"), ("path,label\n", "no rows"), ("path\nimages/3.png\n", "has a label")):
        (root / "test.csv").write_text(text)
        splits = opened(root)
        assert splits.classes == ("a", "b") and splits.test is None
        (note,) = (note for note in splits.notes if "test.csv" in note)
        assert reason in note
    splits = open_data(str(root), validation_share=0.0, numbers=("age",))
    assert splits.test is None and "no column of numbers" in splits.notes[-1]


def test_several_tables_are_asked_about(tree: Trees) -> None:
    root = tree("images/1.png", "images/2.png")
    for name in ("mine.csv", "yours.csv"):
        (root / name).write_text("path,label\nimages/1.png,a\nimages/2.png,b\n")
    with pytest.raises(DataError, match=r"has several tables: mine\.csv, yours\.csv"):
        opened(root)
    (root / "mine.csv").write_text("photo,author\n1,Ann\n")
    splits = opened(root)
    assert splits.classes == ("a", "b") and "mine.csv" in splits.notes[0]


def test_values_of_a_column_are_chosen(tree: Trees) -> None:
    root = tree("images/1.png", "images/2.png", "images/3.png", "images/4.png")
    lines = ["images/1.png,a,learn", "images/2.png,b,learn", "images/3.png,a,measure", "images/4.png,a,later"]
    (root / "labels.csv").write_text("path,label,split\n" + "\n".join(lines))
    for place in (root, root / "labels.csv"):
        splits = opened(place, "train=learn", "test=measure")
        assert keys_of(splits.train) == ["images/1.png", "images/2.png"] and keys_of(splits.test) == ["images/3.png"]
        assert len(splits.notes) == 1 and "later" in splits.notes[0]


def test_idx_files_without_labels_or_training_images(idx_folder: Callable[..., Path]) -> None:
    root = idx_folder(train=[0, 1], t10k=[1, 0])
    (root / "t10k-labels-idx1-ubyte").unlink()
    splits = opened(root)
    assert splits.test is None and "test split is skipped" in splits.notes[0]
    only = idx_folder(name="only", t10k=[1, 0])
    assert len(open_whole(str(only), needs_training=False).whole.test) == 2
    with pytest.raises(DataError, match="has a test split but no training images"):
        opened(only)


def test_folders_of_one_name_are_one_class(tree: Trees) -> None:
    root = tree("cafe\u0301/1.png", "caf\u00e9/2.png", "Dog/3.png", "dog/4.png", "None/5.png")
    splits = opened(root)
    assert splits.classes == ("Dog", "None", "caf\u00e9", "dog")
    targets = {splits.train.key(index).split("/")[1]: splits.train.target(index) for index in range(5)}
    assert targets == {"1.png": 2, "2.png": 2, "3.png": 0, "4.png": 3, "5.png": 1}
    faults = open_whole(str(root), tolerant=True).whole.faults
    assert [fault.kind for fault in faults] == ["joined-folders", "similar-names"]
    assert any("'Dog' and 'dog'" in note for note in splits.notes)


def test_a_choice_without_effect_is_refused(tree: Trees) -> None:
    root = tree(*in_classes("a", "b"))
    with pytest.raises(DataError, match="--label-separator has no effect on data"):
        open_data(with_choice(str(root), separator="|"), validation_share=0.0)
    for name in ("train=**", "train=a**", "train=."):
        with pytest.raises(DataError):
            opened(root, name)
    (root / "t.csv").write_text("path,age,note\na/cat/a.png,3,old\na/dog/a.png,4,new\n")
    for spec, numbers in ((f"{root}/t.csv?separator=|", ("age",)), (f"{root}/t.csv?text=note&separator=|", ())):
        notes = open_data(spec, validation_share=0.0, numbers=numbers).notes
        assert [note for note in notes if "--label-separator has no effect" in note]
        assert not [note for note in notes if "learned as" in note]
