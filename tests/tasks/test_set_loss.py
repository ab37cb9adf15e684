"""The loss of detection tokens is equal to that of transformers, and does not depend on how a batch is divided.

The matching is equal to the best of all orders of small tables, and to that of scipy for large ones.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.optimize import linear_sum_assignment

import vitrail
from tests.tasks.objectives import batch_of_boxes, check_parts
from vitrail.errors import ConfigError
from vitrail.tasks.detection import Detection, match, set_losses


def objective_of(tokens: int = 7, **settings: Any) -> Any:
    torch.manual_seed(0)
    network: Any = vitrail.create(
        "ViT-Pico/8", num_classes=3, image_size=(24, 40), head_kind="detection-tokens", depth=1, registers=tokens
    )
    task = Detection(**settings)
    task.check_network(network.config)
    return task.objectives["detection-tokens"](network.eval(), task)


@pytest.mark.parametrize("objects", [0, 4, 20])
def test_parts_of_a_batch_have_the_loss_of_the_whole(objects: int) -> None:
    """With and without objects, with more objects than tokens, and with an image that cannot be decoded."""
    objective = objective_of()
    batch = batch_of_boxes(5, objects)
    batch = replace(batch, valid=torch.arange(5) != 1)
    check_parts(objective, batch, parts=3, all_are_trained=False)
    assert objective.counted(batch)[1].tolist() == [0, 0]


def test_a_token_that_is_right_has_no_loss() -> None:
    truths, labels = torch.tensor([[0.1, 0.2, 0.4, 0.9], [0.5, 0.5, 0.5, 0.5]]), torch.tensor([1, 0])
    logits = torch.full((3, 3), -30.0)
    logits[[0, 1, 2], [0, 2, 1]] = 30.0
    boxes = torch.cat([truths[1:], torch.rand(1, 4), truths[:1]])
    outputs = torch.cat([boxes, logits], dim=1)
    # A box without an area overlaps nothing, not even itself.
    assert set_losses(outputs, truths, labels, 2.0).tolist() == pytest.approx([0, 2.0], abs=1e-5)


def test_settings_of_other_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="cells_per_object=5 has no effect on the head 'detection-tokens'"):
        objective_of(cells_per_object=5)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [1, 4, 20])
@pytest.mark.parametrize("tokens", [7, 30])
def test_the_library_has_the_same_loss(objects: int, tokens: int) -> None:
    pytest.importorskip("transformers")
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    objective, batch = objective_of(tokens), batch_of_boxes(5, objects, seed=3)
    with torch.no_grad():
        for parameter in objective.network.head.parameters():
            parameter *= 3
    assert batch.boxes is not None and batch.box_labels is not None
    outputs = objective.network(batch.images)
    corners, logits = outputs[..., :4], outputs[..., 4:]
    labels = []
    for boxes, numbers in zip(batch.boxes / torch.tensor([40, 24, 40, 24]), batch.box_labels, strict=True):
        starts, ends = boxes[numbers >= 0].split(2, dim=1)
        centres = torch.cat([(starts + ends) / 2, ends - starts], dim=1)
        labels.append({"class_labels": numbers[numbers >= 0], "boxes": centres})
    settings = SimpleNamespace(
        class_cost=1, bbox_cost=5, giou_cost=2, num_labels=3, eos_coefficient=0.1, auxiliary_loss=False,
        bbox_loss_coefficient=5, giou_loss_coefficient=2,
    )  # fmt: skip
    predicted = torch.cat([(corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]], dim=2)
    expected, parts, _ = ForObjectDetectionLoss(logits, labels, "cpu", predicted, settings)
    found = objective(batch)
    torch.testing.assert_close(found.loss.sum(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.metrics["class_loss"].sum(), parts["loss_ce"], rtol=1e-6, atol=1e-6)
    ours, theirs = (
        torch.autograd.grad(loss, [*objective.network.head.parameters()], retain_graph=True)
        for loss in (found.loss.sum(), expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


COSTS = st.integers(-4, 4) | st.floats(-1e4, 1e4, width=32)


@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(0, 5)), elements=COSTS))
def test_no_other_pairs_cost_less(table: np.ndarray) -> None:
    rows, columns = match(torch.from_numpy(table))
    assert len(rows) == len(columns) == min(table.shape)
    assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows)
    wide = table if table.shape[0] <= table.shape[1] else table.T
    best = min(
        sum(wide[row, column] for row, column in enumerate(order))
        for order in permutations(range(wide.shape[1]), wide.shape[0])
    )
    assert table[rows, columns].sum() == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("shape", [(60, 7), (50, 50), (30, 70)])
def test_large_tables_have_the_pairs_of_scipy(shape: tuple[int, int]) -> None:
    costs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, columns = match(costs)
    found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == list(zip(*(each.tolist() for each in linear_sum_assignment(costs.numpy())), strict=True))


def test_costs_that_are_not_finite_are_matched_last() -> None:
    nan, inf = float("nan"), float("inf")
    rows, columns = match(torch.tensor([[nan, 5.0, inf], [1.0, 2.0, -inf]]))
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 1), (1, 0)]
