"""Tests of contrastive learning: the loss against its formula, fixed views, monitors of collapse, unfit settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tasks.images import batch_of, images_of
from tests.tasks.objectives import measured, small_network
from vitrail.data.batch import Batch
from vitrail.processes.group import Processes
from vitrail.tasks.contrast import SimClr, SimClrObjective
from vitrail.tasks.unlabelled import effective_rank, fixed_views, uniformity


def two_views(samples: int, valid: list[bool] | None = None) -> Batch:
    """Return a batch with two random views of each sample, in consecutive rows."""
    whole = batch_of(images_of(2 * samples))
    decoded = torch.tensor(valid or [True] * samples).repeat_interleave(2)
    return replace(whole, valid=decoded, samples=whole.samples // 2, views=whole.samples % 2)


def make_objective(task: SimClr | None = None, variant: str = "ViT-Pico/7") -> SimClrObjective:
    return SimClrObjective(small_network(variant), task or SimClr())


@torch.no_grad()
def vectors_of(objective: SimClrObjective, images: Tensor, counted: list[bool]) -> Tensor:
    """Return the projected vectors of views in consecutive rows."""
    mask = torch.tensor(counted).repeat_interleave(2)
    return objective.projection(objective.network.embed(images), mask, Processes())


def formula(vectors: Tensor, rows: list[int], temperature: float) -> tuple[float, float]:
    """Return the mean loss of the images of these rows, in float64 from the paper's equation 1, and the accuracy."""
    losses, hits = [], []
    points = [row / row.norm() for row in vectors.double()]
    for i in rows:
        likeness = {k: math.exp(float(points[i] @ points[k]) / temperature) for k in rows if k != i}
        partner = i + 1 if i % 2 == 0 else i - 1
        losses.append(-math.log(likeness[partner] / sum(likeness.values())))
        hits.append(float(max(likeness, key=lambda k: likeness[k]) == partner))
    return 2 * sum(losses) / len(losses), sum(hits) / len(hits)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_the_loss_is_the_formula(temperature: float) -> None:
    objective = make_objective(SimClr(contrast_temperature=temperature))
    valid = [True, False, True, True, True]
    batch = two_views(5, valid)
    output = objective(batch)
    vectors = vectors_of(objective, batch.images, valid)
    loss, right = formula(vectors, [0, 1, 4, 5, 6, 7, 8, 9], temperature)
    assert output.loss.item() == pytest.approx(loss, rel=1e-4)
    assert output.metrics["contrast_accuracy"].item() == pytest.approx(right)


def test_an_image_alone_has_no_loss_and_no_image_is_no_error() -> None:
    objective = make_objective()
    assert objective(two_views(1)).loss.item() == 0
    output = objective(two_views(2, [False, False]))
    output.loss.backward()
    assert output.loss.item() == 0 and not any(weight.grad.abs().any() for weight in objective.projection.parameters())


def test_fixed_views_depend_on_the_sample_alone() -> None:
    images = images_of(4)
    first, second = fixed_views(images, torch.tensor([3, 0, 9, 3]))
    again, _ = fixed_views(images[2:], torch.tensor([9, 3]))
    torch.testing.assert_close(first[2:], again)
    assert first.shape == images.shape and not torch.equal(first, second)
    ramp = torch.linspace(-1, 1, 28).expand(2, 3, 21, 28)
    usual, mirrored = fixed_views(ramp, torch.tensor([0, 1]))
    assert (usual.diff(dim=3) >= -1e-6).all() and (mirrored.diff(dim=3) <= 1e-6).all(), "the second view is mirrored"
    for view in (usual, mirrored):
        span = (view.amax(dim=(1, 2, 3)) - view.amin(dim=(1, 2, 3))) / 2
        assert (span > 0.25).all() and (span < 1.01).all(), "the box has 30 to 100 % of the sides"


def test_metrics_of_held_out_images_are_the_formulas() -> None:
    objective = make_objective().eval()
    found, views, images = measured(objective)
    with torch.no_grad():
        vectors, whole = vectors_of(objective, views, [True] * 7), objective.network.embed(images)
    loss, right = formula(vectors, list(range(14)), 0.1)
    assert found["contrast_loss"] == pytest.approx(loss, rel=1e-4)
    assert found["contrast_accuracy"] == pytest.approx(right)
    assert found["uniformity"] == pytest.approx(uniformity(whole), rel=1e-3)
    assert found["feature_rank"] == pytest.approx(effective_rank(whole), rel=1e-3)


def test_monitors_see_a_collapse() -> None:
    generator = torch.Generator().manual_seed(0)
    spread, equal = torch.randn(500, 32, generator=generator), torch.ones(500, 32)
    line = torch.randn(500, 1, generator=generator) * torch.randn(32, generator=generator)
    assert uniformity(equal) == pytest.approx(0, abs=1e-9) and effective_rank(equal) == 0
    assert uniformity(spread) < -3.5 and 28 < effective_rank(spread) <= 32
    assert effective_rank(line) == pytest.approx(1, abs=1e-6) and uniformity(line) > -1
    axes = torch.cat([torch.eye(4), -torch.eye(4)])
    assert effective_rank(axes) == pytest.approx(4)
    assert uniformity(axes[[0, 4]]) == pytest.approx(-8), "opposite points have the distance 2"
    assert uniformity(axes[:1]) == 0
