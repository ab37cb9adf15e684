"""LARS and LAMB against their published steps in float64, and against numbers of the original programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitrail.training.optimizer import OptimizerConfig, make_optimizer

RATES = (30.0, 30.0, 15.0)
"""Learning rates of three steps."""

Arrays = dict[str, Any]


def module_of(values: Arrays) -> nn.Module:
    module = nn.Module()
    module.head = nn.Linear(4, 3)
    module.head.load_state_dict({name: torch.tensor(value).float() for name, value in values.items()})
    return module


def weights(*, zero: bool) -> Arrays:
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(3, 4)) * (0.0 if zero else 1.0)
    return {"weight": matrix, "bias": generator.normal(size=3)}


def gradients() -> Iterator[Arrays]:
    for step in range(len(RATES)):
        generator = np.random.default_rng(step + 1)
        # The second gradient of the bias is zero, and so are all gradients in the last step.
        scale = 0.0 if step == 2 else 1.0
        yield {"weight": scale * generator.normal(size=(3, 4)), "bias": scale * (step != 1) * generator.normal(size=3)}


def trained(config: OptimizerConfig, values: Arrays) -> dict[str, Tensor]:
    module = module_of(values)
    optimizer = make_optimizer(module, config)
    for rate, found in zip(RATES, gradients(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * config.learning_rate / RATES[0]
        for name, parameter in module.head.named_parameters():
            parameter.grad = torch.tensor(found[name]).float()
        optimizer.step()
    return dict(module.head.state_dict())


def ratio(weight: np.ndarray, update: np.ndarray, coefficient: float) -> float:
    length, size = math.sqrt((weight**2).sum()), math.sqrt((update**2).sum())
    return coefficient * length / size if length > 0 and size > 0 else 1.0


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("momentum_of", ["gradients", "changes"])
def test_lars_is_the_published_step(momentum_of: Any, zero: bool) -> None:
    values, sums = weights(zero=zero), {"weight": np.zeros((3, 4)), "bias": np.zeros(3)}
    config = OptimizerConfig(
        kind="lars", learning_rate=RATES[0], weight_decay=0.2, momentum=0.7, momentum_of=momentum_of
    )
    found = trained(config, values)
    for rate, gradient in zip(RATES, gradients(), strict=True):
        for name, weight in values.items():
            part = gradient[name]
            if weight.ndim > 1:
                part = part + 0.2 * weight
                part = part * ratio(weight, part, 0.001)
            if momentum_of == "changes":  # SimCLR: the learning rate of each step stays in the sum
                sums[name] = 0.7 * sums[name] + rate * part
                values[name] = weight - sums[name]
            else:  # MoCo v3 and MAE
                sums[name] = 0.7 * sums[name] + part
                values[name] = weight - rate * sums[name]
    for name, expected in values.items():
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("rule", ["decoupled", "coupled"])
def test_lamb_is_the_published_step(rule: Any, zero: bool) -> None:
    values = weights(zero=zero)
    means, squares = ({name: np.zeros_like(value) for name, value in values.items()} for _ in range(2))
    config = OptimizerConfig(
        kind="lamb", learning_rate=0.03, weight_decay=0.2, weight_decay_rule=rule, beta1=0.8, beta2=0.95
    )
    found = trained(config, values)
    for step, (rate, gradient) in enumerate(zip(RATES, gradients(), strict=True), start=1):
        for name, weight in values.items():
            decay = 0.2 if name == "weight" else 0.0
            part = gradient[name] + (decay * weight if rule == "coupled" else 0.0)
            means[name] = 0.8 * means[name] + 0.2 * part
            squares[name] = 0.95 * squares[name] + 0.05 * part**2
            update = means[name] / (1 - 0.8**step) / (np.sqrt(squares[name] / (1 - 0.95**step)) + 1e-8)
            if rule == "decoupled":
                update = update + decay * weight
            values[name] = weight - rate / 1000 * update * (ratio(weight, update, 1.0) if decay else 1.0)
    for name, expected in values.items():
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=2e-6, atol=2e-6)


def test_lars_equals_numbers_of_the_original_program() -> None:
    """The numbers are those of facebookresearch/moco-v3, commit 2e39594, in float64."""
    config = OptimizerConfig(kind="lars", learning_rate=RATES[0], weight_decay=0.2)
    matrix = torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = torch.tensor([-0.8977627505470476, -0.7187250354269189, -0.5470765666880444, -0.3833631171762119])
    module = module_of({"weight": matrix.numpy(), "bias": np.zeros(3)})
    optimizer = make_optimizer(module, config)
    for step, rate in enumerate(RATES, start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        module.head.weight.grad = torch.sin(step * matrix)
        optimizer.step()
    torch.testing.assert_close(module.head.weight[0].detach(), expected, rtol=1e-5, atol=1e-6)
