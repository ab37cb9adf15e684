"""Tests of the losses against their formulas, including invalid samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tasks.images import Labels, batch_of
from tests.tasks.objectives import Fixed
from vitrail.data.batch import Batch
from vitrail.data.source import mixed
from vitrail.data.targets import Target
from vitrail.tasks.classification import ClassificationObjective, balanced_weights


def make_batch(labels: list[int], valid: list[bool] | None = None) -> Batch:
    batch, valid = batch_of(torch.zeros(len(labels), 1, 4, 4)), valid or [True] * len(labels)
    return replace(batch, labels=torch.tensor(labels), valid=torch.tensor(valid), target_kind="class")


def named(*labels: Target, classes: int, prefix: str = "class") -> Labels:
    return Labels(*labels, classes=tuple(f"{prefix} {number}" for number in range(classes)))


def softmax_loss(row: np.ndarray, label: int, smoothing: float) -> float:
    """Return -sum_k q_k log softmax(z)_k, where q is (1 - s) on the label and s / K on every class."""
    log_p = row - math.log(sum(math.exp(value) for value in row))
    q = np.full(len(row), smoothing / len(row))
    q[label] += 1 - smoothing
    return float(-(q * log_p).sum())


def sigmoid_loss(row: np.ndarray, label: int, smoothing: float) -> float:
    """Return sum_k -t_k log s(z_k) - (1 - t_k) log(1 - s(z_k)), where t is 1 - s / 2 on the label and s / 2
    elsewhere."""
    total = 0.0
    for k, value in enumerate(row):
        target = 1 - smoothing / 2 if k == label else smoothing / 2
        p = 1 / (1 + math.exp(-value))
        total -= target * math.log(p) + (1 - target) * math.log(1 - p)
    return total


FORMULAS = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])


@pytest.mark.parametrize(("loss", "weights"), [("softmax", None), ("softmax", WEIGHTS), ("sigmoid", None)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_loss_is_the_formulas_and_each_image_weighs_as_its_class_does(
    loss: str, weights: Tensor | None, smoothing: float
) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 3
    labels = [0, 4, 2, 2, 1, 3]
    objective = ClassificationObjective(Fixed(logits), loss=loss, label_smoothing=smoothing, class_weights=weights)
    shares = [1.0] * 5 if weights is None else weights.tolist()
    rows = zip(logits.double().numpy(), labels, strict=True)
    expected = np.mean([shares[label] * FORMULAS[loss](row, label, smoothing) for row, label in rows])
    batch = make_batch(labels)
    assert objective(batch).loss.item() == pytest.approx(expected, rel=1e-5)
    sure = replace(batch, targets=torch.nn.functional.one_hot(torch.tensor(labels), 5).float())
    assert objective(sure).loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_invalid_samples_have_no_weight(loss: str) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    wild = logits.clone()
    wild[1], wild[4] = 1e4, -1e4  # outputs for these samples must not count
    network = Fixed(wild)
    output = ClassificationObjective(network, loss=loss)(make_batch([0, -1, 2, 3, 1], [True, False, True, True, False]))
    rest = Fixed(logits[[0, 2, 3]])
    expected = ClassificationObjective(rest, loss=loss)(make_batch([0, 2, 3]))
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.metrics["accuracy"], expected.metrics["accuracy"])
    output.loss.backward()
    expected.loss.backward()
    assert not network.outputs.grad[[1, 4]].any()
    torch.testing.assert_close(network.outputs.grad[[0, 2, 3]], rest.outputs.grad)
    assert rest.outputs.grad.abs().min() > 0


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_batch_without_valid_samples_is_0(loss: str) -> None:
    network = Fixed(torch.randn(3, 4))
    output = ClassificationObjective(network, loss=loss)(make_batch([-1, 1, 2], [False] * 3))
    output.loss.backward()
    assert output.loss.item() == 0 and output.metrics["accuracy"].item() == 0
    assert not network.outputs.grad.any()


def test_accuracy_counts_the_likeliest_class() -> None:
    logits = torch.tensor([[3.0, 1, 2], [0, 5, 1], [9, 0, 0], [1, 2, 3], [1, 2, 3]])
    output = ClassificationObjective(Fixed(logits))(make_batch([0, 1, 2, 2, -1], [True, True, True, True, False]))
    assert output.metrics["accuracy"].item() == 3 / 4
    assert not output.metrics["accuracy"].requires_grad


def test_the_loss_of_bf16_logits_is_computed_in_float32() -> None:
    logits = torch.randn(4, 3).bfloat16()
    output = ClassificationObjective(Fixed(logits))(make_batch([0, 1, 2, 0]))
    assert output.loss.dtype == torch.float32
    expected = np.mean(
        [softmax_loss(row, label, 0.0) for row, label in zip(logits.double().numpy(), [0, 1, 2, 0], strict=True)]
    )
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_the_loss_of_a_mixture_is_the_mixture_of_losses(loss: str, smoothing: float, weights: Tensor | None) -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)) * 3
    labels, others, shares = [0, 4, 2, 2], [4, 1, 3, 0], [1.0, 0.75, 0.4, 0.5]

    def objective_of(rows: Tensor) -> ClassificationObjective:
        return ClassificationObjective(Fixed(rows), loss=loss, label_smoothing=smoothing, class_weights=weights)

    expected, targets = [], torch.zeros(4, 5)
    for row, (label, other, share) in enumerate(zip(labels, others, shares, strict=True)):
        targets[row, label] += share
        targets[row, other] += 1 - share
        one, two = (objective_of(logits[row : row + 1])(make_batch([each])).loss.item() for each in (label, other))
        expected.append(share * one + (1 - share) * two)
    batch, objective = make_batch(labels), objective_of(logits)
    found = objective(replace(batch, targets=targets))
    assert found.loss.item() == pytest.approx(np.mean(expected), rel=1e-5)
    assert torch.equal(found.metrics["accuracy"], objective(batch).metrics["accuracy"]), "measured against the labels"


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 3.0])], ids=["plain", "weighted"])
def test_several_labels_an_image_are_questions_of_their_own_whose_true_answers_weigh(weights: Tensor | None) -> None:
    logits = torch.tensor([[2.0, -1, 0.5], [0, 3, -2], [1, 1, 1]])
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 0]])
    batch = replace(make_batch([-1, -1, -1], [True, True, False]), targets=targets)
    output = ClassificationObjective(Fixed(logits), loss="sigmoid", class_weights=weights)(batch)
    p, factors = 1 / (1 + np.exp(-logits.double().numpy())), np.ones(3) if weights is None else weights.numpy()
    each = np.where(targets.numpy() == 1, -factors * np.log(p), -np.log(1 - p)).sum(1)
    assert output.loss.item() == pytest.approx(each[:2].mean(), rel=1e-5)
    assert output.metrics["accuracy"].item() == 0.5, "the likeliest class of the first is one of its labels"


@settings(max_examples=20)
@given(labels=st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=60))
def test_balanced_classes_count_alike_and_1_on_average(labels: list[int | None]) -> None:
    weights = balanced_weights(named(*labels, classes=7)).double()
    counted = [label for label in labels if label is not None]
    sums = {label: counted.count(label) * float(weights[label]) for label in set(counted)}
    for total in sums.values():
        assert total == pytest.approx(len(counted) / len(sums), rel=1e-5)
    assert sum(sums.values()) == pytest.approx(len(counted), rel=1e-5)
    assert all(float(weights[label]) == 1 for label in range(7) if label not in sums)


def test_of_several_labels_each_is_counted() -> None:
    weights = balanced_weights(named((0, 1), (0,), (), (0, 2), classes=4))
    torch.testing.assert_close(weights, torch.tensor([5 / 9, 5 / 3, 5 / 3, 1.0]))


def test_a_mixture_counts_by_the_shares_that_are_drawn() -> None:
    mixture = mixed([named(0, 1, classes=2), named(*[0] * 30, classes=1, prefix="other")], [0.75, 0.25])
    drawn = torch.tensor([0.375, 0.375, 0.25])
    torch.testing.assert_close(balanced_weights(mixture), 1 / (3 * drawn))


def test_class_weights_are_no_part_of_the_state() -> None:
    objective = ClassificationObjective(Fixed(torch.zeros(1, 5)), class_weights=WEIGHTS)
    assert set(objective.state_dict()) == {"network.outputs"}
