"""Subsets, fingerprints, and the cut of a held-out part by a hash of keys."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.source import (
    Mixture,
    Sample,
    Source,
    Subset,
    Widened,
    cut,
    fingerprint,
    take,
    take_per_class,
    target_kind,
)
from vitrail.testing import check_source

Sources = Callable[..., Source]

labelled_keys = st.lists(
    st.tuples(st.text(max_size=6), st.sampled_from([0, 1, 2, None])), max_size=40, unique_by=lambda pair: pair[0]
)
shares = st.floats(0, 1)


def keys_of(source: Source) -> list[str]:
    return [source.key(index) for index in range(len(source))]


@given(pairs=labelled_keys, share=shares)
def test_cut_is_disjoint_complete_and_in_order(
    memory_source: Sources, pairs: list[tuple[str, int | None]], share: float
) -> None:
    source = memory_source(keys=[key for key, _ in pairs], labels=[label for _, label in pairs])
    rest, held_out = cut(source, share)
    assert sorted([*rest.indices, *held_out.indices]) == list(range(len(pairs)))
    assert list(rest.indices) == sorted(rest.indices) and list(held_out.indices) == sorted(held_out.indices)


@given(pairs=labelled_keys, share=shares)
def test_cut_leaves_classes_of_two_or_more_on_either_side(
    memory_source: Sources, pairs: list[tuple[str, int | None]], share: float
) -> None:
    source = memory_source(keys=[key for key, _ in pairs], labels=[label for _, label in pairs])
    sides = [{part.target(index) for index in range(len(part))} for part in cut(source, share)]
    for label, count in Counter(label for _, label in pairs).items():
        if count >= 2:
            assert label in sides[0] and label in sides[1]


@given(pairs=labelled_keys, share=shares, random=st.randoms(use_true_random=False))
def test_cut_does_not_depend_on_the_order(
    memory_source: Sources, pairs: list[tuple[str, int | None]], share: float, random: object
) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)
    parts = [
        {frozenset(keys_of(part)) for part in cut(memory_source(keys=list(keys), labels=list(labels)), share)}
        for keys, labels in (zip(*order, strict=True) for order in (pairs, shuffled) if order)
    ]
    assert not pairs or parts[0] == parts[1]


def test_cut_of_a_large_class_moves_nothing_when_samples_are_added(memory_source: Sources) -> None:
    old = [f"rose/{number}.jpg" for number in range(400)]
    new = [f"rose/new {number}.jpg" for number in range(100)]
    _, before = cut(memory_source(keys=old, labels=[0] * 400), 0.2)
    _, after = cut(memory_source(keys=[*new, *old], labels=[0] * 500), 0.2)
    assert set(keys_of(after)) & set(old) == set(keys_of(before))
    assert set(keys_of(after)) & set(new)


def test_cut_of_a_class_does_not_depend_on_other_classes(memory_source: Sources) -> None:
    roses = [f"rose/{number}.jpg" for number in range(7)]
    daisies = [f"daisy/{number}.jpg" for number in range(50)]
    _, alone = cut(memory_source(keys=roses, labels=[0] * 7), 0.3)
    _, among = cut(memory_source(keys=[*daisies, *roses], labels=[1] * 50 + [0] * 7), 0.3)
    assert set(keys_of(among)) & set(roses) == set(keys_of(alone))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_cut_takes_about_the_share(memory_source: Sources, share: float) -> None:
    count = 5000
    _, held_out = cut(memory_source(labels=[0] * count), share)
    assert abs(len(held_out) - share * count) < 4 * np.sqrt(count * share * (1 - share))


def test_cut_with_a_larger_share_keeps_what_a_smaller_one_took(memory_source: Sources) -> None:
    source = memory_source(labels=[0, 1] * 200)
    smaller, larger = (set(cut(source, share)[1].indices) for share in (0.1, 0.3))
    assert smaller < larger


def test_cut_is_the_same_on_every_machine_and_in_every_version(memory_source: Sources) -> None:
    _, held_out = cut(memory_source(labels=[0] * 100), 0.1)
    places = [int.from_bytes(hashlib.blake2b(str(n).encode(), digest_size=8).digest(), "big") for n in range(100)]
    assert list(held_out.indices) == [number for number, place in enumerate(places) if place < 2**64 // 10]
    assert list(held_out.indices) == [18, 29, 47, 55, 66, 71, 72, 90, 99]


def test_subset_gives_the_chosen_samples_in_the_order_given(memory_source: Sources) -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(4)]
    source = memory_source(images, labels=[3, 2, None, 0], keys=["k0", "k1", "k2", "k3"])
    subset = Subset(source, [2, 0])
    assert len(subset) == 2 and subset.classes == source.classes
    assert isinstance(subset, Source)
    assert subset[0] == Sample("k2", images[2], None) and subset[1] == Sample("k0", images[0], 3)
    assert keys_of(subset) == ["k2", "k0"] and [subset.target(0), subset.target(1)] == [None, 3]


def test_fingerprint_tells_keys_labels_and_order_apart(memory_source: Sources) -> None:
    variants = [
        memory_source(keys=keys, labels=labels)
        for keys, labels in [
            (["x", "y"], [0, 1]), (["y", "x"], [1, 0]), (["x", "z"], [0, 1]), (["x", "y"], [0, 0]),
            (["x", "y"], [0, None]), (["x"], [0]), ([], []),
        ]
    ]  # fmt: skip
    assert len({fingerprint(source) for source in variants}) == len(variants)


def test_fingerprint_reads_no_image_and_is_the_same_for_equal_sources(memory_source: Sources) -> None:
    sources = [memory_source(labels=[0, 1]), memory_source([b"", b""], labels=[0, 1])]
    expected = hashlib.sha256(b"0\0" + b"0\n" + b"1\0" + b"1\n").hexdigest()
    assert [fingerprint(source) for source in sources] == [expected, expected]
    assert fingerprint(Subset(memory_source(labels=[3, 0, 1], keys=["n", "0", "1"]), [1, 2])) == expected


def test_the_only_image_of_a_class_is_learned_from(memory_source: Callable[..., Source]) -> None:
    source = memory_source(labels=list(range(20)), classes=tuple(map(str, range(20))))
    rest, held_out = cut(source, 0.9)
    assert (len(rest), len(held_out)) == (20, 0)


def test_names_that_are_not_text_can_be_hashed(memory_source: Callable[..., Source]) -> None:
    source = memory_source(labels=[0, 0, 0], keys=["a/\udcff.png", "a/1.png", "a/2.png"])
    rest, held_out = cut(source, 0.5)
    assert len(rest) + len(held_out) == 3 and len(fingerprint(source)) == 64


@settings(max_examples=30)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    counts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    seed=st.integers(0, 99),
)
def test_what_a_smaller_count_takes_a_larger_one_takes_too(
    memory_source: Sources, labels: list[int], counts: tuple[int, int], seed: int
) -> None:
    source = memory_source(labels=labels)
    few, many = (set(keys_of(take(source, min(count, len(labels)), seed=seed))) for count in sorted(counts))
    assert few <= many and len(many) == min(max(counts), len(labels))
    few, many = (set(keys_of(take_per_class(source, count, seed=seed))) for count in sorted(counts))
    assert few <= many


@settings(max_examples=30)
@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=90), share=st.floats(0, 1))
def test_every_class_has_its_share_of_what_is_taken(memory_source: Sources, labels: list[int], share: float) -> None:
    taken = take(memory_source(labels=labels), round(share * len(labels)))
    for label in set(labels):
        expected = labels.count(label) * len(taken) / len(labels)
        assert abs(sum(taken.target(index) == label for index in range(len(taken))) - expected) <= 2


def test_taking_is_by_keys_and_seed_and_keeps_the_order(memory_source: Sources) -> None:
    keys = [f"{number}.png" for number in range(200)]
    source = memory_source(labels=[number % 4 for number in range(200)], keys=keys)
    first, again, other = (keys_of(take(source, 40, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other and first == sorted(first, key=keys.index)
    backwards = memory_source(labels=[number % 4 for number in range(200)][::-1], keys=keys[::-1])
    assert sorted(keys_of(take(backwards, 40))) == sorted(first)
    _, held_out = cut(source, 0.2)
    assert 2 < len(set(first) & set(keys_of(held_out))) < 20, "a subset is drawn apart from the cut"


def test_a_class_that_has_fewer_gives_all_it_has(memory_source: Sources) -> None:
    source = memory_source(labels=[0, 0, 0, 0, 0, 1, 1, 2])
    taken = take_per_class(source, 2)
    assert sorted(str(taken.target(index)) for index in range(len(taken))) == ["0", "0", "1", "1", "2"]


def test_the_first_target_that_is_known_tells_the_kind_of_all(memory_source: Sources) -> None:
    assert target_kind(memory_source(labels=[(), (0, 2)])) == "classes"
    assert target_kind(memory_source(labels=[None, (0.5,)])) == "numbers"
    assert target_kind(memory_source(labels=[None, None, 1])) == "class"
    assert target_kind(memory_source(labels=[None])) == target_kind(memory_source(labels=[])) == "none"


def test_a_mixture_joins_classes_and_keeps_the_numbers_of_the_first(memory_source: Sources) -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(5)]
    first = memory_source(images[:2], labels=[1, None], classes=("rose", "daisy"))
    second = memory_source(images[2:], labels=[0, 1, 2], classes=("lily", "rose", "fern"))
    both = Mixture([first, second], [0.75, 0.25])
    check_source(both)
    assert both.classes == ("rose", "daisy", "lily", "fern") and isinstance(both, Source)
    assert [both.target(index) for index in range(5)] == [1, None, 2, 0, 3]
    assert keys_of(both) == ["1:0", "1:1", "2:0", "2:1", "2:2"]
    assert [int(both[index].image.item()) for index in range(5)] == [0, 1, 2, 3, 4]
    assert both.parts == ((0, 2, 0.75), (2, 3, 0.25))
    several = Mixture(
        [memory_source(labels=[(0, 1)], classes=("x", "y")), memory_source(labels=[(0, 1)], classes=("y", "x"))],
        [0.5, 0.5],
    )
    assert [several.target(index) for index in range(2)] == [(0, 1), (0, 1)]


NAN = float("nan")


def test_numbers_are_cut_and_taken_by_hash_alone(memory_source: Sources) -> None:
    plain = memory_source(labels=[None] * 60)
    numbers = memory_source(labels=[(float(index), 0.5) if index else None for index in range(60)], classes=("a", "b"))
    assert target_kind(numbers) == target_kind(Subset(numbers, [0])) == "numbers"
    for one, other in zip(cut(numbers, 0.3), cut(plain, 0.3), strict=True):
        assert keys_of(one) == keys_of(other)
    assert keys_of(take(numbers, 7)) == keys_of(take(plain, 7)) == keys_of(take_per_class(numbers, 7))
    assert fingerprint(numbers) != fingerprint(memory_source(labels=[(1.0, 0.5)] * 60))


def test_numbers_are_mixed_by_their_names(memory_source: Sources) -> None:
    one = memory_source(labels=[(1.0, 2.0), None], classes=("age", "size"))
    other = memory_source(labels=[(3.0, 4.0)], classes=("weight", "age"))
    both = Mixture([one, other], [0.5, 0.5])
    assert both.classes == ("age", "size", "weight") and target_kind(both) == "numbers"
    assert [str(both.target(index)) for index in range(3)] == ["(1.0, 2.0, nan)", "None", "(4.0, nan, 3.0)"]
    wider = Widened(one, both.classes)
    assert [str(wider.target(index)) for index in range(2)] == ["(1.0, 2.0, nan)", "None"]
    assert target_kind(wider) == "numbers"


def test_a_source_says_its_own_kind(memory_source: Sources) -> None:
    source = memory_source(labels=[(1, 2)])
    source.target_kind = "numbers"
    assert target_kind(source) == target_kind(Subset(source, [])) == "numbers"


def test_sources_of_numbers_keep_the_contract(memory_source: Sources) -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(3)]

    def source(*targets: object) -> Source:
        made = memory_source(images[: len(targets)], labels=targets, classes=("age", "size"))
        made.target_kind = "numbers"
        return made

    check_source(source((1.0, NAN), None, (2.0, -3.5)))
    check_source(Mixture([source((1.0, 2.0)), source((3.0, 4.0))], [0.5, 0.5]))
    for targets, message in (
        ([(1.0,)], r"the target of '0' is \(1\.0,\): a tuple of 2 floats, one for each name in classes, or None"),
        ([(1, 2)], r"the target of '0' is \(1, 2\): a tuple of 2 floats"),
        ([(1.0, float("inf"))], r"the target of '0' is \(1\.0, inf\): a number is finite, NaN if unknown"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_source(source(*targets))
