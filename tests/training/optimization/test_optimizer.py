"""Which weights decay, and single steps against the formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.models.variants import create
from vitrail.training.optimization.layers import choose_weights
from vitrail.training.optimization.optimizer import OptimizerConfig, make_optimizer, split_by_decay
from vitrail.training.start import StartConfig


class Pair(nn.Module):
    """A weight that decays and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, 3, bias=False)
        self.linear.weight.data = torch.randn(3, 4, generator=generator)
        self.token = nn.Parameter(torch.randn(5, generator=generator))

    def set_gradients(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return [parameter.grad.double().clone() for parameter in self.both() if parameter.grad is not None]

    def both(self) -> list[nn.Parameter]:
        return [self.linear.weight, self.token]


def test_weights_of_linear_layers_decay_and_nothing_else() -> None:
    network = create(
        "ViT-Pico/7", image_size=(14, 14), channels=1, num_classes=3, width=8, depth=2, heads=2, head_hidden=6
    )
    decayed, plain = ({id(p) for p in group} for group in split_by_decay(network))
    names = dict(network.named_parameters())
    blocks = [f"blocks.{block}.{name}" for block in (0, 1) for name in (
        "attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")]  # fmt: skip
    expected = {"patches.projection.weight", *blocks, "head_hidden.weight", "head.weight"}
    assert {name for name, parameter in names.items() if id(parameter) in decayed} == expected
    assert {name for name, parameter in names.items() if id(parameter) in plain} == set(names) - expected
    assert {"prefix.cls", "positions.embedding", "norm.weight", "blocks.0.norm1.weight", "head.bias"} <= set(names)


@pytest.mark.parametrize("name", ["Conv+ViT-Pico/8", "R26+ViT-Ti/32", "BiT-R26x1"])
def test_weights_of_convolutions_decay_too(name: str) -> None:
    with torch.device("meta"):
        network = create(name, image_size=64, num_classes=3)
    decayed, plain = ({id(p) for p in group} for group in split_by_decay(network))
    names = dict(network.named_parameters())
    assert decayed | plain == {id(parameter) for parameter in names.values()} and not decayed & plain
    for path, parameter in names.items():
        kernel = path.endswith("weight") and parameter.ndim > 1
        assert (id(parameter) in decayed) == kernel, path
    assert any(parameter.ndim == 4 for parameter in names.values())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_weight_is_optimised_once(optimizer: str) -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), channels=1, num_classes=3, width=8, depth=1, heads=2)
    made = make_optimizer(network, OptimizerConfig(kind=optimizer, weight_decay=0.3))  # type: ignore[arg-type]
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(network.parameters()))
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.0]


def test_adamw_is_the_formula() -> None:
    rate, decay, beta1, beta2, epsilon = 0.03, 0.2, 0.8, 0.95, 1e-8
    module = Pair()
    config = OptimizerConfig(learning_rate=rate, weight_decay=decay, beta1=beta1, beta2=beta2)
    optimizer = make_optimizer(module, config)
    expected = [parameter.detach().double().clone() for parameter in module.both()]
    means, squares = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    for step in (1, 2):
        gradients = module.set_gradients(step)
        optimizer.step()
        for index, (gradient, factor) in enumerate(zip(gradients, (decay, 0.0), strict=True)):
            means[index] = beta1 * means[index] + (1 - beta1) * gradient
            squares[index] = beta2 * squares[index] + (1 - beta2) * gradient**2
            mean, square = means[index] / (1 - beta1**step), squares[index] / (1 - beta2**step)
            expected[index] = expected[index] * (1 - rate * factor) - rate * mean / (square.sqrt() + epsilon)
        for parameter, value in zip(module.both(), expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-6, atol=1e-7)


def test_sgd_with_momentum_is_the_formula() -> None:
    rate, decay, momentum = 0.1, 0.2, 0.7
    module = Pair()
    config = OptimizerConfig(kind="sgd", learning_rate=rate, weight_decay=decay, momentum=momentum)
    optimizer = make_optimizer(module, config)
    expected = [parameter.detach().double().clone() for parameter in module.both()]
    velocities = [torch.zeros_like(p) for p in expected]
    for step in (1, 2):
        gradients = module.set_gradients(step)
        optimizer.step()
        for index, (gradient, factor) in enumerate(zip(gradients, (decay, 0.0), strict=True)):
            velocities[index] = momentum * velocities[index] + gradient + factor * expected[index]
            expected[index] = expected[index] - rate * velocities[index]
        for parameter, value in zip(module.both(), expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("name", "sizes", "depth"), [
    ("ViT-Pico/7", {"image_size": (14, 21), "width": 8, "depth": 3, "heads": 2}, 3),
    ("BiT-R26x1", {"image_size": (33, 40), "width": 32}, 8),
], ids=["ViT", "BiT"])  # fmt: skip
def test_layer_decay_scales_by_depth(name: str, sizes: dict[str, Any], depth: int, optimizer: str) -> None:
    network = create(name, num_classes=3, **sizes)
    numbers = network.layers().numbers()
    made = make_optimizer(network, OptimizerConfig(kind=optimizer, layer_decay=0.65))  # type: ignore[arg-type]
    seen = {}
    for group in made.param_groups:
        assert group["params"]
        for parameter in group["params"]:
            seen[id(parameter)] = group["scale"], group["weight_decay"]
    decayed = {id(parameter) for parameter in split_by_decay(network)[0]}
    assert set(seen) == set(numbers)
    for parameter, (scale, decay) in seen.items():
        assert scale == pytest.approx(0.65 ** (depth + 1 - numbers[parameter]), rel=1e-12)
        assert (decay > 0) == (parameter in decayed)
    assert seen[id(network.head.weight)][0] == 1.0
    assert seen[id(next(network.parameters()))][0] == pytest.approx(0.65 ** (depth + 1))


def test_without_layer_decay_there_are_two_groups() -> None:
    made = make_optimizer(Pair(), OptimizerConfig())
    assert [(group["scale"], len(group["params"])) for group in made.param_groups] == [(1.0, 1), (1.0, 1)]


def test_adapters_decay_and_what_is_not_trained_is_left_out() -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), num_classes=3, width=8, depth=2, heads=2)
    choose_weights(network, StartConfig(init="m", lora_rank=2))
    decayed, plain = split_by_decay(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    factors = {f"blocks.{block}.attention.qkv.adapter.{factor}" for block in (0, 1) for factor in "ab"}
    assert {names[id(parameter)] for parameter in decayed} == {*factors, "head.weight"}
    assert {names[id(parameter)] for parameter in plain} == {"head.bias"}
