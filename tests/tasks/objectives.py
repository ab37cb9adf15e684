"""Small networks, and checks of objectives, which the tests of several tasks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.tasks.images import batch_of, images_of
from vitrail.data.batch import Batch
from vitrail.models.variants import AnyNetwork, create
from vitrail.tasks.task import LossOutput, Objective

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
"""Settings of a small Vision Transformer."""


def small_network(variant: str = "ViT-Pico/7", *, size: tuple[int, int] = (21, 28), **fields: Any) -> AnyNetwork:
    """Return a small network with the same random weights in every call, without a head unless `num_classes` is
    given."""
    torch.manual_seed(0)
    sizes = SMALL if variant.startswith("ViT") else {}
    return create(variant, image_size=size, **{"num_classes": 0, **sizes, **fields})


def pixels_of(patches: Tensor, *, grid: tuple[int, int] = (3, 4), side: int = 7) -> Tensor:
    """Return a mask of images, with True for the pixels of these patches of each image."""
    rows, columns = grid
    mask = torch.zeros(len(patches), rows * columns, dtype=torch.bool).scatter(1, patches, True)
    return mask.view(-1, 1, rows, columns).repeat_interleave(side, 2).repeat_interleave(side, 3)


def check_gradients_of_parts(objective: Objective) -> None:
    """Check that the gradients of two parts of a batch add up to those of the batch, one of whose images cannot be
    decoded."""
    batch = replace(batch_of(images_of(5)), valid=torch.tensor([True, True, False, True, True]))
    objective(batch).loss.backward()
    expected = [parameter.grad.clone() for parameter in objective.parameters() if parameter.grad is not None]
    assert len(expected) == len(list(objective.parameters()))
    objective.zero_grad()
    for part in batch.chunks(2):
        (objective(part).loss * objective.counted(part).sum() / 4).backward()
    for parameter, gradient in zip(objective.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def overfit(objective: Objective, batch: Batch, *, steps: int, lr: float) -> tuple[float, LossOutput]:
    """Train an objective on one batch. Return the first loss, and the last output."""
    optimizer = torch.optim.Adam(objective.parameters(), lr=lr)
    first = objective(batch).loss.item()
    for _ in range(steps):
        optimizer.zero_grad()
        output = objective(batch)
        output.loss.backward()
        optimizer.step()
    return first, output
