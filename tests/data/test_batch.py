"""Tests of batches: what is drawn into a picture stays under its box and its mask, and soft targets reach the loss."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import MemorySource
from tests.tasks.images import Pictures
from tests.tasks.objectives import small_network
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, Loader, Rows, as_batch, collate, placed
from vitrail.data.objects import IGNORED, Mask, Objects
from vitrail.data.pipeline import Readers, Stage, TrainingBatches, evaluation_batches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Samples, has_soft_targets, mixed, soft_target_of, subset, target_kind
from vitrail.data.splits import Splits
from vitrail.data.targets import SoftTarget
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.classification import Classification, ClassificationObjective

LEVELS = np.array([0, 90, 170, 250], np.uint8)
"""Grey levels of the background and of three classes."""


def scenes(kind: str, seed: int, count: int = 4) -> MemorySource:
    """Return pictures of bright rectangles of odd sizes, with boxes or with masks."""
    random, images, targets = np.random.default_rng(seed), [], list[Any]()
    for number in range(count):
        size = int(random.integers(50, 99)), int(random.integers(60, 99))
        canvas, boxes, labels = np.zeros(size, np.uint8), [], []
        for label in range(3):  # side by side, so that none covers another
            left = label * size[1] // 3 + 10
            right = int(random.integers(left + 4, (label + 1) * size[1] // 3 - 3)) if label < 2 else size[1] - 10
            left = min(left, right - 4)
            top = int(random.integers(10, size[0] - 20))
            bottom = int(random.integers(top + 6, size[0] - 10))
            if random.uniform() < 0.8:
                canvas[top:bottom, left:right] = label + 1
                boxes.append([left / size[1], top / size[0], right / size[1], bottom / size[0]])
                labels.append(label)
        images.append(LEVELS[canvas][..., None].repeat(3, axis=2))
        mask = Mask(str(number), lambda canvas=canvas: canvas, (IGNORED - 256, 0, 1, 2))
        targets.append(mask if kind == "mask" else Objects.of(labels, boxes, size=size))
    return MemorySource(images, labels=targets, classes=("a", "b", "c"))


def batch_of(source: MemorySource, augment: Augment, seed: int) -> Batch:
    kind = target_kind(source)
    loader = Loader(source, PADDED, kind, Rows(augment.crop(seed)), is_training=True)
    batch = as_batch(collate([loader(index, index) for index in range(len(source))]), kind)
    return augment(batch, seed=seed, classes=3)


AUGMENTS = {
    "none": Augment(flip=False),
    "mirrored and shifted": Augment(flip=True, shift=5),
    "scaled": Augment(flip=True, scale_jitter=(0.4, 2.0)),
    "cropped": Augment(flip=False, crop_area=(0.3, 1.0)),
}
PADDED = Preprocess(image_size=(64, 50), resize="pad", pad_value=(0,), interpolation="nearest")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(AUGMENTS)))
def test_boxes_are_where_their_objects_are(seed: int, name: str) -> None:
    batch = batch_of(scenes("boxes", seed), AUGMENTS[name], seed)
    assert batch.boxes is not None and batch.box_labels is not None and batch.boxes.shape[:2] == batch.box_labels.shape
    for image, boxes, labels in zip(batch.images, batch.boxes, batch.box_labels, strict=True):
        for label in range(3):
            rows, columns = np.nonzero(image[0].numpy() == LEVELS[label + 1])
            found = boxes[labels == label]
            for left, top, right, bottom in found.tolist():
                if min(right - left, bottom - top) > 2:
                    ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                    assert ends == pytest.approx([left, top, right, bottom], abs=1.51), name
            if not len(found) and not (labels == -2).any():
                assert len(rows) == 0, "what is seen has a box"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(list(AUGMENTS)))
def test_masks_are_where_their_pixels_are(seed: int, name: str) -> None:
    batch = batch_of(scenes("mask", seed), AUGMENTS[name], seed)
    assert batch.masks is not None and batch.masks.shape == (4, 64, 50)
    table = torch.full((256,), IGNORED, dtype=torch.uint8)
    for label in range(3):
        table[int(LEVELS[label + 1])] = label
    seen = table[batch.images[:, 0].long()]
    differ = (seen != batch.masks).float().mean()
    assert differ < 0.03, "only by the rounding of nearest pixels"


def test_objects_that_are_hardly_seen_are_not_learned_and_crowds_neither() -> None:
    target = Objects.of([0, 1, 2], [(0, 0, 1, 1), (0.1, 0.1, 0.2, 0.2), (0.8, 0.8, 0.9, 0.9)],
                        crowd=np.array([False, True, False]))  # fmt: skip
    found = placed(target, Preprocess(image_size=(20, 20)).placement((100, 100), (0, 0, 40, 40)))
    assert found["box_labels"].tolist() == [-2, -2], "a sixth of the first is seen, the second is a crowd"
    np.testing.assert_allclose(found["boxes"], [[0, 0, 20, 20], [5, 5, 10, 10]])


def test_objects_that_a_shift_moves_out_of_the_picture_are_not_learned() -> None:
    edge = Objects.of([0, 1], [(0, 0, 2 / 50, 1), (0.4, 0.4, 0.6, 0.6)])
    source = MemorySource([np.zeros((64, 50, 3), np.uint8)] * 24, labels=[edge] * 24, classes=("a", "b", "c"))
    batch = batch_of(source, Augment(flip=False, shift=5), 0)
    assert batch.boxes is not None and batch.box_labels is not None
    widths = batch.boxes[:, 0, 2] - batch.boxes[:, 0, 0]
    assert {0.0, 1.0, 2.0} <= set(widths.tolist()), "some are moved out, and some in part"
    assert batch.box_labels[:, 0].tolist() == [0 if width else -2 for width in widths.tolist()]
    assert (batch.box_labels[:, 1] == 1).all()


def test_an_annotation_of_another_size_skips_its_picture() -> None:
    source: Any = scenes("boxes", 0)
    source.images[1] = np.zeros((7, 9, 3), np.uint8)
    batch = batch_of(source, AUGMENTS["none"], 0)
    assert batch.valid.tolist() == [True, False, True, True] and "correct the annotation" in batch.skipped[0].reason
    assert batch.box_labels is not None and (batch.box_labels[1] == -1).all()
    parts = batch.chunks(3)
    assert [len(part) for part in parts] == [2, 1, 1] and parts[0].boxes is not None and len(parts[0].boxes) == 2


def test_only_one_setting_chooses_what_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"crop_area=.* and scale_jitter=.* choose what is seen"):
        Augment(crop_area=(0.5, 1.0), scale_jitter=(0.5, 2.0))
    with pytest.raises(ConfigError, match=r"scale_jitter=.* is not two numbers in "):
        Augment(scale_jitter=(0.0, 2.0))


CLASSES = ("ant", "bee", "cat")
SIZE = Preprocess(image_size=(21, 28))


class Soft(Pictures):
    """Random images whose targets are probabilities of two classes, `bee` and `dog`."""

    has_soft_targets = True

    def __init__(self, count: int) -> None:
        super().__init__(count, ("bee", "dog"), (0,))

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), super().__getitem__(index + 100).image, self.target(index))

    def target(self, index: int) -> int:
        return int(self.soft_target(index).argmax())

    def soft_target(self, index: int) -> SoftTarget:
        return np.array([index / 10, 1 - index / 10], np.float32)


def mixture() -> Samples:
    """Return a mixture of six images with one label each, the last one without, and eight with soft targets."""
    return mixed([Pictures(6, CLASSES, (0, 1, 2, 0, 1, None)), Soft(8)], [0.5, 0.5])


def expected(source: Samples, index: int) -> np.ndarray:
    """Return the amounts of ant, bee, cat and dog, computed by hand."""
    amounts = np.zeros(4, np.float32)
    if index >= 6:
        amounts[[1, 3]] = (index - 6) / 10, 1 - (index - 6) / 10
    elif (target := source.target(index)) is not None:
        amounts[target] = 1
    return amounts


def test_selections_keep_soft_targets() -> None:
    source = mixture()
    part = subset(source, [9, 1])
    assert has_soft_targets(part) and soft_target_of(part, 1) is None
    np.testing.assert_array_equal(soft_target_of(part, 0), expected(source, 9))
    unlabelled = mixed([Pictures(2), Soft(2)], [0.5, 0.5])
    assert not has_soft_targets(unlabelled) and soft_target_of(unlabelled, 3) is None


@pytest.mark.parametrize("readers", [Readers(0), pytest.param(Readers(1, 1), marks=pytest.mark.slow)])
def test_batches_hold_the_amounts_of_all_images(readers: Readers) -> None:
    source = mixture()
    batches = TrainingBatches(source, [Stage(SIZE, 7)], seed=1, readers=readers)
    for batch in islice(batches, 4):
        assert batch.targets is not None and batch.has_soft_targets
        for row, index in enumerate(batch.samples.tolist()):
            np.testing.assert_array_equal(batch.targets[row].numpy(), expected(source, index))
            assert batch.labels[row] == (-1 if source.target(index) is None else source.target(index))
        assert torch.equal(batch.counted, batch.samples != 5), "the image without a label is not counted"
        for part in batch.chunks(3):
            assert part.has_soft_targets and torch.equal(part.counted, part.samples != 5)
    batches.close()


def test_evaluation_uses_the_most_likely_class() -> None:
    (batch,) = evaluation_batches(Soft(8), SIZE, batch_size=8, readers=Readers(0))
    assert batch.targets is None and batch.labels.tolist() == [1, 1, 1, 1, 1, 0, 0, 0] and not batch.has_soft_targets


def test_amounts_of_classes_that_exclude_each_other_have_the_sum_1() -> None:
    class Halves(Soft):
        def soft_target(self, index: int) -> SoftTarget:
            return super().soft_target(index) / 2

    Classification().check_data(Splits(mixture(), None, None))
    Classification(loss="sigmoid").check_data(Splits(Halves(8), None, None))
    with pytest.raises(DataError, match=r"sum 0\.5, but loss='softmax'"):
        Classification().check_data(Splits(Halves(8), None, None))


def test_amounts_are_checked_one_after_another() -> None:
    made: list[weakref.ref[SoftTarget]] = []

    class Counted(Soft):
        def soft_target(self, index: int) -> SoftTarget:
            made.append(weakref.ref(found := super().soft_target(index)))
            assert sum(one() is not None for one in made) < 3, "all amounts may not fit into the memory"
            return found

    Classification().check_data(Splits(Counted(8), None, None))
    assert len(made) >= 8


def test_the_loss_is_the_mean_of_the_images_with_a_target() -> None:
    """Labelled and pseudo-labelled images share one mean cross-entropy, as in Noisy Student (1911.04252)."""
    batch = next(TrainingBatches(mixture(), [Stage(SIZE, 14)], seed=3, readers=Readers(0)))
    network, images = small_network(num_classes=4), SIZE.normalise(batch.images)
    torch.nn.init.normal_(network.head.weight)
    output = ClassificationObjective(network)(replace(batch, images=images))
    losses = torch.nn.functional.cross_entropy(network(images), batch.targets, reduction="none")
    torch.testing.assert_close(output.loss, losses[batch.samples != 5].mean())
