"""Tests of MoCo v3: the loss against its formula, the running mean, fixed patches, unfit settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.objectives import measured, shrink, small_network
from tests.tasks.test_simclr import two_views
from vitrail.processes.group import Processes
from vitrail.tasks.contrast import MoCo, MoCoObjective
from vitrail.tasks.task import Position

SMALL: dict[str, Any] = {"projection_hidden": 20, "projection_width": 12}


def make_objective(variant: str = "ViT-Pico/7", **settings: Any) -> MoCoObjective:
    return MoCoObjective(small_network(variant), MoCo(**{**SMALL, **settings}))


def formula(queries: Tensor, keys: Tensor, samples: list[int], temperature: float) -> tuple[float, float]:
    """Return the mean loss and accuracy of these samples, in float64 as in the paper's algorithm 1."""
    losses, hits = [], []
    for view in (0, 1):
        for sample in samples:
            q = queries[sample, view].double()
            likeness = {
                other: float(q @ keys[other, 1 - view].double() / (q.norm() * keys[other, 1 - view].double().norm()))
                for other in samples
            }
            exponents = {other: math.exp(value / temperature) for other, value in likeness.items()}
            losses.append(-2 * temperature * math.log(exponents[sample] / sum(exponents.values())))
            hits.append(float(max(likeness, key=lambda other: likeness[other]) == sample))
    return 2 * sum(losses) / len(losses), sum(hits) / len(hits)


@torch.no_grad()
def vectors_of(objective: MoCoObjective, images: Tensor, counted: list[bool]) -> tuple[Tensor, Tensor]:
    """Return queries and keys of views in consecutive rows, without scaling."""
    queries, keys, others = [], [], (torch.tensor(counted), Processes())
    for views in (images[::2], images[1::2]):
        queries.append(objective.predictor(objective.projection(objective.network.embed(views), *others), *others))
        keys.append(objective.teacher_projection(objective.teacher.embed(views), *others))
    return torch.stack(queries, dim=1), torch.stack(keys, dim=1)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_the_loss_is_the_formula(temperature: float) -> None:
    objective = make_objective(contrast_temperature=temperature)
    shrink(objective.teacher)
    valid = [True, False, True, True, True]
    batch = two_views(5, valid)
    output = objective(batch)
    loss, right = formula(*vectors_of(objective, batch.images, valid), [0, 2, 3, 4], temperature)
    assert output.loss.item() == pytest.approx(loss, rel=2e-5)
    assert output.metrics["contrast_accuracy"].item() == pytest.approx(right)


def test_the_running_mean_follows_the_network_but_not_the_predictor() -> None:
    objective, batch = make_objective(teacher_momentum=0.8), two_views(3)
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    optimizer = torch.optim.SGD([weight for weight in objective.parameters() if weight.requires_grad], lr=0.1)
    objective(batch).loss.backward()
    optimizer.step()
    objective.after_step(Position(step=5, steps=12, epoch=2.0), Processes())
    after = objective.state_dict()
    for name in before:
        if name.startswith(("network.", "projection.")):
            mean = name.replace("network.", "teacher.") if name.startswith("network.") else f"teacher_{name}"
            torch.testing.assert_close(after[mean], 0.9 * before[mean] + 0.1 * after[name])
            is_fixed = name.startswith("network.patches.")
            assert torch.equal(after[name], before[name]) is is_fixed, f"{name} is trained unless it is fixed"
    assert objective.saved_network() is objective.network


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ViT-Pico/7", "BiT-Pico"])
def test_patches_are_fixed_only_if_asked_and_only_in_transformers(variant: str) -> None:
    for is_fixed in (True, False):
        objective = make_objective(variant, fixed_patches=is_fixed).train()
        objective(two_views(3)).loss.backward()
        without = {name for name, weight in objective.network.named_parameters() if weight.grad is None}
        expected = {"patches.projection.weight", "patches.projection.bias"} if is_fixed and variant[0] == "V" else set()
        assert without == expected and not objective.teacher.training and objective.network.training


def test_metrics_of_held_out_images_are_the_formulas() -> None:
    objective = make_objective().eval()
    found, views, _ = measured(objective)
    loss, right = formula(*vectors_of(objective, views, [True] * 7), list(range(7)), 0.2)
    assert found["contrast_loss"] == pytest.approx(loss, rel=1e-4)
    assert found["contrast_accuracy"] == pytest.approx(right) and {"uniformity", "feature_rank"} <= found.keys()
