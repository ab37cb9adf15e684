"""Tests of pseudo labels: their choice, the files, the samples, the pool that they refer to, and damage."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.make import keys_of, mix_in, targets_of
from vitrail.data.formats import pseudo_labels
from vitrail.data.formats.pseudo_labels import ClassCounts, Pool, balanced_copies, is_confident, open_pool
from vitrail.data.source import fingerprint, has_soft_targets, shared_images, soft_target_of
from vitrail.data.sources import open_data
from vitrail.data.splits import absolute_spec
from vitrail.errors import DataError
from vitrail.testing import check_source

CLASSES = ("red", "blue")
"""Classes of the model, in another order than those of the folder."""


@pytest.fixture
def labels(colour_folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes labels of four of 36 images, one of which is used three times."""

    def write(kind: Any = "soft", **changes: Any) -> str:
        pool = Pool(spec=str(colour_folder))
        source = open_pool(pool)
        probabilities = np.array([[0.9, 0.1], [0.25, 0.75], [0.4, 0.6], [0.875, 0.125]], np.float32)
        rows = pseudo_labels.LabelledRows(
            np.array([0, 7, 20, 35]), probabilities.argmax(1), probabilities.max(1), np.array([1, 3, 1, 1]),
            probabilities if kind == "soft" else None,
        )  # fmt: skip
        info = pseudo_labels.PseudoLabelInfo(
            pool=pool, fingerprint=fingerprint(source), teacher="runs/teacher", teacher_sha256="ab", labels=kind,
            confidence=0.6, balance=True, images_per_class=None, seed=0, images=36, unreadable=0,
            counts=(
                ClassCounts(label="red", predicted=9, confident=5, different=2, chosen=2),
                ClassCounts(label="blue", predicted=27, confident=3, different=2, chosen=4),
            ),
        )  # fmt: skip
        folder = tmp_path / "labels"
        pseudo_labels.write_pseudo_labels(folder, dataclasses.replace(info, **changes), rows, source)
        return str(folder)

    return write


def test_labels_are_a_data_set(labels: Callable[..., str], colour_folder: Path) -> None:
    splits = open_data(labels(), validation_share=0.0)
    source: Any = splits.train
    assert has_soft_targets(source) and splits.validation is None and splits.test is None
    assert source.classes == CLASSES and len(source) == 6 and splits.target_kind == "class"
    assert targets_of(source) == [0, 1, 1, 1, 1, 0]
    keys = keys_of(source)
    assert keys[1:4] == ["blue/07.png", "copy 2/blue/07.png", "copy 3/blue/07.png"] and keys[5] == "red/11.png"
    assert source[2].image == (colour_folder / "blue" / "07.png").read_bytes()
    assert has_soft_targets(source)
    np.testing.assert_array_equal(soft_target_of(source, 3), np.array([0.25, 0.75], np.float32))
    assert source.stamp(2) == source.stamp(1) and source.origin(2) == source.origin(1)
    check_source(source)
    pool = open_data(str(colour_folder), validation_share=0.0).train
    assert shared_images(source, pool) == [0, 7, 20, 35], "held-out images are found among labelled ones"
    with pytest.raises(DataError, match="has no columns of numbers, but numbers=age"):
        open_data(labels(), validation_share=0.0, numbers=("age",))


def test_classes_of_one_name_are_no_changed_labels(labels: Callable[..., str]) -> None:
    crane: dict[str, Any] = {"label": "crane", "confident": 2, "different": 2}
    folder = labels(counts=(ClassCounts(**crane, predicted=9, chosen=2), ClassCounts(**crane, predicted=27, chosen=4)))
    for classes in (None, ("crane", "crane")):
        source: Any = open_data(folder, validation_share=0.0, classes=classes).train
        assert targets_of(source) == [0, 1, 1, 1, 1, 0]
        np.testing.assert_array_equal(soft_target_of(source, 0), np.array([0.9, 0.1], np.float32))


@pytest.mark.parametrize(
    "choice", [{"validation_share": 0.5}, {"validation_share": 0.5, "cut_method": "threshold"}]
    + [{"validation": text, "validation_share": 0.0} for text in ("train[0:2]", "train[2:4]")],
)  # fmt: skip
def test_training_has_no_repetition_of_a_held_out_image(labels: Callable[..., str], choice: dict[str, Any]) -> None:
    splits: Any = open_data(labels(), **choice)
    held, used = ([part.origin(row) for row in range(len(part))] for part in (splits.validation, splits.train))
    assert held and len(set(held)) == len(held) and not set(held) & set(used)
    assert len(set(held)) + len(set(used)) == 4
    assert len(held) + len(used) == 6 or any("repetition" in note for note in splits.notes)


def test_hard_labels_have_no_probabilities(labels: Callable[..., str]) -> None:
    folder = labels("hard")
    source = open_data(folder, validation_share=0.0).train
    assert not has_soft_targets(source) and soft_target_of(source, 0) is None
    assert sorted(path.name for path in Path(folder).iterdir()) == ["labels.csv", "labels.json"]
    assert (Path(folder) / "labels.csv").read_text().splitlines()[:3] == [
        "position,key,label,confidence,copies", "0,blue/00.png,red,0.900000,1", "7,blue/07.png,blue,0.750000,3",
    ]  # fmt: skip


