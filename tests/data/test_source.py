"""Tests of subsets, mixtures, kinds of targets, and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.make import keys_of
from vitrail.data.source import Sample, Source, fingerprint, mixed, samples_of, subset, target_kind
from vitrail.testing import check_source

Sources = Callable[..., Source]


def test_subset_gives_the_chosen_samples_in_the_order_given(memory_source: Sources) -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(4)]
    source = memory_source(images, labels=[3, 2, None, 0], keys=["k0", "k1", "k2", "k3"])
    part = subset(source, [2, 0])
    assert len(part) == 2 and part.classes == source.classes
    assert isinstance(part, Source)
    assert part[0] == Sample("k2", images[2], None) and part[1] == Sample("k0", images[0], 3)
    assert keys_of(part) == ["k2", "k0"] and [part.target(0), part.target(1)] == [None, 3]


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
    assert fingerprint(subset(memory_source(labels=[3, 0, 1], keys=["n", "0", "1"]), [1, 2])) == expected


def test_the_first_target_that_is_known_tells_the_kind_of_all(memory_source: Sources) -> None:
    assert target_kind(memory_source(labels=[(), (0, 2)])) == "classes"
    assert target_kind(memory_source(labels=[None, (0.5,)])) == "numbers"
    assert target_kind(memory_source(labels=[None, None, 1])) == "class"
    assert target_kind(memory_source(labels=[None])) == target_kind(memory_source(labels=[])) == "none"


def test_a_mixture_joins_classes_and_keeps_the_numbers_of_the_first(memory_source: Sources) -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(5)]
    first = memory_source(images[:2], labels=[1, None], classes=("rose", "daisy"))
    second = memory_source(images[2:], labels=[0, 1, 2], classes=("lily", "rose", "fern"))
    both = mixed([first, second], [0.75, 0.25])
    check_source(both)
    assert both.classes == ("rose", "daisy", "lily", "fern") and isinstance(both, Source)
    assert [both.target(index) for index in range(5)] == [1, None, 2, 0, 3]
    assert keys_of(both) == ["1:0", "1:1", "2:0", "2:1", "2:2"]
    assert [int(both[index].image.item()) for index in range(5)] == [0, 1, 2, 3, 4]
    assert both.mixture == ((0, 2, 0.75), (2, 3, 0.25))
    several = mixed(
        [memory_source(labels=[(0, 1)], classes=("x", "y")), memory_source(labels=[(0, 1)], classes=("y", "x"))],
        [0.5, 0.5],
    )
    assert [several.target(index) for index in range(2)] == [(0, 1), (0, 1)]


NAN = float("nan")


def test_numbers_are_mixed_by_their_names(memory_source: Sources) -> None:
    one = memory_source(labels=[(1.0, 2.0), None], classes=("age", "size"))
    other = memory_source(labels=[(3.0, 4.0)], classes=("weight", "age"))
    both = mixed([one, other], [0.5, 0.5])
    assert both.classes == ("age", "size", "weight") and target_kind(both) == "numbers"
    assert [str(both.target(index)) for index in range(3)] == ["(1.0, 2.0, nan)", "None", "(4.0, nan, 3.0)"]
    wider = samples_of(one).renumbered([0, 1], both.classes)
    assert [str(wider.target(index)) for index in range(2)] == ["(1.0, 2.0, nan)", "None"]
    assert target_kind(wider) == "numbers"


def test_a_source_says_its_own_kind(memory_source: Sources) -> None:
    source = memory_source(labels=[(1, 2)], classes=("age", "size"))
    source.target_kind = "numbers"
    assert target_kind(source) == target_kind(subset(source, [])) == "numbers"


def test_sources_of_numbers_keep_the_contract(memory_source: Sources) -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(3)]

    def source(*targets: object) -> Source:
        made = memory_source(images[: len(targets)], labels=targets, classes=("age", "size"))
        made.target_kind = "numbers"
        return made

    check_source(source((1.0, NAN), None, (2.0, -3.5)))
    check_source(mixed([source((1.0, 2.0)), source((3.0, 4.0))], [0.5, 0.5]))
    for targets, message in (
        (
            [(1.0,)],
            r"the target of '0' must be None or a tuple of 2 floats, one for each name in classes, not \(1\.0,\)",
        ),
        ([(1, 2)], r"the target of '0' must be None or a tuple of 2 floats, .* not \(1, 2\)"),
        ([(1.0, float("inf"))], r"numbers must be finite, or NaN if unknown, but the target of '0' is \(1\.0, inf\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_source(source(*targets))
