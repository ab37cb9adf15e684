"""Which weights decay and by which rule, factors by name, and single steps against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from vitrail.errors import ConfigError
from vitrail.models.variants import create
from vitrail.tasks.classification import ClassificationObjective
from vitrail.training.config import StartConfig
from vitrail.training.optimizer import (
    DecayRule,
    OptimizerConfig,
    OptimizerName,
    check_names,
    factor_of,
    factor_problems,
    make_optimizer,
    split_by_decay,
)
from vitrail.training.start import choose_weights
from vitrail.training.update_rules import MomentumFormat


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


@pytest.mark.parametrize("name", ["ViT-Pico/8", "Conv+ViT-Pico/8", "R26+ViT-Ti/32", "BiT-R26x1"])
def test_weights_of_linear_layers_and_convolutions_decay_and_nothing_else(name: str) -> None:
    with torch.device("meta"):
        network = create(name, image_size=64, num_classes=3, **({"head_hidden": 6} if name == "ViT-Pico/8" else {}))
    decayed, plain = ({id(p) for p in group} for group in split_by_decay(network))
    names = dict(network.named_parameters())
    assert decayed | plain == {id(parameter) for parameter in names.values()} and not decayed & plain
    for path, parameter in names.items():
        kernel = path.endswith("weight") and parameter.ndim > 1
        assert (id(parameter) in decayed) == kernel, path


def test_weights_of_other_layers_of_pytorch_decay_once() -> None:
    network = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8), nn.ConvTranspose2d(2, 3, 2), nn.Conv1d(2, 3, 1), nn.Linear(4, 4),
        nn.Linear(4, 4), nn.Embedding(3, 4), weight_norm(nn.Linear(4, 4)),
    )  # fmt: skip
    network[4].weight = network[3].weight
    decayed, plain = split_by_decay(network)
    names = {parameter: name for name, parameter in network.named_parameters()}
    attention = ("0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight", "0.linear1.weight", "0.linear2.weight")
    assert [names[one] for one in decayed] == [*attention, "1.weight", "2.weight", "3.weight"]
    assert sorted(map(names.get, (*decayed, *plain))) == sorted(names.values())


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_every_weight_is_optimised_once(optimizer: OptimizerName) -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), channels=1, num_classes=3, width=8, depth=1, heads=2)
    made = make_optimizer(network, OptimizerConfig(kind=optimizer, weight_decay=0.3))
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(network.parameters()))
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_a_gradient_of_zero_moves_nothing(optimizer: OptimizerName) -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), num_classes=3, width=40, depth=1, heads=2)
    made = make_optimizer(network, OptimizerConfig(kind=optimizer, weight_decay=0.0), "bf16")
    before = [parameter.detach().clone() for parameter in network.parameters()]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    assert all(torch.equal(one, old) for one, old in zip(network.parameters(), before, strict=True))


RULES = get_args(DecayRule)
USUAL = {"adamw": "decoupled", "sgd": "coupled", "adafactor": "decoupled"}
"""The rules of weight decay that "auto" means."""


def decays(rule: str, usual: str, rate: float, decay: float) -> tuple[float, float]:
    """The factor of the weight that is added to the gradient, and the one that is subtracted from the weight."""
    chosen = usual if rule == "auto" else rule
    return (decay, 0.0) if chosen == "coupled" else (0.0, decay if chosen == "independent" else rate * decay)


def check_steps(config: OptimizerConfig, update: Callable[[int, int, Tensor], Tensor], tolerance: float) -> None:
    """Compare three steps with a formula of the update of a weight, from its index, the step from 1 and the gradient.

    The third step has half of the learning rate.
    """
    module, peak = Pair(), config.learning_rate
    optimizer = make_optimizer(module, config)
    expected = [parameter.detach().double().clone() for parameter in module.both()]
    for step in (1, 2, 3):
        course = 1.0 if step < 3 else 0.5
        for group in optimizer.param_groups:
            group["lr"] = peak * course * group["scale"]
        gradients = module.set_gradients(step)
        optimizer.step()
        for index, (gradient, factor) in enumerate(zip(gradients, (config.weight_decay, 0.0), strict=True)):
            rule = config.weight_decay_rule
            added, subtracted = decays(rule, USUAL[config.kind], peak * course, factor)
            if rule == "independent":
                subtracted *= course
            moved = peak * course * update(index, step, gradient + added * expected[index])
            expected[index] = expected[index] * (1 - subtracted) - moved
        for parameter, value in zip(module.both(), expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=tolerance, atol=tolerance)


def stored(values: Tensor, form: str) -> Tensor:
    """Numbers as they are after they were stored in a format."""
    return values.bfloat16().double() if form == "bfloat16" else values


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_adamw_is_the_formula(rule: DecayRule, form: MomentumFormat) -> None:
    beta1, beta2, epsilon = 0.8, 0.95, 1e-8
    means: dict[int, Any] = {0: 0.0, 1: 0.0}
    squares: dict[int, Any] = {0: 0.0, 1: 0.0}

    def update(index: int, step: int, gradient: Tensor) -> Tensor:
        kept = 0.80078125 if form == "bfloat16" else beta1
        mean = kept * means[index] + (1 - beta1) * gradient
        means[index] = stored(mean, form)
        squares[index] = beta2 * squares[index] + (1 - beta2) * gradient**2
        return mean / (1 - beta1**step) / ((squares[index] / (1 - beta2**step)).sqrt() + epsilon)

    config = OptimizerConfig(
        learning_rate=0.03, weight_decay=0.2, weight_decay_rule=rule, beta1=beta1, beta2=beta2, momentum_format=form
    )
    check_steps(config, update, 1e-6 if form == "float32" else 1e-5)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_sgd_with_momentum_is_the_formula(rule: DecayRule, form: MomentumFormat) -> None:
    velocities: dict[int, Any] = {0: 0.0, 1: 0.0}

    def update(index: int, step: int, gradient: Tensor) -> Tensor:
        velocity = (0.69921875 if form == "bfloat16" else 0.7) * velocities[index] + gradient
        velocities[index] = stored(velocity, form)
        return velocity

    config = OptimizerConfig(
        kind="sgd", learning_rate=0.1, weight_decay=0.2, weight_decay_rule=rule, momentum=0.7, momentum_format=form
    )
    check_steps(config, update, 1e-6)


def test_independent_decay_does_not_depend_on_any_learning_rate() -> None:
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=3, width=8, depth=3, heads=2)
    factors = ("head.*=10",)
    config = OptimizerConfig(
        learning_rate=0.02, weight_decay=0.1, weight_decay_rule="independent", layer_decay=0.5,
        learning_rate_factors=factors,
    )  # fmt: skip
    groups = make_optimizer(network, config.for_batch_size(64)).param_groups
    assert {group["scale"] for group in groups} == {10.0, 1.0, 0.5, 0.25, 0.125, 0.0625}
    for group in groups:
        assert group["weight_decay"] * group["scale"] * 0.02 in (0.0, pytest.approx(0.1))


def test_the_weight_decay_follows_a_cosine_to_its_end() -> None:
    config = OptimizerConfig(weight_decay=0.04, end_weight_decay=0.4)
    decays = [0.04 * config.decay_factor(step, 10) for step in (0, 5, 10)]
    assert decays == pytest.approx([0.04, 0.22, 0.4]) and OptimizerConfig().decay_factor(3, 10) == 1
    groups = make_optimizer(Pair(), config).param_groups
    assert [group["first_weight_decay"] for group in groups] == [0.04, 0]
    assert not any("first_weight_decay" in group for group in make_optimizer(Pair(), OptimizerConfig()).param_groups)
    with pytest.raises(ConfigError, match=r"end_weight_decay=0.4 changes the weight decay, but weight_decay=0"):
        OptimizerConfig(weight_decay=0.0, end_weight_decay=0.4)


def test_factors_by_name_choose_groups() -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), num_classes=3, width=8, depth=2, heads=2)
    objective = ClassificationObjective(network)
    config = OptimizerConfig(
        weight_decay=0.2,
        learning_rate_factors=(r"head\.weight=3", "(head|norm).*=2"),
        weight_decay_factors=("positions.*=0.5", r".*blocks\.1.*qkv\.weight=1", r"head\.weight=0"),
    )
    assert check_names(objective, config) == check_names(network, config) == ()
    groups = make_optimizer(objective, config).param_groups
    names = {id(weight): name for name, weight in network.named_parameters()}
    found = {names[id(one)]: (group["scale"], group["weight_decay"]) for group in groups for one in group["params"]}
    assert set(found) == set(names.values())
    special = {
        "head.weight": (3.0, 0.0), "head.bias": (2.0, 0.0), "norm.weight": (2.0, 0.0), "norm.bias": (2.0, 0.0),
        "positions.embedding": (1.0, 0.1), "blocks.1.attention.qkv.weight": (1.0, 0.2),
    }  # fmt: skip
    assert {name: values for name, values in found.items() if values != (1.0, 0.0)} == special


def test_a_pattern_of_frozen_weights_is_noted() -> None:
    network = create("ViT-Pico/7", num_classes=2, image_size=14, width=16, depth=2, heads=2, mlp_width=16)
    network.blocks[0].requires_grad_(False)
    config = OptimizerConfig(learning_rate_factors=(r"blocks\.0\..*=2", r"blocks\..*=3"))
    (note,) = check_names(network, config)
    assert "=2" in note and "not trained" in note


def test_a_pattern_without_a_weight_is_named() -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), num_classes=3, width=8, depth=1, heads=2)
    for fields, start in (
        ({"learning_rate_factors": ("head.*=10", "haed.*=10")}, r"learning_rate_factors='haed\.\*=10'"),
        ({"weight_decay_factors": ("x=1",)}, "weight_decay_factors='x=1'"),
        ({"learning_rate_factors": (".*=1", "head.*=10")}, r"learning_rate_factors='head\.\*=10'"),
    ):
        with pytest.raises(ConfigError, match=f"^{start} matches no weight that no .* patches.projection.weight"):
            check_names(network, OptimizerConfig(**fields))


def test_layer_decay_is_that_of_mae_and_beit() -> None:
    """Scales that `get_layer_id_for_vit` of facebookresearch/mae (efb2a80) and `get_num_layer_for_vit` of
    microsoft/unilm (beit, 768a3c8) give to these weights of three blocks. BEiT's code gives the full rate to a table
    of relative positions that blocks share, which `learning_rate_factors` can say."""
    fields = {"image_size": (32, 48), "width": 8, "depth": 3, "heads": 2, "num_classes": 3, "pool": "gap"}
    network = create("ViT-B/16", **fields, class_token=True, positions="relative-bias-class", positions_at="shared")
    factor = f"positions\\..*={0.65**-4}"
    made = make_optimizer(network, OptimizerConfig(layer_decay=0.65, learning_rate_factors=(factor,)))
    scales = {id(weight): group["scale"] for group in made.param_groups for weight in group["params"]}
    found = {name: scales[id(weight)] for name, weight in network.named_parameters()}
    for name, scale in {
        "prefix.cls": 0.17850625, "patches.projection.weight": 0.17850625, "blocks.0.attention.qkv.weight": 0.274625,
        "blocks.1.mlp.up.bias": 0.4225, "blocks.2.norm1.weight": 0.65, "norm.weight": 1.0, "head.weight": 1.0,
        "positions.bias": 1.0, "positions.class_bias": 1.0,
    }.items():  # fmt: skip
        assert found[name] == pytest.approx(scale, rel=1e-12), name


def test_adapters_decay_and_what_is_not_trained_is_left_out() -> None:
    network = create("ViT-Pico/7", image_size=(14, 14), num_classes=3, width=8, depth=2, heads=2)
    choose_weights(network, StartConfig(init="m", lora_rank=2))
    decayed, plain = split_by_decay(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    factors = {f"blocks.{block}.attention.qkv.adapter.{factor}" for block in (0, 1) for factor in "ab"}
    assert {names[id(parameter)] for parameter in decayed} == {*factors, "head.weight"}
    assert {names[id(parameter)] for parameter in plain} == {"head.bias"}


@pytest.mark.parametrize(
    ("weight", "factor"),
    [("head.weight", 10.0), ("head", 0.5), ("blocks.0.mlp.up.bias", 0.0), ("a=b", 3.0), ("norm.bias", 7.0)],
)
def test_the_first_pattern_that_matches_the_whole_name_counts(weight: str, factor: float) -> None:
    factors = (r"head\..*=10", "hea.=0.5", r"blocks\..*=0", "a=b=3")
    assert factor_of(weight, factors, otherwise=7.0) == factor


@pytest.mark.parametrize("text", ["head", "head=", "head=ten", "(head=1", "head=-1", "head=nan", "head=inf", ""])
@pytest.mark.parametrize(("zero", "rule"), [(False, "above 0"), (True, "at least 0")])
def test_what_is_no_factor_is_named(text: str, zero: bool, rule: str) -> None:
    """A factor of zero is for the weight decay only."""
    assert len(list(factor_problems("some_factors", (".*=0",), zero=zero))) == (0 if zero else 1)
    (problem,) = factor_problems("some_factors", ("norm=2", text), zero=zero)
    assert problem.startswith(f"some_factors={text!r} is not PATTERN=FACTOR, a regular expression") and rule in problem
