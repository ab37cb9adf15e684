"""Tests of the classification report against the functions that it calls, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from tests.targets import multi_labels, single_labels
from vitrail.data.batch import Skipped
from vitrail.errors import DataError
from vitrail.evaluation.metrics.classes import (
    binary_logits,
    calibration_bins,
    mean_average_precision,
    per_sample,
    top_k,
)
from vitrail.evaluation.metrics.intervals import balanced_accuracy_interval, calibration_error_interval, mean_interval
from vitrail.evaluation.metrics.report import ClassificationReport, absent_note, report
from vitrail.evaluation.outputs import Predictions
from vitrail.settings import from_plain, to_plain


def make_predictions(count: int = 60, classes: int = 7, *, unlabelled: int = 0) -> Predictions:
    """Return predictions, half of which are correct. The last two classes have no sample, and the last is never
    predicted.
    """
    random = np.random.default_rng(4)
    labels = random.integers(0, classes - 2, count)
    logits = (random.standard_normal((count, classes)) + 2 * np.eye(classes)[labels]).astype(np.float32)
    logits[:, -1] -= 50
    labels[count - unlabelled :] = -1
    keys = tuple(f"{number}.png" for number in range(count))
    names = tuple(f"class {number}" for number in range(classes))
    return Predictions(
        logits, single_labels(labels, classes), keys, np.arange(count) + 100, names, skipped=(Skipped("x", "not one"),)
    )


def several(count: int = 40, classes: int = 5) -> Predictions:
    targets = (np.random.default_rng(1).random((count, classes)) < (0.5, 0.3, 0.2, 0.1, 0)).astype(np.uint8)
    made = make_predictions(count, classes)
    logits = (made.logits + 2 * targets - 1).astype(np.float32)
    return replace(made, logits=logits, truth=multi_labels(targets), scores="sigmoid")


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_it_gathers_the_figures_of_one_label(scores: str) -> None:
    predictions = replace(make_predictions(), scores=scores)
    logits, labels = predictions.logits, predictions.truth.dense
    found = report(predictions, bootstrap=50, seed=3, temperature=2.0)
    settings = {"resamples": 50, "seed": 3}
    judged, again = (per_sample(logits, labels, scores=predictions.scores, temperature=t) for t in (1.0, 2.0))
    assert found.metrics["accuracy"] == mean_interval((judged.predicted == labels), **settings)
    assert found.metrics["accuracy"].value == reference.accuracy_score(labels, logits.argmax(axis=1))
    assert found.metrics["top5_accuracy"] == mean_interval(top_k(logits, labels, 5), **settings)
    assert found.metrics["balanced_accuracy"] == balanced_accuracy_interval(labels, judged.predicted, 7, **settings)
    assert found.metrics["cross_entropy"] == mean_interval(judged.cross_entropy, **settings)
    correct = judged.predicted == labels
    for calibration, values, temperature in ((found.calibration, judged, 1.0), (found.scaled, again, 2.0)):
        assert calibration is not None and calibration.temperature == temperature
        assert calibration.error == calibration_error_interval(values.confidence, correct, **settings)
        assert calibration.cross_entropy == mean_interval(values.cross_entropy, **settings)
        assert calibration.brier == mean_interval(values.brier, **settings)
        assert calibration.bins == calibration_bins(values.confidence, correct)
    assert (found.images, found.unlabelled, found.num_classes) == (60, 0, 7)
    assert found.skipped == (Skipped("x", "not one"),) and not found.has_several_labels


def test_classes_and_confusion() -> None:
    predictions = make_predictions()
    found = report(predictions, bootstrap=0)
    table = reference.confusion_matrix(predictions.truth.dense, predictions.logits.argmax(axis=1), labels=range(7))
    rebuilt = np.zeros_like(table)
    for true, likeliest, images in found.confusion:
        rebuilt[true, likeliest] = images
    assert np.array_equal(rebuilt, table) and all(images > 0 for _, _, images in found.confusion)
    assert [(row.index, row.name) for row in found.per_class] == [(number, f"class {number}") for number in range(6)]
    for row in found.per_class[:5]:
        right, images, predicted = table[row.index, row.index], table[row.index].sum(), table[:, row.index].sum()
        assert (row.images, row.predicted) == (images, predicted)
        assert row.accuracy == right / images and row.precision == right / predicted
        assert row.f1 == pytest.approx(2 * row.accuracy * row.precision / (row.accuracy + row.precision))
    guessed = found.per_class[5]
    assert guessed.predicted > 0 == guessed.images and guessed.precision == 0 and guessed.accuracy is None
    assert found.absent == ("class 5", "class 6") and report(several(), bootstrap=0).absent == ("class 4",)
    note = absent_note(found, "test")
    assert "2 of 7 classes" in note and "test split" in note and note.endswith("class 5, class 6")
    assert not absent_note(replace(found, absent=()))


def test_worst_mistakes_first() -> None:
    predictions = make_predictions()
    found = report(predictions, bootstrap=0, worst=6).worst
    judged = per_sample(predictions.logits, predictions.truth.dense)
    wrong = judged.predicted != predictions.truth.dense
    losses = sorted(judged.cross_entropy[wrong], reverse=True)
    assert [item.loss for item in found] == losses[:6]
    for item in found:
        row = item.index - 100
        assert item.key == f"{row}.png" and item.labels == (f"class {predictions.truth.dense[row]}",)
        assert item.predicted == (f"class {judged.predicted[row]}",) != item.labels
        assert item.probability == judged.confidence[row] and item.loss == judged.cross_entropy[row]
    assert len(report(predictions, bootstrap=0, worst=1000).worst) == wrong.sum()


def test_it_gathers_the_figures_of_several_labels() -> None:
    predictions = several()
    targets = predictions.truth.dense
    found = report(predictions, bootstrap=30, seed=1)
    predicted = predictions.logits > 0
    metrics = found.metrics
    assert found.has_several_labels
    expected = mean_average_precision(predictions.logits, targets > 0)
    assert metrics["mean_average_precision"].value == expected
    assert metrics["exact_match"] == mean_interval((predicted == targets).all(axis=1), resamples=30, seed=1)
    assert metrics["micro_f1"].value == reference.f1_score(targets, predicted, average="micro")
    assert metrics["macro_f1"].value == pytest.approx(
        reference.f1_score(targets, predicted, average="macro", zero_division=np.nan)
    )
    likeliest = predictions.logits.argmax(axis=1)
    assert metrics["accuracy"] == mean_interval(targets[np.arange(40), likeliest] > 0, resamples=30, seed=1)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(predictions.logits).double(), torch.from_numpy(targets).double(), reduction="none"
    ).sum(dim=1)
    assert found.metrics["cross_entropy"].value == pytest.approx(float(losses.mean()), rel=1e-12)
    assert not {"top5_accuracy", "balanced_accuracy"} & set(metrics) and found.calibration is found.scaled is None
    assert found.confusion == ()
    assert [row.index for row in found.per_class] == [0, 1, 2, 3]
    assert found.per_class[0].average_precision == pytest.approx(
        reference.average_precision_score(targets[:, 0], predictions.logits[:, 0])
    )
    worst = found.worst[0]
    row = worst.index - 100
    assert worst.loss == pytest.approx(float(losses[~(predicted == targets).all(axis=1)].max()))
    assert worst.labels == tuple(f"class {number}" for number in np.flatnonzero(targets[row]))
    assert worst.predicted == tuple(f"class {number}" for number in np.flatnonzero(predicted[row]))
    assert worst.probability == pytest.approx(float(torch.sigmoid(torch.from_numpy(predictions.logits[row]).max())))


@pytest.mark.parametrize("predictions", [make_predictions(), several()], ids=["one label", "several labels"])
def test_it_is_json_and_back(predictions: Predictions) -> None:
    made = report(predictions, bootstrap=10, temperature=1.5)
    text = json.dumps(to_plain(made), allow_nan=False)
    assert from_plain(ClassificationReport, json.loads(text)) == made


def test_unlabelled_images_are_left_out_and_nothing_to_measure_is_refused() -> None:
    found = report(make_predictions(unlabelled=11, classes=5), bootstrap=0)
    assert (found.images, found.unlabelled, sum(images for _, _, images in found.confusion)) == (49, 11, 49)
    assert "top5_accuracy" not in found.metrics and found.scaled is None and found.metrics["accuracy"].low is None
    with pytest.raises(DataError, match="none of 60 images has a label, so there is nothing to measure"):
        report(make_predictions(unlabelled=60))
    with pytest.raises(DataError, match="there is no image to measure; 1 could not be decoded"):
        report(make_predictions().rows(np.zeros(60, bool)))


def test_a_mistake_can_have_a_logit_of_any_size() -> None:
    """The exponential of 750 is too large for a float."""
    predictions = several()
    huge = replace(predictions, logits=np.full_like(predictions.logits, -750.0))
    assert report(huge, bootstrap=0).worst[0].probability == 0.0


def test_several_labels_are_judged_by_probabilities_of_a_softmax() -> None:
    predictions = replace(several(), scores="softmax")
    logits, targets = predictions.logits.astype(np.float64) + 20, predictions.truth.dense
    found = report(replace(predictions, logits=logits.astype(np.float32)), bootstrap=0)
    probabilities = torch.from_numpy(logits).softmax(dim=1)
    losses = torch.nn.functional.binary_cross_entropy(
        probabilities, torch.from_numpy(targets).double(), reduction="none"
    )
    assert found.metrics["cross_entropy"].value == pytest.approx(float(losses.sum(dim=1).mean()), rel=1e-5)
    decided = probabilities.numpy() > 0.5
    assert found.has_several_labels and 0 < decided.mean() < 0.5
    assert found.metrics["exact_match"].value == (decided == targets).all(axis=1).mean()
    assert found.metrics["micro_f1"].value == pytest.approx(reference.f1_score(targets, decided, average="micro"))
    assert found.metrics["mean_average_precision"].value == pytest.approx(
        mean_average_precision(probabilities.numpy(), targets > 0), rel=1e-9
    )
    worst = found.worst[0]
    assert worst.probability == pytest.approx(float(probabilities[worst.index - 100].max()), rel=1e-5)


def test_binary_logits_keep_small_probabilities() -> None:
    logits = np.array([[500, 0, 1], [0, 0, 0], [-3, 40, -200]], np.float32)
    found = binary_logits(logits)
    np.testing.assert_allclose(found[0], [500 - np.logaddexp(0, 1), -500, -499], rtol=1e-6)
    np.testing.assert_allclose(found[1], np.full(3, -np.log(2)), rtol=1e-6)
    np.testing.assert_allclose(found[2], [-43, 43, -240], rtol=1e-6)
    assert np.isfinite(binary_logits(np.zeros((2, 1), np.float32))).all()
