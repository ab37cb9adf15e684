"""Tests of opening data by its SPEC: names, folders with and without splits, and held-out validation images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import keys_of, mix_in, targets_of
from vitrail.cli import main
from vitrail.data import sources
from vitrail.data.formats import folder, idx
from vitrail.data.pixels.decode import decode, pixel_limit
from vitrail.data.source import Source, samples_of, target_kind
from vitrail.data.sources import DataConfig, open_data, open_mixed, open_whole
from vitrail.data.splits import Format, Splits, check_classes, check_numbers
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError, UndecodableImage

Trees = Callable[..., Path]


def names_of(source: Source | None) -> list[str]:
    assert source is not None
    return [source.classes[target] for target in targets_of(source)]


def many(*folders: str, count: int = 40) -> list[str]:
    return [f"{folder}/{number:03}.png" for folder in folders for number in range(count)]


def test_class_folders_are_cut_and_the_cut_is_stated(tree: Trees) -> None:
    root = tree(*many("a", "b", count=60), "b/readme.txt")
    splits = open_data(str(root), validation_share=0.25)
    assert splits.classes == ("a", "b") and splits.test is None and len(splits.validation) == 30
    assert sorted(keys_of(splits.train) + keys_of(splits.validation)) == many("a", "b", count=60)
    skipped, held_out = splits.notes
    assert skipped == f"{root}: skipped 1 file without a suffix of an image format"
    assert "has no validation split: 30 of its 120 training images are held out" in held_out and "25%" in held_out


@pytest.mark.parametrize(("name", "value"), [
    *(("validation_share", share) for share in (1, -0.1, float("nan"), "0.1")),
    ("validation", "test"), ("cut_method", "random"), ("per_class", 0),
])  # fmt: skip
def test_cuts_that_cannot_be_are_refused(name: str, value: Any, tree: Trees, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        open_data(str(tree(*many("a", "b"))), **{"validation_share": 0.1, name: value})


def test_data_is_named_by_a_text_or_a_path_that_is_not_empty(
    tree: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types_unchecked: None
) -> None:
    root = tree(*many("a", "b"), name="set[:10%]")  # a path in brackets that exists is a path
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in (root, str(root), "~/set[:10%]"):
        assert keys_of(open_data(spec, validation_share=0).train) == many("a", "b")
    with pytest.raises(DataError, match="data '' names nothing"):  # such as an unset variable of the shell
        open_data("", validation_share=0)
    with pytest.raises(DataError, match="names nothing"):  # nor is it the current folder with a choice of splits
        open_data("?train=a", validation_share=0)
    with pytest.raises(ConfigError, match="data=5 is not a text"):
        open_data(5, validation_share=0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data 'x+' cannot be read: File name too long; correct the path"):
        open_data("x" * 300, validation_share=0)


def test_a_share_of_0_leaves_no_validation_split(tree: Trees) -> None:
    splits = open_data(str(tree(*many("a", "b"))), validation_share=0.0)
    assert splits.validation is None and splits.test is None and splits.held_out is None and splits.notes == ()
    assert keys_of(splits.train) == many("a", "b")


def test_held_out_images_have_the_classes_of_training(tree: Trees) -> None:
    root = tree("train/a/1.png", "train/b/1.png", "train/c/1.png", "val/c/1.png", "val/b/1.png", "test/c/2.png")
    splits = open_data(str(root), validation_share=0.0)
    assert splits.validation.classes == splits.test.classes == ("a", "b", "c")
    assert [*targets_of(splits.validation), *targets_of(splits.test)] == [1, 2, 2]
    shutil.rmtree(root / "test")
    splits = open_data(str(root), validation_share=0.0)
    assert splits.held_out == ("validation", splits.validation)


def test_a_task_without_labels_says_which_folders_it_does_not_read_as_splits_or_classes(tree: Trees) -> None:
    with pytest.raises(DataError, match=r"bare has no images \(.*\), neither in it nor in its folders"):
        open_data(str(tree("one/a.txt", name="bare")), validation_share=0.0, unlabelled=True)
    root = tree("a/1.png", "b/1.png", "test/1.png")
    splits = open_data(str(root), validation_share=0.0, unlabelled=True)
    assert splits.notes == (f"{root}: test is read like a, b, because there is no train/",)
    assert splits.test is None and len(splits.train) == 3 and splits.classes == ("a", "b", "test")
    check_classes(splits)
    (root / "test/1.png").rename(root / "1.png")
    (root / "test").rmdir()
    splits = open_data(str(root), validation_share=0.0, unlabelled=True)
    assert splits.notes == (f"{root}: the folders a, b are not read as classes, because images lie beside them",)
    assert splits.target_kind == "none" and len(splits.train) == 3


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("train/", "val/a/1.png"), r"train has no class folders; it needs one folder of images for each class"),
        (("train/1.png", "test/1.png"), r"train has images but no class folders; .* add --splits none"),
        (("a/1.png", "b\udcff/1.png"), "unprintable names"),
        (("a/notes.txt", "b/"), r"has no images \(\.apng, \.avif, .*\.webp\) in its class folders: a, b; add images$"),
    ],
)
def test_folders_without_classes_to_learn_are_refused(tree: Trees, paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_data(str(tree(*paths)), validation_share=0.1)


def test_what_is_harmless_is_a_note(tree: Trees) -> None:
    root = tree(
        "train/a/1.png", "train/b/1.png", "train/bare/", "train/c.zip", "train/c.txt", "val/a/2.png", "val/bare/",
        "__MACOSX/train/a/._1.png", "train/@eaDir/x.jpg", ".DS_Store", "extra/a/1.png", "docs/1.txt", ".git/a/1.png",
        "more.tar.gz",
    )  # fmt: skip
    splits = open_data(str(root), validation_share=0.0)
    assert splits.classes == ("a", "b") and splits.faults == () and len(splits.train) == 2
    archives = "because archives are not read; unpack the images in them"
    assert splits.notes == (
        f"{root}: skipped docs, extra, because only train/, val/ and test/ are read",
        f"{root}: skipped more.tar.gz, {archives}",
        f"{root}/train: skipped c.zip, {archives}",
        f"{root}/train: skipped 1 class folder without images: bare",
        f"{root}/val: skipped 1 class folder without images: bare",
    )
    unlabelled = open_data(str(root), validation_share=0.0, unlabelled=True)
    assert unlabelled.notes[0] == splits.notes[0] and len(unlabelled.train) == 2


def test_what_is_a_fault_is_refused_in_one_message(tree: Trees) -> None:
    root = tree("train/a/1.png", "train/b/1.png", "train/weed/", "val/weed/1.png", "valid/a/3.png", "test/a/2.png")
    (root / "test/a/4.png").symlink_to(root / "train/a/1.png")
    with pytest.raises(DataError) as caught:
        open_data(str(root), validation_share=0.0)
    for line, begin in zip(str(caught.value).split("\n"), [
        f"{root} has val and valid, but only one folder can be the validation split; ",
        f"{root}/val has unknown classes: weed; the known classes are: a, b",
        f"the training split and the test split share 1 file, such as {root}/train/a/1.png and {root}/test/a/4.png; ",
        f"{root}/train: skipped 1 class folder without images: weed",
    ], strict=True):  # fmt: skip
        assert line.startswith(begin)
    splits = open_whole(str(root), tolerant=True).whole
    assert [fault.kind for fault in splits.faults] == [
        "ambiguous-split", "empty-folder", "unknown-class", "shared-files"
    ]  # fmt: skip
    assert splits.validation is None and len(splits.test) == 2 and splits.classes == ("a", "b")


def test_a_table_with_a_label_only_in_a_held_out_split(tree: Trees) -> None:
    root = tree("1.png", "2.png", "3.png", "4.png", "5.png")
    lines = ["1.png,a,train", "2.png,b,train", "3.png,weed,val", "4.png,a,val", "5.png,weed,test"]
    (root / "labels.csv").write_text("path,label,split\n" + "\n".join(lines))
    with pytest.raises(DataError, match=r"line 4: the label 'weed' is not among the classes"):
        open_data(str(root / "labels.csv"), validation_share=0.0)
    splits = open_whole(str(root / "labels.csv"), tolerant=True).whole
    assert [(fault.kind, fault.count) for fault in splits.faults] == [("unknown-class", 1), ("unknown-class", 1)]
    assert len(splits.validation) == 1 and splits.test is None


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("Fashion-MNIST", ", and no data set has this name (nearest: fashion-mnist)"),
        ("zzz", ", and no data set has this name (choices: bundled, fashion-mnist, fractals:CLASSES:SAMPLES, "),
        *((spec, "") for spec in ("flowers/bundeld", "./bundeld", "~no-such-user/flowers")),
    ],
)
def test_a_path_that_does_not_exist_is_named_with_the_nearest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        open_data(spec, validation_share=0.1)
    assert str(caught.value).startswith(f"data {spec!r} does not exist: there is no such file or folder{hint}")
    assert hint or str(caught.value).endswith("folder")


def test_a_folder_with_the_name_of_bundled_data_is_noted(
    tree: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree("a/1.png", "b/1.png").rename(tmp_path / "bundled")
    monkeypatch.chdir(tmp_path)
    for spec, is_noted in (("bundled", True), ("./bundled", False), (str(tmp_path / "bundled"), False)):
        found = open_data(spec, validation_share=0.0)
        assert found.classes == ("a", "b") and any("'bundled'" in note for note in found.notes) == is_noted


def test_a_models_classes_index_the_folders(tree: Trees) -> None:
    root = str(tree("rose/1.png", "daisy/1.png"))
    splits = open_data(root, validation_share=0.0, classes=("rose", "lily", "daisy"))
    assert splits.classes == ("rose", "lily", "daisy")
    assert names_of(splits.train) == ["daisy", "rose"]
    with pytest.raises(DataError, match=r"unknown classes: daisy; the known classes are: rose, lily$"):
        open_data(root, validation_share=0.0, classes=("rose", "lily"))


def test_a_message_does_not_list_a_thousand_classes(tree: Trees) -> None:
    """Neither those of the model, nor those of the data."""
    known = tuple(f"class {number}, of the model" for number in range(1000))
    root = tree(*(f"n{number:03}/1.png" for number in range(200)))
    with pytest.raises(DataError, match=r"n000.* class 19, of the model.* and 9[08]0 more") as caught:
        open_data(str(root), validation_share=0.0, classes=known)
    assert len(str(caught.value)) < 3000


def test_idx_folders_have_splits_and_numbered_classes(idx_folder: Callable[..., Path]) -> None:
    root = idx_folder(train=[0, 2, 1, 1], val=[0, 0], t10k=[1])
    splits = open_data(str(root), validation_share=0.5)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (4, 2, 1)
    assert splits.classes == splits.validation.classes == splits.test.classes == ("0", "1", "2")
    assert splits.notes == ()
    splits = open_data(str(idx_folder(name="cut", train=[0, 1] * 50)), validation_share=0.2)
    assert sorted(keys_of(splits.train) + keys_of(splits.validation)) == sorted(map(str, range(100)))


def test_numbers_of_idx_files_are_matched_with_classes_of_the_same_name(idx_folder: Callable[..., Path]) -> None:
    root = idx_folder(train=[0, 2, 1])
    splits = open_data(str(root), validation_share=0.0, classes=("1", "10", "2", "0"))
    assert splits.classes == ("1", "10", "2", "0")
    assert targets_of(splits.train) == [3, 2, 0]
    for classes in (("x", "y", "z"), ("0", "1")):
        with pytest.raises(DataError, match="the labels of IDX files are numbers without names"):
            open_data(str(root), validation_share=0.0, classes=classes)


def test_bundled_is_ten_classes_and_is_cut() -> None:
    splits = open_data("bundled", validation_share=0.1)
    assert splits.classes == idx.FASHION_MNIST and len(splits.test) == 2000
    assert len(splits.train) + len(splits.validation) == 10_000 and 880 < len(splits.validation) < 1120
    assert splits.notes[0].startswith(f"data 'bundled' has no validation split: {len(splits.validation):,} of its 10,")
    assert set(np.unique(names_of(splits.validation))) == set(idx.FASHION_MNIST)
    assert open_data("bundled", validation_share=0.0, classes=idx.FASHION_MNIST).classes == idx.FASHION_MNIST
    with pytest.raises(DataError, match=r"'bundled' has the classes T-shirt/top, .*, but the model has cat, dog; "):
        open_data("bundled", validation_share=0.0, classes=("cat", "dog"))


def test_fashion_mnist_is_opened_where_it_is(idx_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = idx_folder(train=[0, 9, 3], t10k=[5])
    monkeypatch.setattr("vitrail.data.formats.idx.locate_fashion_mnist", lambda: root)
    splits = open_data("fashion-mnist", validation_share=0.0)
    assert isinstance(splits, Splits) and splits.classes == idx.FASHION_MNIST
    assert names_of(splits.train) == ["T-shirt/top", "Ankle boot", "Dress"] and names_of(splits.test) == ["Sandal"]


def test_part_of_the_training_images_is_taken_after_the_cut(tree: Trees) -> None:
    root = str(tree(*many("a", "b", count=50)))
    whole = open_data(root, validation_share=0.2)
    count, tenth = (open_data(f"{root}{part}", validation_share=0.2) for part in ("[:50]", "[:10%]"))
    assert keys_of(count.validation) == keys_of(tenth.validation) == keys_of(whole.validation)
    assert len(count.train) == 50 and len(tenth.train) == round(0.1 * len(whole.train))
    assert set(keys_of(tenth.train)) < set(keys_of(count.train)) < set(keys_of(whole.train))
    assert f"50 of {len(whole.train)} training images are used" in count.notes[-1]
    other = open_data(f"{root}[:50]", validation_share=0.2, subset_seed=1)
    assert keys_of(other.train) != keys_of(count.train) and keys_of(other.validation) == keys_of(whole.validation)


def test_so_many_of_each_class_are_taken(tree: Trees) -> None:
    splits = open_data(str(tree(*many("a", "b"), *many("c", count=3))), validation_share=0.0, per_class=5)
    names = names_of(splits.train)
    assert [names.count(name) for name in "abc"] == [5, 5, 3]
    assert splits.notes[-1].startswith("13 of 83 training images")
    assert splits.notes[-1].endswith("; 1 of the 3 classes have fewer than 5")
    both = open_data(str(tree(*many("a", "b"), name="both")) + "[:20]", validation_share=0.0, per_class=2)
    assert len(both.train) == 4 and "fewer" not in both.notes[-1]
    few = open_data(str(tree(*many("a", count=60), "b/1.png", "c/1.png", name="few")) + "[:3]", validation_share=0.0)
    assert few.classes == ("a", "b", "c") and "2 of the 3 classes have no image among them" in few.notes[-1]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("[100:200]", r"ends in \[100:200\], which is not an amount; write \[:1000\] for 1,000"),
        ("[:]", r"ends in \[:\], which is not an amount"), ("[:-1]", r"ends in \[:-1\], which is not an amount"),
        ("[:101%]", r"selects 101% of its images; the amount is at most 100%"),
        ("[:81]", r"selects 81 of 80 training images"),
        ("[:2.5]", r"selects 2\.5 of 80 training images; give a whole number"),
        ("[:0]", r"selects none of 80 training images"), ("[:0.1%]", r"selects none of 80 training images"),
    ],
)  # fmt: skip
def test_amounts_that_make_no_sense_are_refused(tree: Trees, part: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_data(str(tree(*many("a", "b"))) + part, validation_share=0.0)


def test_open_data_is_cut_again_without_opening_it(tree: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    root, more = tree(*many("a", "b"), name="data"), tree(*many("a", "c", count=7), name="more")
    opened = open_whole(f"{root}[:20]")
    opened = replace(opened, mixed=open_mixed(opened.whole, (f"0.25:{more}",)))
    monkeypatch.setattr(folder, "read_folder", lambda *_, **__: pytest.fail("a folder was opened again"))
    cuts = {fraction: opened.splits(validation_share=fraction, subset_seed=3) for fraction in (0.0, 0.1, 0.3)}
    monkeypatch.undo()
    for fraction, splits in cuts.items():
        expected = open_data(f"{root}[:20]", validation_share=fraction, subset_seed=3)
        assert keys_of(splits.train.first_part()) == keys_of(expected.train)
        assert splits.classes == ("a", "b", "c") and splits.notes == expected.notes
        assert (splits.validation is None) == (fraction == 0)
        assert fraction == 0 or keys_of(splits.validation) == keys_of(expected.validation)


def test_drawn_samples_are_held_out_in_any_number() -> None:
    opened = open_whole("fractals:3:10")
    assert opened.splits(validation_share=0.0).validation is None
    splits = opened.splits(validation_share=0.5)
    assert len(splits.train) == len(splits.validation) == 30
    assert not {*keys_of(splits.train)} & {*keys_of(splits.validation)}


def test_a_mixture_notes_classes_that_differ_in_case(tree: Trees) -> None:
    splits = open_data(str(tree("a/1.jpg", "b/2.jpg", name="first")), validation_share=0.0)
    more = tree("A/3.jpg", "c/4.jpg", name="second")
    assert "differ only in case or spaces: 'a' and 'A'" in mix_in(splits, (f"0.3:{more}",)).notes[-1]
    assert mix_in(splits, (f"0.3:{tree('a/3.jpg', 'c/4.jpg', name='third')}",)).notes == splits.notes


def test_more_is_mixed_in_by_its_share(tree: Trees) -> None:
    root, more = tree(*many("rose", "daisy"), name="flowers"), tree(*many("rose", "oak", count=7), name="more")
    splits = open_data(str(root), validation_share=0.2)
    mixed = mix_in(splits, (f"0.25:{more}[:10]", "0.05:bundled[:100]"))
    assert mixed.classes[:3] == ("daisy", "rose", "oak") and len(mixed.classes) == 13
    assert [(length, weight) for _, length, weight in mixed.train.mixture] == [
        (len(splits.train), pytest.approx(0.7)), (10, 0.25), (100, 0.05),
    ]  # fmt: skip
    assert mixed.validation is not None and mixed.validation.classes == mixed.classes and mixed.test is None
    assert keys_of(mixed.validation) == keys_of(splits.validation)
    assert names_of(mixed.validation) == names_of(splits.validation)
    sample = mixed.validation[0]
    assert (sample.key, sample.target) == (mixed.validation.key(0), mixed.validation.target(0))
    assert samples_of(mixed.validation).stamp(0) == samples_of(splits.validation).stamp(0) is not None
    assert mix_in(splits, ()) is splits
    known = tree(*many("rose", count=7), *many("daisy", count=2), name="known")
    assert mix_in(splits, (f"0.25:{known}",)).validation is splits.validation, "no class is new"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("0.3",), r"mix '0\.3' must be a fraction between 0 and 1, a colon and a data set, such as 0\.3:more/images"),
        (("bundled",), r"mix 'bundled' must be a fraction"), (("1:bundled",), r"mix '1:bundled' must be a fraction"),
        (("0.0:bundled",), r"mix '0\.0:bundled' must be a fraction"), (("0.5:",), r"mix '0\.5:' must be a fraction"),
        (("0.5:bundled", "0.5:bundled"), r"leaves nothing for the data itself; keep their sum below 1"),
        (("0.5:bundeld",), r"data 'bundeld' does not exist: .*nearest: bundled"),
    ],
)  # fmt: skip
def test_mixtures_that_make_no_sense_are_refused(tree: Trees, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mix_in(open_data(str(tree(*many("a", "b"))), validation_share=0.0), more)


@pytest.mark.parametrize(
    "paths",
    [
        ["b.png", "a.jpg", "notes.txt"],
        ["trip/b.png", "trip/day/a.jpg", "trip/notes.txt"],
        ["b.png", "one/a.jpg", "two/c.jpg", "two/notes.txt"],
        ["train/b.png", "train/a.jpg", "train/notes.txt", "test/c.png"],
    ],
)
def test_images_without_classes_open_when_none_are_needed(tree: Trees, paths: list[str]) -> None:
    root = tree(*paths)
    splits = open_data(str(root), validation_share=0.0, unlabelled=True)
    images = [path for path in paths if not path.startswith("test") and not path.endswith("txt")]
    wanted = sorted(path.removeprefix("train/") for path in images)
    assert keys_of(splits.train) == wanted and splits.classes == () and splits.target_kind == "none"
    assert targets_of(splits.train) == [None] * len(wanted)
    assert splits.train[0].target is None and "skipped 1 file without" in splits.notes[-1]
    assert splits.test is None or (keys_of(splits.test) == ["c.png"] and target_kind(splits.test) == "none")
    with pytest.raises(DataError, match=r"has no labels; classification needs a label for each image: label them, or"):
        check_classes(splits)
    with pytest.raises(DataError, match=r"has no targets and no numbers; regression needs columns of numbers"):
        check_numbers(splits)


def test_images_without_classes_are_cut_and_taken_by_hash(tree: Trees) -> None:
    root = tree(*(f"{number:03}.png" for number in range(200)))
    splits = open_data(f"{root}[:10%]", validation_share=0.25, unlabelled=True)
    assert 30 < len(splits.validation) < 70 and len(splits.train) == round((200 - len(splits.validation)) / 10)
    with pytest.raises(DataError, match=r"per_class=3: data .* has no classes; take a number of images instead, like"):
        open_data(str(root), validation_share=0.0, unlabelled=True, per_class=3)
    mixed = mix_in(splits, (f"0.5:{tree(*many('a', 'b', count=3), name='more')}",))
    assert mixed.target_kind == "none" and mixed.classes == () and mixed.train.target(len(mixed.train) - 1) is None


def test_images_without_labels_are_mixed_into_labelled_ones_if_none_are_needed(tree: Trees) -> None:
    labelled, flat = tree(*many("a", "b", count=3), name="labelled"), tree("0.png", "1.png", name="flat")
    config = DataConfig(spec=str(labelled), mix=(f"0.5:{flat}",), validation_share=0.0)
    own = open_data(str(labelled), validation_share=0.0)
    for splits in (config.open(unlabelled=True), config.cut(own, unlabelled=True)):
        assert targets_of(splits.train) == [0, 0, 0, 1, 1, 1, None, None] and splits.classes == ("a", "b")
    for refused in (config.open, lambda: config.cut(own)):
        with pytest.raises(DataError, match="flat has images but no class folders, so its images have no labels"):
            refused()


def test_numbers_are_asked_of_data_that_can_have_them(tree: Trees) -> None:
    with pytest.raises(DataError, match=r"has no columns of numbers, but numbers=age asks for some; tables \(\.csv"):
        open_data(str(tree(*many("a", "b"))), validation_share=0.0, numbers=("age",))
    splits = open_data(str(tree(*many("a", "b"))), validation_share=0.0)
    with pytest.raises(DataError, match=r"has classes \(a, b\) and no numbers; regression needs columns of numbers"):
        check_numbers(splits)


def test_numbers_are_cut_taken_and_mixed(tree: Trees) -> None:
    root = tree(*(f"{number}.png" for number in range(100)))
    (root / "t.csv").write_text("path,age,size\n" + "".join(f"{n}.png,{n / 4},{-n}\n" for n in range(100)))
    splits = open_data(f"{root}[:30]", validation_share=0.2, numbers=("age", "size"))
    assert 10 < len(splits.validation) < 35 and len(splits.train) == 30
    assert splits.train.target(0) == (float(splits.train.key(0)[:-4]) / 4, -float(splits.train.key(0)[:-4]))
    check_numbers(splits)
    with pytest.raises(DataError, match=r"has numbers \(age, size\) and no classes; classification needs classes"):
        check_classes(splits)
    with pytest.raises(DataError, match=r"per_class=3: data .* has no classes"):
        open_data(str(root), validation_share=0.0, numbers=("age",), per_class=3)
    mixed = mix_in(replace(splits, validation=None), (f"0.5:{root}",))
    assert mixed.target_kind == "numbers" and mixed.train.target(30) == (0.0, 0.0) and len(mixed.train) == 130
    with pytest.raises(DataError, match=r"mix 0\.5:bundled|has no columns of numbers"):
        mix_in(splits, ("0.5:bundled",))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of two classes with ten images of 34 x 21 or 20 pixels each."""
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (34, 21 - number % 2), name).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_the_limit_on_pixels_is_a_setting_of_the_data(photos: Path) -> None:
    whole = DataConfig(spec=str(photos), validation_share=0.0)
    small, large = replace(whole, max_pixels=679), replace(whole, max_pixels=34 * 21)
    image = small.open().train[0].image
    with pytest.raises(UndecodableImage, match="--max-pixels"):
        decode(image, 3)
    train = large.open().train
    DataConfig(spec="bundled").open()
    assert pixel_limit() == 34 * 21, "without the setting the limit stays"
    assert [decode(train[index].image, 3).shape[1] for index in range(len(train))] == [34] * len(train)


