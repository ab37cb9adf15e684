"""Tests of the losses against their formulas, including invalid samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_loss_is_the_formulas(loss: str, smoothing: float) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 3
    labels = [0, 4, 2, 2, 1, 3]
    objective = ClassificationObjective(Fixed(logits), loss=loss, label_smoothing=smoothing)
    expected = np.mean(
        [FORMULAS[loss](row, label, smoothing) for row, label in zip(logits.double().numpy(), labels, strict=True)]
    )
    assert objective(make_batch(labels)).loss.item() == pytest.approx(expected, rel=1e-5)


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
def test_the_loss_of_a_mixture_is_the_mixture_of_losses(loss: str, smoothing: float) -> None:
    """Both losses are linear in their targets, and smoothing is too."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)) * 3
    labels, others, shares = [0, 4, 2, 2], [4, 1, 2, 0], [1.0, 0.75, 0.4, 0.5]
    targets = torch.zeros(4, 5)
    for row, (label, other, share) in enumerate(zip(labels, others, shares, strict=True)):
        targets[row, label] += share
        targets[row, other] += 1 - share
    objective = ClassificationObjective(Fixed(logits), loss=loss, label_smoothing=smoothing)
    found = objective(replace(make_batch(labels), targets=targets))
    rows = logits.double().numpy()
    expected = np.mean([
        share * FORMULAS[loss](row, label, smoothing) + (1 - share) * FORMULAS[loss](row, other, smoothing)
        for row, label, other, share in zip(rows, labels, others, shares, strict=True)
    ])  # fmt: skip
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    plain = objective(make_batch(labels))
    assert torch.equal(found.metrics["accuracy"], plain.metrics["accuracy"]), "measured against the labels"
    sure = replace(make_batch(labels), targets=torch.nn.functional.one_hot(torch.tensor(labels), 5).float())
    torch.testing.assert_close(objective(sure).loss, plain.loss)


def test_several_labels_an_image_are_questions_of_their_own() -> None:
    logits = torch.tensor([[2.0, -1, 0.5], [0, 3, -2], [1, 1, 1]])
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 0]])
    batch = replace(make_batch([-1, -1, -1], [True, True, False]), targets=targets)
    output = ClassificationObjective(Fixed(logits), loss="sigmoid")(batch)
    p = 1 / (1 + np.exp(-logits.double().numpy()))
    each = -np.log(np.where(targets.numpy() == 1, p, 1 - p)).sum(1)
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


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_image_weighs_as_its_class_does(smoothing: float) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 3
    labels = [0, 4, 2, 2, 1, 3]
    objective = ClassificationObjective(Fixed(logits), label_smoothing=smoothing, class_weights=WEIGHTS)
    rows = logits.double().numpy()
    each = [
        float(WEIGHTS[label]) * softmax_loss(row, label, smoothing) for row, label in zip(rows, labels, strict=True)
    ]
    assert objective(make_batch(labels)).loss.item() == pytest.approx(np.mean(each), rel=1e-5)
    sure = replace(make_batch(labels), targets=torch.nn.functional.one_hot(torch.tensor(labels), 5).float())
    assert objective(sure).loss.item() == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_weighted_loss_of_a_mixture_is_the_mixture_of_weighted_losses(loss: str, smoothing: float) -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)) * 3
    labels, others, shares = [0, 4, 2, 2], [4, 1, 3, 0], [1.0, 0.75, 0.4, 0.5]
    objective = ClassificationObjective(Fixed(logits), loss=loss, label_smoothing=smoothing, class_weights=WEIGHTS)
    alone = []
    for row in range(4):
        pair = []
        for label in (labels[row], others[row]):
            network = Fixed(logits[row : row + 1])
            one = ClassificationObjective(network, loss=loss, label_smoothing=smoothing, class_weights=WEIGHTS)
            pair.append(one(make_batch([label])).loss.item())
        alone.append(shares[row] * pair[0] + (1 - shares[row]) * pair[1])
    targets = torch.zeros(4, 5)
    for row in range(4):
        targets[row, labels[row]] += shares[row]
        targets[row, others[row]] += 1 - shares[row]
    found = objective(replace(make_batch(labels), targets=targets)).loss.item()
    assert found == pytest.approx(np.mean(alone), rel=1e-5)


def test_with_sigmoid_the_true_answers_weigh() -> None:
    logits = torch.tensor([[2.0, -1, 0.5], [0, 3, -2]])
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    weights = torch.tensor([0.5, 2.0, 3.0])
    objective = ClassificationObjective(Fixed(logits), loss="sigmoid", class_weights=weights)
    p = 1 / (1 + np.exp(-logits.double().numpy()))
    each = np.where(targets.numpy() == 1, -weights.numpy() * np.log(p), -np.log(1 - p)).sum(1)
    found = objective(replace(make_batch([-1, -1]), targets=targets)).loss.item()
    assert found == pytest.approx(each.mean(), rel=1e-5)


def test_class_weights_go_with_the_module_and_not_into_its_state() -> None:
    objective = ClassificationObjective(Fixed(torch.zeros(1, 5)), class_weights=WEIGHTS)
    assert set(objective.state_dict()) == {"network.outputs"}
    assert objective.double().class_weights is not None and objective.class_weights.dtype == torch.float64
