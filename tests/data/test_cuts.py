"""Tests of held-out samples and subsets, by a hash of keys and by position."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import MemorySource, keys_of, targets_of
from vitrail.data.cuts import CutMethod, cut, drawn, drawn_per_class, slice_bounds
from vitrail.data.objects import Objects
from vitrail.data.source import Samples, Source, fingerprint, subset, target_kind
from vitrail.data.targets import class_indices

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
