"""Tests of soft targets on their way from a source to the loss: batches, parts of batches, mixup and evaluation."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tasks.images import Pictures
from tests.tasks.objectives import small_network
from vitrail.data.batch import Batch
from vitrail.data.pipeline import Readers, Stage, TrainingBatches, evaluation_batches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Samples, has_soft_targets, mixed, soft_target_of, subset
from vitrail.data.splits import Splits
from vitrail.data.targets import SoftTarget
from vitrail.errors import DataError
from vitrail.tasks.classification import Classification, ClassificationObjective, balanced_weights

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


def whole_batch() -> tuple[Batch, Samples]:
    source = mixture()
    return next(TrainingBatches(source, [Stage(SIZE, 14)], seed=3, readers=Readers(0))), source


def test_amounts_of_classes_that_exclude_each_other_have_the_sum_1() -> None:
    class Halves(Soft):
        def soft_target(self, index: int) -> SoftTarget:
            return super().soft_target(index) / 2

    Classification().check_data(Splits(mixture(), None, None))
    Classification(loss="sigmoid").check_data(Splits(Halves(8), None, None))
    with pytest.raises(DataError, match=r"sum 0\.5, but loss='softmax'"):
        Classification().check_data(Splits(Halves(8), None, None))


def softmax(rows: Tensor) -> np.ndarray:
    exponents = np.exp(rows.detach().double().numpy() - rows.detach().double().numpy().max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)


@pytest.mark.parametrize(("smoothing", "weights"), [(0.0, "none"), (0.2, "none"), (0.1, "balanced")])
def test_the_loss_is_the_formula(smoothing: float, weights: Any) -> None:
    """Labelled and pseudo-labelled images share one mean cross-entropy, as in Noisy Student (1911.04252)."""
    batch, source = whole_batch()
    class_weights = balanced_weights(source) if weights == "balanced" else None
    network = small_network(num_classes=4)
    objective = ClassificationObjective(network, label_smoothing=smoothing, class_weights=class_weights)
    torch.nn.init.normal_(network.head.weight)
    images = SIZE.normalise(batch.images)
    output = objective(Batch(**{**vars(batch), "images": images}))
    probabilities = softmax(network(images))
    losses = []
    for row, index in enumerate(batch.samples.tolist()):
        if index == 5:
            continue
        amounts, weight = expected(source, index).astype(np.float64), 1.0
        if class_weights is not None:
            weight = float((amounts * class_weights.double().numpy()).sum())
            amounts = amounts * class_weights.double().numpy() / weight
        amounts = (1 - smoothing) * amounts + smoothing / 4
        losses.append(-weight * (amounts * np.log(probabilities[row])).sum())
    assert 10 < len(losses) == batch.counted.sum() and output.loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    hits = [probabilities[row].argmax() == label for row, label in enumerate(batch.labels.tolist()) if label >= 0]
    assert output.metrics["accuracy"].item() == pytest.approx(np.mean(hits))
