"""Adafactor against its formula in float64, and which arrays it factors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.models.variants import create
from vitrail.training.optimizer import OptimizerConfig, make_optimizer
from vitrail.training.update_rules import factored_axes


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), None), ((40,), None), ((31, 500), None), ((32, 500), (0, 1)), ((500, 32), (1, 0)),
        ((64, 4, 16), None), ((128, 4, 32), (2, 0)), ((4, 32, 128), (1, 2)), ((64, 64), (0, 1)), ((8, 8, 3, 128), None),
        ((40, 40, 7, 40), (1, 3)), ((1, 196, 768), (1, 2)), ((3, 3, 64, 64), (2, 3)),
    ],
)  # fmt: skip
def test_the_two_longest_axes_are_factored(shape: tuple[int, ...], axes: tuple[int, int] | None) -> None:
    assert factored_axes(shape) == axes
    if axes is not None:
        assert list(axes) == np.argsort(shape, kind="stable")[-2:].tolist()


def formula(gradients: list[np.ndarray], beta2: float, momentum: float, clip: float) -> list[np.ndarray]:
    """The updates of one array in float64 by big_vision's rule."""
    axes = factored_axes(gradients[0].shape)
    mean: list[np.ndarray | float] = [0.0, 0.0]
    average, updates = np.zeros_like(gradients[0]), []
    for step, gradient in enumerate(gradients, start=1):
        decay = min(beta2, 1 - step**-0.8)
        squares = gradient**2 + 1e-30
        if axes is None:
            mean[0] = decay * mean[0] + (1 - decay) * squares
            update = gradient / np.sqrt(mean[0])
        else:
            for number, axis in enumerate((axes[1], axes[0])):
                mean[number] = decay * mean[number] + (1 - decay) * squares.mean(axis=axis, keepdims=True)
            rows, columns = mean
            update = gradient / np.sqrt(rows / rows.mean(axis=axes[0], keepdims=True) * columns)
        if clip:
            update = update / max(1.0, math.sqrt((update**2).mean()) / clip)
        average = momentum * average + (1 - momentum) * update
        updates.append(average)
    return updates


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("shape", [(5, 7), (33, 47), (48, 36)], ids=str)
def test_steps_are_the_formula(shape: tuple[int, int], clip: float) -> None:
    layer = nn.Linear(shape[1], shape[0])
    config = OptimizerConfig(
        kind="adafactor", learning_rate=0.02, weight_decay=0.3, beta2=0.5, momentum=0.6, update_clip=clip
    )
    optimizer = make_optimizer(layer, config)
    generator = torch.Generator().manual_seed(4)
    gradients = [[torch.randn(one.shape, generator=generator) for one in layer.parameters()] for _ in range(4)]
    updates = [formula([step[index].double().numpy() for step in gradients], 0.5, 0.6, clip) for index in range(2)]
    expected = [one.detach().double() for one in layer.parameters()]
    for step, given in enumerate(gradients):
        for index, parameter in enumerate(layer.parameters()):
            parameter.grad = given[index]
            factor = 1 - 0.02 * 0.3 if index == 0 else 1.0
            expected[index] = expected[index] * factor - 0.02 * torch.from_numpy(updates[index][step])
        optimizer.step()
        for parameter, value in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=2e-6, atol=2e-7)


def test_large_weights_keep_factors_only() -> None:
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=3, width=96, depth=1, heads=2, mlp_width=128)
    optimizer = make_optimizer(network, OptimizerConfig(kind="adafactor", momentum_format="bfloat16"))
    network(torch.randn(2, 3, 14, 21)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[network.blocks[0].attention.qkv.weight]
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "step": (), "rows": (3, 1, 2, 48), "columns": (3, 96, 2, 1), "momentum": (288, 96),
    }  # fmt: skip
    assert state["momentum"].dtype == torch.bfloat16
    assert optimizer.state[network.blocks[0].attention.out.weight]["rows"].shape == (1, 2, 48, 1)
    assert set(optimizer.state[network.patches.projection.weight]) == {"step", "square", "momentum"}