def test_classes_can_have_another_order(labels: Callable[..., str]) -> None:
    source = open_data(labels(), validation_share=0.0, classes=("blue", "red")).train
    assert source.classes == ("blue", "red") and [source.target(index) for index in range(2)] == [1, 0]
    np.testing.assert_array_equal(soft_target_of(source, 1), np.array([0.75, 0.25], np.float32))
    with pytest.raises(DataError, match="has the classes red, blue, but the model has blue, green"):
        open_data(labels(), validation_share=0.0, classes=("blue", "green"))


def test_a_mixture_matches_classes_by_name(labels: Callable[..., str], colour_folder: Path) -> None:
    for folder in ("blue", "green", "red"):  # other images of the same classes
        shutil.copytree(colour_folder / folder, colour_folder.parent / "own" / folder)
        for number, path in enumerate((colour_folder.parent / "own" / folder).iterdir()):
            path.rename(path.with_name(f"own-{folder}-{number}.png"))
    splits = mix_in(open_data(str(colour_folder.parent / "own"), validation_share=0.0), (f"0.75:{labels()}",))
    source: Any = splits.train
    assert source.classes == ("blue", "green", "red") and has_soft_targets(source) and len(source) == 42
    assert source.target(36) == 2 and soft_target_of(source, 0) is None
    np.testing.assert_array_equal(soft_target_of(source, 36), np.array([0.1, 0, 0.9], np.float32))
    part = open_data(f"{labels()}[:50%]", validation_share=0.0).train
    assert has_soft_targets(part) and len(part) == 3


def test_the_fingerprint_knows_the_probabilities(labels: Callable[..., str]) -> None:
    before = fingerprint(open_data(folder := labels(), validation_share=0.0).train)
    path = Path(folder) / "probabilities.npy"
    np.save(path, np.load(path) * np.float32([0.5, 1]))
    assert fingerprint(open_data(folder, validation_share=0.0).train) != before


def test_the_rest_are_the_images_that_an_amount_leaves_out(colour_folder: Path) -> None:
    cut: dict[str, Any] = {"validation": "train", "validation_share": 0.25}
    own = open_data(f"{colour_folder}[:9]", **cut)
    assert own.validation is not None
    sources = [own.train, own.validation, open_pool(Pool(spec=f"{colour_folder}[:9]", rest=True, **cut))]
    keys = [{*keys_of(source)} for source in sources]
    assert [len(each) for each in keys] == [9, 9, 18] and len(set.union(*keys)) == 36
    few = open_pool(Pool(spec=str(colour_folder), rest=True, per_class=2, **cut))
    assert len(few) == 27 - 6
    with pytest.raises(DataError, match=r"leaves none of its 27 training images to label, because it selects no"):
        open_pool(Pool(spec=str(colour_folder), rest=True, **cut))
    with pytest.raises(DataError, match=r"\[:27\]' leaves none .* selects all of them; select a part such as \[:10%\]"):
        open_pool(Pool(spec=f"{colour_folder}[:27]", rest=True, **cut))


def test_data_on_the_disk_is_named_by_its_absolute_path(colour_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(colour_folder.parent)
    name = colour_folder.name
    assert absolute_spec(f"{name}[:10%]") == f"{colour_folder}[:10%]" and absolute_spec(name) == str(colour_folder)
    assert [absolute_spec(spec) for spec in ("bundled[:5]", "fractals:3:4")] == ["bundled[:5]", "fractals:3:4"]


def test_other_images_in_the_pool_are_refused(labels: Callable[..., str], colour_folder: Path) -> None:
    folder = labels()
    (colour_folder / "red" / "03.png").unlink()
    message = "these images have changed: there were 36 to label and there are 35 now; .* Label the images again with"
    with pytest.raises(DataError, match=message):
        open_data(folder, validation_share=0.0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("labels.json", lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, but this version .* 1"),
        ("labels.json", lambda text: text[:50], r"labels\.json is damaged: .*; label the images again"),
        ("labels.json", lambda text: json.dumps([1]), r"labels\.json is damaged"),
        ("labels.json", lambda text: text.replace('"seed"', '"sed"'), r"unknown field 'sed'"),
        ("labels.csv", lambda text: text[: text.rindex("35,")], "counts 4 images, which labels.csv or probabilities"),
        ("labels.csv", lambda text: text.replace(",3\n", ",4\n"), "counts 4 images"),
        ("labels.csv", lambda text: text.replace("red", "rde"), "is damaged: 'rde'; label the images again"),
        ("labels.csv", lambda text: text.replace("35", "x"), "is damaged: invalid literal"),
        ("labels.csv", lambda text: text.replace("\n0,", "\n21,"), r"the positions in labels.csv must rise, below 36"),
        ("labels.csv", lambda text: text.replace("35,", "36,"), "must rise, below 36"),
        ("labels.csv", lambda text: text.replace("\n0,", "\n-1,"), "must rise, below 36"),
        ("labels.csv", lambda text: text.replace(",red,", ",blue,", 1), "a changed label has no effect"),
    ],
)  # fmt: skip
def test_damage_is_refused(labels: Callable[..., str], name: str, change: Callable[[str], str], message: str) -> None:
    path = Path(labels()) / name
    path.write_text(change(path.read_bytes().decode().replace("\r", "")))
    with pytest.raises(DataError, match=message):
        open_data(str(path.parent), validation_share=0.0)


def test_missing_or_other_probabilities_are_refused(labels: Callable[..., str]) -> None:
    path = Path(labels()) / "probabilities.npy"
    np.save(path, np.zeros((4, 3), np.float32))
    with pytest.raises(DataError, match="counts 4 images"):
        open_data(str(path.parent), validation_share=0.0)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        open_data(str(path.parent), validation_share=0.0)


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
