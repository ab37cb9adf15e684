"""Tests of the names of splits, and of sorting files by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.make import MemorySource, keys_of
from vitrail.data.cuts import with_validation
from vitrail.data.formats.fractals import FractalSource
from vitrail.data.splits import SPLITS, Splits, by_split, named_splits, split_names, split_of
from vitrail.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train", "train"), ("train-00000.tar", "train"), ("data/Train-00000-of-00004.parquet", "train"),
        ("val/0.tar", "validation"), ("VALID_3.csv", "validation"), ("validation.csv", "validation"),
        ("test.tsv", "test"), ("a/test/b/0000.parquet", "test"), ("train/test.csv", "test"), ("train2.csv", "train"),
        ("training.csv", "train"), ("Testing", "test"), ("training_set/0.tar", "train"), ("seg_test", "test"),
        ("x_test.csv", "test"), ("trainData", "train"), ("val_images/1.png", "validation"), ("DEV", "validation"),
        ("evaluation.csv", "validation"), ("TestSet2", "test"), ("trainval", "train"), ("validset", "validation"),
        ("Training data", "train"), ("eval-images", "validation"), ("testSet", "test"), ("Validation", "validation"),
        ("images/0.tar", None), ("latest.csv", None), ("value.csv", None), ("invalid", None),
        ("passenger_train", None), ("training log.csv", "train"), ("devices", None), ("contest", None), ("été", None),
    ],
)  # fmt: skip
def test_the_split_of_a_path(path: str, split: str | None) -> None:
    assert split_of(path) == split


@given(
    st.sampled_from([name for names in SPLITS.values() for name in names]),
    st.from_regex(r"[-_. 0-9][^/]*", fullmatch=True),
)
def test_any_name_that_goes_on_with_no_letter_is_of_the_split(name: str, rest: str) -> None:
    assert name in SPLITS[split_of(f"{name}{rest}")]


def test_files_are_sorted_into_splits() -> None:
    named = {"train": ["train-0.tar", "train-1.tar"], "validation": ["val-1.tar"]}
    assert by_split("here", ["val-1.tar", "train-1.tar", "train-0.tar"]) == (named, ())
    assert by_split("here", ["b.tar", "a.tar"]) == ({"train": ["a.tar", "b.tar"]}, ())
    assert by_split("here", ["test.tar"]) == ({"test": ["test.tar"]}, ())


def test_chosen_names_decide_alone_and_what_they_leave_out_is_noted() -> None:
    chosen = split_names(["train=fold1", "fold2", "test=more/*.tar"])
    assert chosen == {"train": ("fold1", "fold2"), "test": ("more/*.tar",)}
    found, notes = by_split("here", ["fold0.tar", "fold2.tar", "fold1.tar", "more/x.tar", "train.tar"], chosen)
    assert found == {"train": ["fold1.tar", "fold2.tar"], "test": ["more/x.tar"]}
    assert len(notes) == 1 and "fold0.tar" in notes[0] and "train.tar" in notes[0]
    all_are_to_train = {"train": ["test.tar", "train.tar"]}, ()
    assert by_split("here", ["test.tar", "train.tar"], split_names(["none"])) == all_are_to_train
    with pytest.raises(DataError, match=r"nothing named fold9.*validation"):
        by_split("here", ["fold0.tar"], split_names(["train=fold0", "val=fold9"]))


@pytest.mark.parametrize("words", [["Training"], ["learn=a"], ["train="], ["none", "train=a"], ["=a"], ["train=../a"]])
def test_a_choice_that_names_no_split_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"splits=.* names no split"):
        split_names(words)


def test_words_that_all_names_share_do_not_hide_a_split() -> None:
    assert named_splits(["asl_alphabet_train", "asl_alphabet_test"]) == {
        "asl_alphabet_train": "train", "asl_alphabet_test": "test",
    }  # fmt: skip
    assert named_splits(["ILSVRC2012_img_train", "ILSVRC2012_img_val", "readme"]) == {}
    assert named_splits(["passenger_train", "freight_train"]) == {}
    assert named_splits(["cat", "dog"]) == {}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["train-0.tar", "more.tar"], "has files that name their split, like train-0.tar, and more.tar, which names"),
        (["fold0.tar", "fold1.tar"], r"here has the folds fold0\.tar, fold1\.tar.*--splits train=fold1.tar,test=fold0"),
    ],
)
def test_files_that_leave_a_doubt_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        by_split("here", paths)


@pytest.fixture
def official() -> Splits:
    """20 training images and 6 validation images."""
    train = MemorySource(labels=[0, 1] * 10, keys=[f"t{number}" for number in range(20)])
    return Splits(train, MemorySource(labels=[0, 1] * 3, keys=[f"v{number}" for number in range(6)]), None)


def test_a_validation_split_of_the_data_chooses_unless_it_is_told_to_measure(official: Splits) -> None:
    assert with_validation(official, "x", 0.1) is official
    cut = with_validation(official, "x", 0.1, validation="train")
    assert cut.test is official.validation and cut.validation is not None
    assert len(cut.validation) == 2 and len(cut.train) == 18 and keys_of(cut.validation)[0].startswith("t")
    assert "2 of its 20 training images" in cut.notes[0] and "validation split is the test split" in cut.notes[0]
    none = with_validation(official, "x", 0.0, validation="train")
    assert (none.train, none.validation, none.test) == (official.train, None, official.validation)
    assert none.notes == ("data 'x': no training image is held out; its own validation split is the test split",)
    test = MemorySource(labels=[0, 1])
    splits = with_validation(Splits(official.train, official.validation, test), "x", 0.1, validation="train")
    assert splits.test is test and keys_of(splits.validation)[0].startswith("t")
    assert splits.notes[0].endswith("is not used, because the data also has a test split")


def test_images_are_held_out_by_position(official: Splits) -> None:
    splits = with_validation(official, "x", 0.1, validation="train[-3:]")
    assert keys_of(splits.validation) == ["t17", "t18", "t19"] and len(splits.train) == 17
    assert splits.test is official.validation and "3 of its 20" in splits.notes[0] and "(train[-3:])" in splits.notes[0]
    percent = with_validation(Splits(official.train, None, None), "x", 0.0, validation="train[:15%]")
    assert keys_of(percent.validation) == ["t0", "t1", "t2"] and percent.test is None


def test_a_source_that_draws_its_samples_keeps_them_all() -> None:
    drawn, own = FractalSource(2, 10), FractalSource(2, 5)
    splits = with_validation(Splits(drawn, own, None), "x", 0.5, validation="train")
    assert splits.train is drawn and len(splits.validation or ()) == 20 and splits.test is own


@pytest.mark.parametrize(
    ("share", "validation", "message"),
    [
        (0.02, "auto", r"most half an image; choose 0\.05 to hold out one, or choose 0 to hold out none"),
        (0.1, "train[-21:]", r"which is beyond the 20 images: here has 20 training images; choose positions"),
        (0.1, "train[5:5]", r"validation='train\[5:5\]' holds out none of 20 images: here has 20 training images"),
        (0.1, "train[:]", r"holds out all 20 training images of here; leave some to learn from, such as with train"),
    ],
)  # fmt: skip
def test_a_validation_split_that_would_be_empty_or_hold_all_is_refused(
    official: Splits, share: float, validation: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        with_validation(Splits(official.train, None, None, title="here"), "x", share, validation=validation)


def test_classes_of_one_image_each_cannot_be_held_out() -> None:
    source = MemorySource(labels=[0, 1, 2, 3])
    for share in (0.5, 0.1):
        with pytest.raises(DataError, match=r"each of its classes has only one training image, which is learned from;"):
            with_validation(Splits(source, None, None), "x", share)
    assert len(with_validation(Splits(source, None, None), "x", 0.5, method="threshold").validation or ()) == 0


def test_a_slice_of_images_in_the_order_of_their_classes_is_refused() -> None:
    sorted_by_class = MemorySource(labels=[0] * 10 + [1] * 10 + [2], classes=("oak", "elm", "fir"))
    with pytest.raises(DataError, match=r"all images of 1 class of the data, such as elm: .* validation_share=0\.57"):
        with_validation(Splits(sorted_by_class, None, None), "x", 0.1, validation="train[-12:]")
    splits = with_validation(Splits(sorted_by_class, None, None), "x", 0.1, validation="train[-2:]")
    assert len(splits.train) == 19, "the only image of a class may be held out"
