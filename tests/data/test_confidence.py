"""Tests of the choice of predicted labels, on constructed probabilities."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from vitrail.data.formats.pseudo_labels import balanced_copies, is_confident


def test_the_most_likely_class_must_reach_the_threshold() -> None:
    probabilities = np.array([[0.3, 0.7], [0.5, 0.5], [0.69, 0.31], [1.0, 0.0]], np.float32)
    assert is_confident(probabilities, 0.7).tolist() == [bool(np.float32(0.7) >= 0.7), False, False, True]
    assert is_confident(probabilities, 0.5).all() and not is_confident(probabilities, 1.01).any()
    assert is_confident(np.zeros((0, 2), np.float32), 0.5).tolist() == []


def test_large_classes_keep_the_most_confident_and_small_ones_are_repeated() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 3])
    confidences = np.array([0.5, 0.9, 0.5, 0.8, 0.4, 0.6, 0.7])
    copies = balanced_copies(labels, confidences, classes=4, per_class=3, seed=1)
    assert copies[:4].tolist() == [1, 1, 0, 1], "of two equally confident images, the earlier one is kept"
    assert sorted(copies[4:6].tolist()) == [1, 2] and copies[6] == 3
    assert balanced_copies(labels, confidences, classes=4, per_class=5)[4:].tolist() in ([3, 2, 5], [2, 3, 5])


def test_the_seed_chooses_which_images_are_repeated_once_more() -> None:
    labels, confidences = np.zeros(50, np.int64), np.ones(50)
    found = {seed: balanced_copies(labels, confidences, classes=1, per_class=60, seed=seed) for seed in (0, 1)}
    again = balanced_copies(labels, confidences, classes=1, per_class=60, seed=0)
    assert np.array_equal(found[0], again) and not np.array_equal(found[0], found[1])
    assert sorted(np.flatnonzero(found[0] == 2)) != list(range(10)), "not the first ones"


@example([], None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1))), st.one_of(st.none(), st.integers(1, 20)))
def test_each_class_with_images_gets_its_number(images: list[tuple[int, float]], per_class: int | None) -> None:
    labels = np.array([label for label, _ in images], np.int64)
    confidences = np.array([confidence for _, confidence in images])
    copies = balanced_copies(labels, confidences, classes=5, per_class=per_class, seed=3)
    assert len(copies) == len(images)
    wanted = -(-len(images) // 5) if per_class is None else per_class
    for label in range(5):
        own = copies[labels == label]
        assert own.sum() == (wanted if len(own) else 0)
        if len(own):
            assert own.max() - own.min() <= 1, "no image is repeated twice more than another one of its class"
            left, kept = confidences[labels == label][own == 0], confidences[labels == label][own > 0]
            assert not len(left) or left.max() <= kept.min()
