"""Tests of the minimum: its coefficients against scikit-learn's, and the conditions of a minimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Reference

from tests.targets import multi_labels, single_labels
from vitrail.data.targets import Targets
from vitrail.evaluation.classifiers import logistic
from vitrail.evaluation.classifiers.logistic import Fit, LogisticRegression


def rows(n: int, d: int, classes: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return standardised, correlated features in float64, and labels of all classes that depend on them."""
    random = np.random.default_rng(seed)
    features = (
        random.normal(size=(n, d)) @ random.normal(size=(d, d)) * np.geomspace(1, 0.03, d) @ random.normal(size=(d, d))
    )
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    labels = (features @ random.normal(size=(d, classes)) + 3 * random.gumbel(size=(n, classes))).argmax(axis=1)
    labels[:classes] = np.arange(classes)
    return torch.from_numpy(features), torch.from_numpy(labels)


def as_truth(values: torch.Tensor, classes: int) -> Targets:
    return single_labels(values.numpy(), classes) if values.ndim == 1 else multi_labels(values.to(torch.uint8).numpy())


def objective_of(regression: LogisticRegression, fit: Fit, penalty: float) -> float:
    return regression._value(torch.cat([fit.weight, fit.bias[None]]), penalty).objective


@pytest.mark.parametrize(("n", "d", "classes", "penalty"), [
    (61, 40, 4, 1.0), (90, 3, 2, 1.0), (30, 51, 5, 0.01), (70, 1, 3, 0.01), (200, 7, 3, 1e-4), (90, 3, 2, 1e-4),
    pytest.param(61, 40, 4, 1e-4, marks=pytest.mark.slow),
])  # fmt: skip
def test_softmax_has_the_minimum_of_scikit_learn(n: int, d: int, classes: int, penalty: float) -> None:
    features, labels = rows(n, d, classes)
    regression = LogisticRegression(features, as_truth(labels, classes))
    fit = regression.fit(penalty, tolerance=1e-10)
    weight, bias = fit.weight.numpy(), fit.bias.numpy()
    reference = Reference(C=1 / (penalty * n), tol=1e-12, max_iter=100_000, solver="newton-cg")
    reference.fit(features.numpy(), labels.numpy())
    theirs, their_bias = reference.coef_.T, reference.intercept_
    if classes == 2:  # one logit stands for two there: its penalty is that of the difference, which is half as much
        theirs, their_bias = _two_logits(features, labels, penalty)
    scale = abs(theirs).max()
    np.testing.assert_allclose(weight, theirs, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(bias, their_bias - their_bias.mean(), rtol=0, atol=1e-5 * max(1, abs(their_bias).max()))
    # A step is only seen while it lowers the objective by more than its rounding: the square of the gradient, nearly.
    objective = objective_of(regression, fit, penalty)
    assert fit.gradient <= np.sqrt(np.finfo(np.float64).eps * objective) and fit.iterations < 500


def _two_logits(features: torch.Tensor, labels: torch.Tensor, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum with a logit for each of two classes, from the minimum of a binary fit.

    The weights are w and -w, where w / 2 has the data term of the binary fit.
    """
    reference = Reference(C=2 / (penalty * len(features)), tol=1e-12, max_iter=100_000, solver="newton-cg")
    reference.fit(features.numpy(), labels.numpy())
    coefficients, intercept = reference.coef_[0] / 2, reference.intercept_[0] / 2
    return np.stack([-coefficients, coefficients], axis=1), np.array([-intercept, intercept])


@pytest.mark.parametrize(("n", "d", "classes"), [(150, 6, 4), (40, 45, 3)])
@pytest.mark.parametrize("penalty", [0.3, 1e-3])
def test_sigmoid_is_scikit_learn_class_by_class(n: int, d: int, classes: int, penalty: float) -> None:
    features, labels = rows(n, d, classes)
    targets = (torch.nn.functional.one_hot(labels, classes) + torch.nn.functional.one_hot(labels.roll(1), classes)) > 0
    fit = LogisticRegression(features, as_truth(targets.to(torch.uint8), classes)).fit(penalty, tolerance=1e-10)
    for number in range(classes):
        reference = Reference(C=1 / (penalty * n), tol=1e-12, max_iter=100_000, solver="newton-cg")
        reference.fit(features.numpy(), targets[:, number].numpy())
        scale = abs(reference.coef_).max()
        np.testing.assert_allclose(fit.weight[:, number].numpy(), reference.coef_[0], rtol=0, atol=1e-5 * scale)
        assert fit.bias[number].item() == pytest.approx(reference.intercept_[0], abs=1e-5 * max(1, scale))


def test_float32_gives_the_probabilities_of_float64() -> None:
    features, labels = rows(500, 30, 5)
    probabilities = []
    for one in (features, features.float()):
        fit = LogisticRegression(one, as_truth(labels, 5)).fit(1e-3)
        assert fit.gradient <= 1e-5
        probabilities.append((features @ fit.weight + fit.bias).softmax(dim=1))
    torch.testing.assert_close(probabilities[0], probabilities[1], rtol=0, atol=1e-3)


def test_the_objective_and_its_gradient_are_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "PART", 4 * 17)
    features, labels = rows(60, 5, 4)
    targets = torch.nn.functional.one_hot(labels, 4)
    point = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logits = features @ point[:-1] + point[-1]
    yes_or_no = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.double(), reduction="none")
    for truth, losses in (
        (labels, torch.nn.functional.cross_entropy(logits, labels, reduction="none")),
        (targets, yes_or_no.sum(dim=1)),
    ):
        objective = losses.mean() + 0.1 * point[:-1].square().sum()
        (gradient,) = torch.autograd.grad(objective, point, retain_graph=True)
        value = LogisticRegression(features, as_truth(truth, 4))._value(point.detach(), 0.2)
        assert value.objective == pytest.approx(objective.item(), rel=1e-12)
        torch.testing.assert_close(value.gradient, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_a_warm_start_goes_on_from_where_it_ended() -> None:
    features, labels = rows(300, 20, 4)
    regression = LogisticRegression(features, as_truth(labels, 4))
    cold = regression.fit(1e-3, tolerance=1e-8)
    assert regression.fit(1e-3, start=cold, tolerance=1e-8).iterations == 0
    near = regression.fit(2e-3, tolerance=1e-8)
    warm = regression.fit(1e-3, start=near, tolerance=1e-8)
    assert warm.iterations < cold.iterations
    torch.testing.assert_close(warm.weight, cold.weight, rtol=0, atol=1e-5)


def test_it_ends_where_float32_sees_no_lower() -> None:
    features, labels = rows(200, 10, 3)
    fit = LogisticRegression(features.float(), as_truth(labels, 3)).fit(1e-3, tolerance=0.0, max_iterations=100)
    assert fit.gradient < 1e-6


def test_a_class_that_is_nowhere_and_one_class_alone() -> None:
    features, labels = rows(80, 4, 2)
    fit = LogisticRegression(features, as_truth(labels, 3)).fit(0.01)
    assert (features @ fit.weight + fit.bias).softmax(dim=1)[:, 2].max() < 1e-3
    alone = LogisticRegression(features, as_truth(labels * 0, 1)).fit(0.01)
    assert alone.iterations == 0 and not alone.weight.any()


def test_the_limit_of_iterations_holds() -> None:
    features, labels = rows(300, 20, 4)
    fit = LogisticRegression(features, as_truth(labels, 4)).fit(1e-4, max_iterations=3)
    assert fit.iterations == 3 and fit.gradient > 1e-5
