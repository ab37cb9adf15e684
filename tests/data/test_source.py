"""Tests of subsets, mixtures, kinds of targets, and fingerprints."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tests.make import MemorySource, keys_of, targets_of
from vitrail.data.source import Source, fingerprint, mixed, samples_of, subset, target_kind
from vitrail.testing import check_source


def test_fingerprint_tells_keys_labels_and_order_apart() -> None:
    variants = [
        MemorySource(keys=keys, labels=labels)
        for keys, labels in [
            (["x", "y"], [0, 1]), (["y", "x"], [1, 0]), (["x", "z"], [0, 1]), (["x", "y"], [0, 0]),
            (["x", "y"], [0, None]), (["x"], [0]), ([], []),
        ]
    ]  # fmt: skip
    assert len({fingerprint(source) for source in variants}) == len(variants)


def test_fingerprint_reads_no_image_and_is_the_same_for_equal_sources() -> None:
    sources = [MemorySource(labels=[0, 1]), MemorySource([b"", b""], labels=[0, 1])]
    expected = hashlib.sha256(b"0\0" + b"0\n" + b"1\0" + b"1\n").hexdigest()
    assert [fingerprint(source) for source in sources] == [expected, expected]
    assert fingerprint(subset(MemorySource(labels=[3, 0, 1], keys=["n", "0", "1"]), [1, 2])) == expected


def test_the_first_target_that_is_known_tells_the_kind_of_all() -> None:
    assert target_kind(MemorySource(labels=[(), (0, 2)])) == "classes"
    assert target_kind(MemorySource(labels=[None, (0.5,)])) == "numbers"
    assert target_kind(MemorySource(labels=[None, None, 1])) == "class"
    assert target_kind(MemorySource(labels=[None])) == target_kind(MemorySource(labels=[])) == "none"


def test_a_mixture_joins_classes_and_keeps_the_numbers_of_the_first() -> None:
    images = [np.full((1, 1, 1), value, np.uint8) for value in range(5)]
    first = MemorySource(images[:2], labels=[1, None], classes=("rose", "daisy"))
    second = MemorySource(images[2:], labels=[0, 1, 2], classes=("lily", "rose", "fern"))
    both = mixed([first, second], [0.75, 0.25])
    check_source(both)
    assert both.classes == ("rose", "daisy", "lily", "fern") and isinstance(both, Source)
    assert targets_of(both) == [1, None, 2, 0, 3]
    assert keys_of(both) == ["1:0", "1:1", "2:0", "2:1", "2:2"]
    assert [int(both[index].image.item()) for index in range(5)] == [0, 1, 2, 3, 4]
    assert both.mixture == ((0, 2, 0.75), (2, 3, 0.25))
    parts = [MemorySource(labels=[(0, 1)], classes=classes) for classes in (("x", "y"), ("y", "x"))]
    several = mixed(parts, [0.5, 0.5])
    assert targets_of(several) == [(0, 1), (0, 1)]


NAN = float("nan")


def test_numbers_are_mixed_by_their_names() -> None:
    one = MemorySource(labels=[(1.0, 2.0), None], classes=("age", "size"))
    other = MemorySource(labels=[(3.0, 4.0)], classes=("weight", "age"))
    both = mixed([one, other], [0.5, 0.5])
    assert both.classes == ("age", "size", "weight") and target_kind(both) == "numbers"
    assert [str(both.target(index)) for index in range(3)] == ["(1.0, 2.0, nan)", "None", "(4.0, nan, 3.0)"]
    wider = samples_of(one).renumbered([0, 1], both.classes)
    assert [str(wider.target(index)) for index in range(2)] == ["(1.0, 2.0, nan)", "None"]
    assert target_kind(wider) == "numbers"


def test_a_source_says_its_own_kind() -> None:
    source = MemorySource(labels=[(1, 2)], classes=("age", "size"))
    source.target_kind = "numbers"
    assert target_kind(source) == target_kind(subset(source, [])) == "numbers"


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        ([0, 4], "^'1': the targets .* None or an index from 0 to 3, not 4$"),
        ([0, True], "^'1': .* an index from 0 to 3, not True$"),
        ([0, (1,)], r"^'1': .* an index from 0 to 3, not \(1,\)$"),
        ([(1,), 0], r"^'1': .* tuples of indices from 0 to 3, not 0$"),
        ([(0, 2), (2, 1)], r"the labels of '1' must be in rising order, not \(2, 1\)"),
        ([(0, 2), (1, 1)], r"the labels of '1' must be in rising order, not \(1, 1\)"),
    ],
)
def test_labels_that_break_the_contract_are_named(labels: list[Any], rule: str) -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(2)]
    with pytest.raises(AssertionError, match=rule):
        check_source(MemorySource(images, labels=labels))


def test_sources_of_numbers_keep_the_contract() -> None:
    images = [np.full((1, 2, 1), number, np.uint8) for number in range(3)]

    def source(*targets: object) -> Source:
        made = MemorySource(images[: len(targets)], labels=targets, classes=("age", "size"))
        made.target_kind = "numbers"
        return made

    check_source(source((1.0, NAN), None, (2.0, -3.5)))
    check_source(mixed([source((1.0, 2.0)), source((3.0, 4.0))], [0.5, 0.5]))
    for targets, message in (
        ([(1.0,)], r"^'0': the targets .* None or tuples of 2 floats, one for each name in classes, not \(1\.0,\)"),
        ([(1, 2)], r"^'0': the targets .* None or tuples of 2 floats, .* not \(1, 2\)"),
        ([(1.0, float("inf"))], r"numbers must be finite, or NaN if unknown, but the target of '0' is \(1\.0, inf\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_source(source(*targets))
