"""Tests of the names of splits, of sorting files by them, and of held-out samples and subsets."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import MemorySource, keys_of, targets_of
from vitrail.data.cuts import CutMethod, cut, drawn, drawn_per_class, slice_bounds, with_validation
from vitrail.data.formats.fractals import FractalSource
from vitrail.data.objects import Objects
from vitrail.data.source import Samples, Source, fingerprint, subset, target_kind
from vitrail.data.splits import SPLITS, Splits, by_split, named_splits, split_names, split_of
from vitrail.data.targets import class_indices
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
    shards = ["imagenet-train-000000.tar", "imagenet-train-000001.tar", "imagenet-val-000000.tar"]
    assert by_split("here", shards) == ({"train": shards[:2], "validation": shards[2:]}, ())
    assert by_split("here", shards[:2]) == ({"train": shards[:2]}, ())
    vehicles = ["vehicles-bus-0.tar", "vehicles-train-0.tar"]
    assert by_split("here", vehicles) == ({"train": vehicles}, ())
    alone = ["pets-val-0.tar", "pets-val-1.tar"]
    assert by_split("here", alone) == ({"train": alone}, ())
    assert by_split("here", ["pets-0.tar", "pets-1.tar"]) == ({"train": ["pets-0.tar", "pets-1.tar"]}, ())


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


pair = st.tuples(st.text(max_size=6), st.sampled_from([0, 1, 2, None]))
labelled_keys = st.lists(pair, max_size=40, unique_by=lambda pair: pair[0])
some_labels = st.lists(st.integers(0, 3), min_size=1, max_size=90)
shares = st.floats(0, 1)


def take(source: Source, count: int, **settings: Any) -> Samples:
    return subset(source, drawn(source, count, **settings))


def take_per_class(source: Source, count: int, **settings: Any) -> Samples:
    return subset(source, drawn_per_class(source, count, **settings))


@given(pairs=labelled_keys, share=shares)
def test_a_cut_is_complete_and_every_class_has_its_fraction_and_an_image_to_learn_from(
    pairs: list[tuple[str, int | None]], share: float
) -> None:
    source = MemorySource(keys=[key for key, _ in pairs], labels=[label for _, label in pairs])
    rest, held_out = cut(source, share)
    assert sorted([*rest.places, *held_out.places]) == list(range(len(pairs)))
    assert list(rest.places) == sorted(rest.places) and list(held_out.places) == sorted(held_out.places)
    labels = Counter(label for _, label in pairs)
    held = Counter(targets_of(held_out))
    assert {*targets_of(rest)} == {*labels}
    assert len(held_out) == min(round(share * len(pairs)), len(pairs) - len(labels))
    if share < 0.5:  # above it, classes of one image make others give more
        single = sum(count == 1 for count in labels.values())
        assert all(held[label] - share * count < 1.5 + single for label, count in labels.items())
    sides = [{*targets_of(part)} for part in cut(source, share, method="threshold")]
    for label, count in labels.items():
        assert count < 2 or (label in sides[0] and label in sides[1]), "by the threshold, it is on either side"


@given(pairs=labelled_keys, share=shares, random=st.randoms(use_true_random=False))
def test_cut_does_not_depend_on_the_order(pairs: list[tuple[str, int | None]], share: float, random: object) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)
    parts = [
        {frozenset(keys_of(part)) for part in cut(MemorySource(keys=list(keys), labels=list(labels)), share)}
        for keys, labels in (zip(*order, strict=True) for order in (pairs, shuffled) if order)
    ]
    assert not pairs or parts[0] == parts[1]


@pytest.mark.parametrize(("method", "most"), [("threshold", 0), ("stratified", 6)])
def test_samples_that_are_added_move_few_others(method: CutMethod, most: int) -> None:
    old = [f"rose/{number}.jpg" for number in range(400)]
    new = [f"rose/new {number}.jpg" for number in range(100)]
    _, before = cut(MemorySource(keys=old, labels=[0] * 400), 0.2, method=method)
    _, after = cut(MemorySource(keys=[*new, *old], labels=[0] * 500), 0.2, method=method)
    assert len(set(keys_of(after)) & set(old) ^ set(keys_of(before))) <= most
    assert set(keys_of(after)) & set(new)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
def test_small_classes_give_the_fraction_of_all_images(share: float) -> None:
    classes = tuple(map(str, range(100)))
    source = MemorySource(labels=[number % 100 for number in range(1000)], classes=classes)
    held_out = cut(source, share)[1]
    assert len(held_out) == 1000 * share
    assert len(cut(source, 0.01, method="threshold")[1]) >= 100  # at least one per class
    held = Counter(held_out.target(index) for index in range(len(held_out)))
    assert max(held.values()) - min(held[label] for label in range(100)) <= 1


def test_cuts_are_the_same_on_every_machine_and_in_every_version() -> None:
    source = MemorySource(labels=[0] * 100)
    places = [int.from_bytes(hashlib.blake2b(str(n).encode(), digest_size=8).digest(), "big") for n in range(100)]
    below = [number for number, place in enumerate(places) if place < 2**64 // 10]
    assert list(cut(source, 0.1, method="threshold")[1].places) == below == [18, 29, 47, 55, 66, 71, 72, 90, 99]
    lowest = sorted(np.argsort(places)[:10].tolist())
    assert list(cut(source, 0.1)[1].places) == lowest and set(below) < set(lowest)
    assert {*cut(source, 0.3)[1].places} > {*lowest}, "a larger share keeps what a smaller one took"


def test_names_that_are_not_text_can_be_hashed() -> None:
    source = MemorySource(labels=[0, 0, 0], keys=["a/\udcff.png", "a/1.png", "a/2.png"])
    rest, held_out = cut(source, 0.5)
    assert len(rest) + len(held_out) == 3 and len(fingerprint(source)) == 64


@settings(max_examples=30)
@given(some_labels, st.tuples(st.integers(0, 60), st.integers(0, 60)), st.integers(0, 99))
def test_what_a_small_count_takes_a_larger_one_takes_too(labels: list[int], counts: tuple[int, int], seed: int) -> None:
    source = MemorySource(labels=labels)
    few, many = (set(keys_of(take(source, min(count, len(labels)), seed=seed))) for count in sorted(counts))
    assert few <= many and len(many) == min(max(counts), len(labels))
    few, many = (set(keys_of(take_per_class(source, count, seed=seed))) for count in sorted(counts))
    assert few <= many


@settings(max_examples=30)
@given(some_labels, shares)
def test_every_class_has_its_share_of_what_is_taken(labels: list[int], share: float) -> None:
    taken = take(MemorySource(labels=labels), round(share * len(labels)))
    for label in set(labels):
        expected = labels.count(label) * len(taken) / len(labels)
        assert abs(sum(taken.target(index) == label for index in range(len(taken))) - expected) <= 2


def test_taking_is_by_keys_and_seed_and_keeps_the_order() -> None:
    keys = [f"{number}.png" for number in range(200)]
    source = MemorySource(labels=[number % 4 for number in range(200)], keys=keys)
    first, again, other = (keys_of(take(source, 40, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other and first == sorted(first, key=keys.index)
    backwards = MemorySource(labels=[number % 4 for number in range(200)][::-1], keys=keys[::-1])
    assert sorted(keys_of(take(backwards, 40))) == sorted(first)
    _, held_out = cut(source, 0.2)
    assert 2 < len(set(first) & set(keys_of(held_out))) < 20, "a subset is drawn apart from the cut"


def test_numbers_are_cut_and_taken_by_hash_alone() -> None:
    plain = MemorySource(labels=[None] * 60)
    numbers = MemorySource(labels=[(float(index), 0.5) if index else None for index in range(60)], classes=("a", "b"))
    assert target_kind(numbers) == target_kind(subset(numbers, [0])) == "numbers"
    for one, other in zip(cut(numbers, 0.3), cut(plain, 0.3), strict=True):
        assert keys_of(one) == keys_of(other)
    assert keys_of(take(numbers, 7)) == keys_of(take(plain, 7)) == keys_of(take_per_class(numbers, 7))
    assert fingerprint(numbers) != fingerprint(MemorySource(labels=[(1.0, 0.5)] * 60))


def labels_of(source: Source) -> np.ndarray:
    """Return a matrix of 0 and 1: the labels of each sample of a source with several labels."""
    table = np.zeros((len(source), len(source.classes)), np.int64)
    for index in range(len(source)):
        table[index, list(source.target(index))] = 1
    return table


def pictures(count: int, classes: int = 80, seed: int = 0, offset: int = 0) -> Source:
    """Return a source of images with several labels each, whose frequencies differ by a factor of 80 and that
    correlate."""
    random = np.random.default_rng(seed)
    scenes = np.minimum(random.gamma(0.5, 2, (10, classes)) * 3 / (1 + np.arange(classes)) / 5, 0.95)
    table = random.random((count, classes)) < scenes[random.integers(0, 10, count)]
    targets = [tuple(np.flatnonzero(row).tolist()) for row in table]
    keys = [f"{offset + number}.jpg" for number in range(count)]
    return MemorySource(labels=targets, keys=keys, classes=tuple(map(str, range(classes))))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_every_label_has_its_fraction_of_the_held_out_images(share: float) -> None:
    source = pictures(5000)
    rest, held_out = cut(source, share)
    assert len(held_out) == 5000 * share and sorted([*rest.places, *held_out.places]) == list(range(5000))
    table = labels_of(source)
    deviations = np.abs(labels_of(held_out).sum(0) - share * table.sum(0))
    assert deviations.mean() < 0.8 and (deviations < 2 + 0.03 * share * table.sum(0)).all()
    assert labels_of(held_out).sum() / len(held_out) == pytest.approx(table.sum() / 5000, rel=0.08)
    by_sets = cut(source, 0.1, method="threshold")[1]  # each set of labels gives at least one image, and rare sets all
    assert abs(len(by_sets) - 500) > 50


def test_the_last_image_of_a_label_is_never_held_out() -> None:
    source = MemorySource(labels=[(0, 1), (0,), (2,), (0, 3), (3,), ()] + [(0,)] * 4)
    rest, held_out = cut(source, 0.9)
    assert labels_of(rest).sum(0).min() == 1 and () in targets_of(rest)
    assert len(held_out) == 6


def test_cuts_of_several_labels_are_nested_stable_and_without_order() -> None:
    source, more = pictures(1000), pictures(20, seed=1, offset=1000)
    smaller, larger = (set(keys_of(cut(source, share)[1])) for share in (0.1, 0.25))
    assert smaller < larger
    order = np.random.default_rng(2).permutation(1000)
    labels, keys = [source.target(index) for index in order], [source.key(index) for index in order]
    shuffled = MemorySource(labels=labels, keys=keys, classes=source.classes)
    assert set(keys_of(cut(shuffled, 0.1)[1])) == smaller
    joined = [*source.labels, *more.labels]
    longer = MemorySource(labels=joined, keys=[*source.keys, *more.keys], classes=source.classes)
    assert len(set(keys_of(cut(longer, 0.1)[1])) & set(source.keys) ^ smaller) < 25
    few, many = (set(keys_of(take(source, count, seed=3))) for count in (70, 300))
    assert few < many and (len(few), len(many)) == (70, 300)
    assert few != set(keys_of(take(source, 70, seed=4)))


def test_so_many_per_class_of_several_labels_are_no_more_than_needed() -> None:
    source = pictures(5000)
    taken = {count: take_per_class(source, count) for count in (1, 5, 6)}
    total = labels_of(source).sum(0)
    for count, part in taken.items():
        have = labels_of(part).sum(0)
        assert (have >= np.minimum(count, total)).all() and len(part) <= 81 * count  # 80 labels, and images without one
    assert set(taken[1].places) < set(taken[5].places) < set(taken[6].places)
    assert len(taken[5]) < 400 < 3000 < len(take_per_class(source, 5, method="threshold"))


@pytest.mark.parametrize("method", ["stratified", "threshold"])
def test_boxes_are_selected_by_their_classes_and_held_out_by_both_methods(method: CutMethod) -> None:
    kinds = [(0,), (1,), (0, 1), ()] * 10
    boxes = MemorySource(labels=[Objects.of(labels, [(0, 0, 1, 1)] * len(labels)) for labels in kinds])
    assert target_kind(boxes) == "boxes" and 4 <= len(cut(boxes, 0.2, method=method)[1]) <= 20
    taken = [class_indices(target) for target in targets_of(take_per_class(boxes, 2, method=method))]
    assert len(taken) < 10 and all(sum(label in labels for labels in taken) >= 2 for label in (0, 1))
    texts = MemorySource(labels=[(f"text {number}",) for number in range(40)])
    assert 4 <= len(cut(texts, 0.2, method=method)[1]) <= 20


@pytest.mark.parametrize(
    ("text", "count", "bounds"),
    [
        ("train[-10000:]", 50_000, (40_000, 50_000)), ("train[99%:]", 1_281_167, (1_268_355, 1_281_167)),
        ("train[:1%]", 1_281_167, (0, 12_812)), ("train[800:]", 1000, (800, 1000)), ("train[:]", 7, (0, 7)),
        ("train[-10%:-5%]", 40, (36, 38)), ("train[2.5%:50]", 200, (5, 50)), ("train[:10]", 10, (0, 10)),
        ("train[-10:]", 10, (0, 10)),
    ],
)  # fmt: skip
def test_slices_are_those_of_tensorflow_datasets(text: str, count: int, bounds: tuple[int, int]) -> None:
    assert slice_bounds(text, count) == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train[1:2", "is not a slice such as"), ("val[1:]", "is not a slice such as"),
        ("train[1.5:]", "is not a slice such as"), ("train[:11]", "has the bound 11, which is beyond the 10 images"),
        ("train[-11:]", "has the bound -11, which is"), ("train[101%:]", "has the bound 101%, which is"),
        ("train[3:3]", "holds out none of 10 images"), ("train[5:2]", "holds out none of 10 images"),
        ("train[10:]", "holds out none of 10 images"),
    ],
)  # fmt: skip
def test_slices_that_are_malformed_empty_or_out_of_range_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slice_bounds(text, 10)
