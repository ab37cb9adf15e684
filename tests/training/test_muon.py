"""Muon against its published update in float64 and torch's own, and which weights are orthogonalised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitrail.models.resnet_config import RootConfig
from vitrail.models.variants import create
from vitrail.tasks.classification import ClassificationObjective
from vitrail.training import update_rules as muon
from vitrail.training.config import StartConfig
from vitrail.training.optimizer import OptimizerConfig, make_optimizer
from vitrail.training.start import choose_weights
from vitrail.training.update_rules import orthogonalised, stacks_of

SIZES: dict[str, Any] = {"image_size": (14, 21), "num_classes": 3, "width": 12, "depth": 2, "heads": 2, "mlp_width": 20}


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """The published iteration in float64 on the singular values, which is how it acts on a matrix."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / max(float(np.sqrt((values**2).sum())), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    result: np.ndarray = left @ np.diag(values) @ right
    return result


def given(network: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 7, 31), (2, 31, 7)], ids=str)
def test_singular_values_are_brought_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 40
    found = orthogonalised(matrices)
    expected = torch.from_numpy(np.stack([newton_schulz(one) for one in matrices.double().numpy()]))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    assert ((values := torch.linalg.svdvals(found)) > 0.6).all() and (values < 1.3).all()
    rounded = orthogonalised(matrices, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), expected, rtol=0, atol=0.06)


@pytest.mark.parametrize(
    ("rule", "form"), [("decoupled", "float32"), ("independent", "bfloat16"), ("coupled", "float32")]
)
def test_steps_of_matrices_are_the_formula(form: Any, rule: Any) -> None:
    network = create("ViT-Pico/7", **SIZES)
    config = OptimizerConfig(
        kind="muon", learning_rate=0.02, weight_decay=0.3, weight_decay_rule=rule, momentum=0.8, momentum_format=form,
        layer_decay=0.5,
    )  # fmt: skip
    optimizer = make_optimizer(network, config)
    names = ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]
    weights = {
        (block, name): network.blocks[block].get_submodule(name).get_parameter("weight")
        for block in (0, 1)
        for name in names
    }
    expected = {key: weight.detach().double().numpy() for key, weight in weights.items()}
    means = {key: np.zeros_like(value) for key, value in expected.items()}
    for step in (1, 2, 3):
        given(network, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * group["scale"] / step  # the course of a schedule
        optimizer.step()
        for (block, name), weight in weights.items():
            key, rate = (block, name), 0.02 * (0.25, 0.5)[block] / step
            assert weight.grad is not None
            gradient, old = weight.grad.double().numpy(), expected[block, name]
            gradient = gradient + (0.3 * old if rule == "coupled" else 0)
            mean = 0.8 * means[key] + 0.2 * gradient
            means[key] = torch.from_numpy(mean).bfloat16().double().numpy() if form == "bfloat16" else mean
            mixed = 0.8 * mean + 0.2 * gradient
            parts = np.split(mixed, 3 if name == "attention.qkv" else 1)
            moved = np.concatenate([newton_schulz(part) * 0.2 * max(part.shape) ** 0.5 for part in parts])
            decay = {"coupled": 0.0, "decoupled": rate * 0.3, "independent": 0.3 / step}[rule]
            expected[key] = old * (1 - decay) - rate * moved
            found = weight.detach().double().numpy()
            np.testing.assert_allclose(found, expected[key], rtol=0, atol=3e-6 if form == "float32" else 3e-5)


@pytest.mark.parametrize("coupled", [False, True])
def test_other_weights_take_the_steps_of_adam(coupled: bool) -> None:
    rule: Any = "coupled" if coupled else "decoupled"
    updated: dict[str, dict[str, Tensor]] = {}
    for kind in ("muon", "adamw"):
        torch.manual_seed(0)
        network = create("ViT-Pico/7", **SIZES)
        config = OptimizerConfig(kind=kind, weight_decay=0.1, weight_decay_rule=rule, beta2=0.9)  # type: ignore[arg-type]
        optimizer = make_optimizer(network, config)
        for step in range(3):
            given(network, step)
            optimizer.step()
        updated[kind] = {name: weight.detach() for name, weight in network.named_parameters()}
    matrices = {name for name, weight in network.named_parameters() if id(weight) in stacks_of(network)}
    same = {name for name, weight in updated["muon"].items() if torch.equal(weight, updated["adamw"][name])}
    assert same == set(updated["muon"]) - matrices and len(matrices) == 8


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, {"attention.qkv": (3, 12, 12), "attention.out": (1, 12, 12), "mlp.up": (1, 20, 12), "mlp.down": (1, 12, 20)}),
    ({"activation": "swiglu", "pool": "map", "head_hidden": 5},
     {"attention.qkv": (3, 12, 12), "attention.out": (1, 12, 12), "mlp.up": (2, 20, 12), "mlp.down": (1, 12, 20)}),
], ids=["GELU", "SwiGLU"])  # fmt: skip
def test_the_matrices_of_blocks_are_chosen(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    network = create("ViT-Pico/7", **SIZES, **fields)
    stacks = stacks_of(ClassificationObjective(network))
    found = {name: stacks[id(weight)] for name, weight in network.named_parameters() if id(weight) in stacks}
    assert found == {f"blocks.{block}.{path}.weight": stack for block in (0, 1) for path, stack in expected.items()}


@pytest.mark.parametrize("fields", [{}, {"root": RootConfig(depths=(1,), width=32)}], ids=["small", "published"])
def test_residual_units_below_the_blocks_of_a_hybrid_are_matrices(fields: dict[str, Any]) -> None:
    network = create("RPico+ViT-Pico/8", image_size=(16, 24), width=12, depth=1, heads=3, mlp_width=20, **fields)
    stacks = stacks_of(ClassificationObjective(network))
    found = {name: stacks[id(weight)] for name, weight in network.named_parameters() if id(weight) in stacks}
    inside = ("root.stages.", "blocks.")
    assert {*found} == {name for name, one in network.named_parameters() if one.ndim > 1 and name.startswith(inside)}
    kernels = {name: weight for name, weight in network.named_parameters() if name in found and weight.ndim == 4}
    assert kernels and all(found[name] == (1, len(one), one[0].numel()) for name, one in kernels.items())


def test_the_factors_of_an_adapter_are_matrices_of_their_own() -> None:
    network = create("ViT-Pico/7", **SIZES)
    choose_weights(network, StartConfig(init="m", lora_rank=2))
    optimizer = make_optimizer(network, OptimizerConfig(kind="muon", learning_rate=0.1, weight_decay=0.0))
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    network(torch.randn(2, 3, 14, 21)).square().sum().backward()
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    adapter = network.blocks[0].attention.qkv.adapter
    moved = adapter.a.detach() - before["blocks.0.attention.qkv.adapter.a"]
    assert moved.shape == (2, 2, 12)
    values = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 12**0.5)
    assert (values > 0.6).all() and (values < 1.3).all()
    assert torch.equal(network.blocks[0].mlp.up.weight, before["blocks.0.mlp.up.weight"])


def test_large_stacks_are_divided_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[dict[str, Tensor]] = []
    for limit in (muon.STACK_ELEMENTS, 300):
        monkeypatch.setattr(muon, "STACK_ELEMENTS", limit)
        torch.manual_seed(0)
        network = create("ViT-Pico/7", **SIZES)
        optimizer = make_optimizer(network, OptimizerConfig(kind="muon"))
        given(network, 3)
        optimizer.step()
        results.append({name: weight.detach() for name, weight in network.named_parameters()})
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], rtol=0, atol=1e-7)
