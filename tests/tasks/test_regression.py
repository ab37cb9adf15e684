"""Tests of regression: the loss, unknown numbers, standardisation, the saved head and the settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.tasks.images import Labels, batch_of
from tests.tasks.objectives import Fixed
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import mixed
from vitrail.data.splits import Splits
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.export.engines import with_engine
from vitrail.models.variants import create
from vitrail.tasks.regression import Regression, RegressionObjective, Rescaled, moments
from vitrail.training.config import TrainConfig
from vitrail.weights.bundle import Bundle

NAN = math.nan


def numbers(*targets: Target, classes: tuple[str, ...] = ("age", "height")) -> Labels:
    return Labels(*targets, classes=classes, target_kind="numbers")


def make_batch(targets: list[list[float]], valid: list[bool] | None = None) -> Batch:
    batch, valid = batch_of(torch.zeros(len(targets), 3, 2, 3)), valid or [True] * len(targets)
    return replace(batch, valid=torch.tensor(valid), targets=torch.tensor(targets), target_kind="numbers")


def test_moments_skip_unknown_numbers() -> None:
    source = numbers((1.0, 10.0), (2.0, NAN), None, (6.0, 30.0), (NAN, NAN))
    mean, deviation = moments(source)
    assert mean.tolist() == [3.0, 20.0]
    torch.testing.assert_close(deviation, torch.tensor([math.sqrt(14 / 3), 10.0]))


def test_moments_of_a_mixture_follow_what_training_draws() -> None:
    few, many = numbers((1.0, 0.0), (3.0, 0.0)), numbers(*[(10.0, 0.0)] * 6)
    mean, deviation = moments(mixed([few, many], [0.5, 0.5]))
    assert mean.tolist() == [6.0, 0.0]
    torch.testing.assert_close(deviation, torch.tensor([math.sqrt((25 + 9 + 2 * 16) / 4), 1.0]))


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e8])
def test_the_deviation_of_a_constant_number_is_1(constant: float) -> None:
    mean, deviation = moments(numbers(*[(constant,)] * 7, classes=("size",)))
    assert deviation.tolist() == [1.0] and mean.item() == pytest.approx(constant)


@pytest.mark.parametrize("delta", [None, 0.5, 2.0])
def test_the_loss_is_the_formula_of_standardised_numbers(delta: float | None) -> None:
    outputs = torch.tensor([[0.5, -1.0], [2.0, 0.25], [3.0, 3.0]])
    targets = [[10.0, NAN], [16.0, 2.5], [NAN, NAN]]
    objective = RegressionObjective(Fixed(outputs), torch.tensor([12.0, 2.0]), torch.tensor([4.0, 0.5]), delta=delta)
    found = objective(make_batch(targets))

    def loss(error: float) -> float:
        if delta is None:
            return error**2
        return error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)

    first = loss(0.5 - (10 - 12) / 4)
    second = (loss(2.0 - (16 - 12) / 4) + loss(0.25 - (2.5 - 2) / 0.5)) / 2
    assert found.loss.item() == pytest.approx((first + second) / 2)
    errors = [1.0, (1.0 + 0.75) / 2]  # in standard deviations, because the numbers can have different units
    assert set(found.metrics) == {"standardised_error"}
    assert found.metrics["standardised_error"].item() == pytest.approx(sum(errors) / 2)
    found.loss.backward()
    gradient = objective.network.outputs.grad
    assert gradient.isfinite().all() and gradient[0, 1] == 0 and not gradient[2].any()


def test_images_that_do_not_count_change_nothing() -> None:
    outputs = torch.tensor([[1.0], [5.0], [-2.0]])
    mean, deviation = torch.tensor([0.0]), torch.tensor([1.0])
    whole = RegressionObjective(Fixed(outputs), mean, deviation)(make_batch([[0.0], [9.0], [0.0]], [True, False, True]))
    rest = RegressionObjective(Fixed(outputs[[0, 2]]), mean, deviation)(make_batch([[0.0], [0.0]]))
    assert whole.loss.item() == rest.loss.item() == 2.5
    assert whole.metrics["mean_absolute_error"].item() == rest.metrics["mean_absolute_error"].item() == 1.5
    unknown = make_batch([[NAN], [1.0], [NAN]], [True, False, True])
    nothing = RegressionObjective(Fixed(outputs), mean, deviation)(unknown)
    assert nothing.loss.item() == 0 and nothing.metrics["mean_absolute_error"].item() == 0


@pytest.mark.parametrize("variant", ["ViT-Pico/7", "BiT-Pico"])
def test_the_saved_network_gives_numbers_in_the_units_of_the_data(variant: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {} if variant.startswith("BiT") else {"width": 16, "depth": 2, "heads": 2}
    network = create(variant, image_size=(21, 28), num_classes=2, **sizes)
    nn.init.normal_(network.head.weight)
    mean, deviation = torch.tensor([170.0, -3.0]), torch.tensor([12.0, 0.01])
    objective = RegressionObjective(network, mean, deviation).eval()
    images = torch.randn(3, 3, 21, 28)
    with torch.no_grad():
        expected = network(images) * deviation + mean
        saved = objective.saved_network()
        torch.testing.assert_close(saved(images), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(network(images) * deviation + mean, expected)
    shared = {id(parameter) for parameter in network.parameters()} & {id(one) for one in saved.parameters()}
    assert len(shared) == len(list(network.parameters())) - 2, "all weights but those of the head"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_numbers_keep_their_units_in_bf16(precision: Any) -> None:
    torch.manual_seed(0)
    network = create("ViT-Pico/7", image_size=(21, 28), num_classes=2, width=16, depth=1, heads=2)
    nn.init.normal_(network.head.weight)
    mean = torch.tensor([1980.0, 1e6])  # bfloat16 has steps of 8 and of 4096 there
    deviation = torch.tensor([10.0, 100.0])
    saved = RegressionObjective(network, mean, deviation).saved_network()
    bundle = Bundle(saved, ("year", "mass"), Preprocess(image_size=(21, 28)), output="numbers")
    images = torch.randn(3, 3, 21, 28)
    exact = saved.eval()(images)
    found = bundle.predictor(precision).logits(images)
    assert ((found - exact) / deviation).abs().max() < 0.2
    with pytest.raises(ConfigError, match="rounds numbers in the units of the data"):
        with_engine(bundle, "openvino", precision="bf16")


def test_a_saved_head_is_loaded_back_into_standardised_numbers() -> None:
    torch.manual_seed(1)
    network = create("ViT-Pico/7", image_size=(14, 21), width=16, depth=1, heads=2, num_classes=2)
    nn.init.normal_(network.head.weight)
    splits = Splits(numbers((1.0, 200.0), (5.0, 260.0), (9.0, NAN)), None, None)
    task = Regression()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    saved = task.objective(network, splits).saved_network()
    task.load_head(saved, splits)
    for name, tensor in saved.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-5, atol=1e-5)


def test_a_network_without_a_head_is_rescaled_from_outside() -> None:
    objective = RegressionObjective(Fixed(torch.tensor([[1.0], [2.0]])), torch.tensor([5.0]), torch.tensor([3.0]))
    saved = objective.saved_network()
    assert isinstance(saved, Rescaled)
    assert saved(torch.zeros(2, 3, 4, 5)).tolist() == [[8.0], [11.0]]


def test_a_number_that_no_image_has_is_named() -> None:
    with pytest.raises(DataError, match="no training image has a known number in height; leave the column out"):
        Regression().check_data(Splits(numbers((1.0, NAN), None, (2.0, NAN)), None, None))


def test_a_unit_is_needed_to_select_by_an_error() -> None:
    one, two = (Splits(numbers((1.0, 2.0)[:count], classes=("age", "height")[:count]), None, None) for count in (1, 2))
    task = Regression(select="mean_absolute_error")
    assert task.selection(one).name == "mean_absolute_error"
    with pytest.raises(ConfigError, match=r"select='mean_absolute_error' has the unit .* choose r2 or standardised_e"):
        task.selection(two)
    assert Regression(select="standardised_error").selection(two).name == "standardised_error"


def test_the_metrics_of_a_model_have_one_unit_each() -> None:
    task, counts = Regression(), {"images": 4.0, "skipped": 0.0}
    one = {"r2": 0.5, "standardised_error": 0.4, "mean_absolute_error": 3.0, "root_mean_squared_error": 4.0}
    several = {"r2": 0.5, "standardised_error": 0.4, "age:mean_absolute_error": 3.0, "a:b:mean_absolute_error": 7.0}
    assert "standardised_error" not in task.summary(one | counts)
    assert task.summary(several | counts) == several and task.summary(several | {"images": 0.0}) == {}
    assert task.texts(several)[2:] == ["age: mean absolute error 3", "a:b: mean absolute error 7"]


def test_settings_of_another_task_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^numbers=\('age',\) are targets of a regression, but the task is clas"):
        TrainConfig().override(numbers=("age",))
    with pytest.raises(ConfigError, match=r"^cutmix=1.0 cannot be used for regression"):
        TrainConfig().override(task="regression", numbers=("age",), cutmix=1.0)