def test_commands_without_a_run_have_the_option_too(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "check", str(photos), "--page", "None", "--max-skipped", "1", "--max-pixels"]
    main([*arguments, "700"])
    assert "34 x 21 pixels (width x height), more than the limit of 700" in capsys.readouterr().out
    assert main([*arguments, "714"]) == 0
    assert "more than the limit" not in capsys.readouterr().out
    assert main([*arguments, "0"]) == 2
    assert "--max-pixels: 0 " in capsys.readouterr().err


@pytest.mark.parametrize("returned", [None, {"train": []}])
def test_a_format_returns_splits(returned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FORMATS", [Format(lambda request: True, lambda request: returned)])
    with pytest.raises(ConfigError, match="must return Splits"):
        open_data(str(tmp_path), validation_share=0.0)


@pytest.mark.parametrize("label", [0.5, float("nan")])
def test_numbers_are_no_labels(label: float, types_unchecked: None) -> None:
    assert Targets.of([0.0, np.uint8(1), None], "class", ("a", "b")).values.tolist() == [0, 1, -1]  # type: ignore[list-item]
    assert Targets.of(["1", None], "class", ("a", "b")).values.tolist() == [1, -1]  # type: ignore[list-item]
    with pytest.raises(DataError, match=f"label {label} is not the index of a class"):
        Targets.of([0, label], "class", ("a", "b"))  # type: ignore[list-item]
