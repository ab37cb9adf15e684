"""Tests of the losses of DINO, iBOT and DINOv2 in float64.

The numbers are those of the published functions for the same inputs: `iBOTLoss` of bytedance/ibot (da316d8), and
`DINOLoss`, `iBOTPatchLoss` and `KoLeoLoss` of facebookresearch/dinov2 (b8931f7).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vitrail.processes.group import Processes
from vitrail.tasks.dino import koleo, patch_losses, sinkhorn_centre, view_losses

MASKS = torch.tensor(
    [[[1, 0, 0, 1], [0, 0, 0, 0]], [[1, 1, 1, 0], [0, 1, 0, 0]], [[0, 0, 0, 0], [1, 1, 0, 1]]], dtype=torch.bool
)
"""Masked patches of two views of three images."""


def wave(*shape: int, first: float) -> Tensor:
    return torch.sin(first + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64)).view(shape)


OWN, TAUGHT = wave(3, 3, 5, first=0.1), wave(3, 2, 5, first=0.2)
OWN_PATCHES, TAUGHT_PATCHES = wave(3, 2, 4, 5, first=0.3), wave(3, 2, 4, 5, first=0.4)


def test_the_losses_of_ibot() -> None:
    centre, of_patches = torch.linspace(-0.3, 0.3, 5).double(), torch.linspace(0.2, -0.2, 5).double()
    targets = ((TAUGHT - centre) / 0.055).softmax(dim=2)
    loss, entropy, divergence = view_losses(targets, (OWN / 0.1).log_softmax(dim=2))
    assert loss.mean().item() == pytest.approx(9.383606785038564, rel=1e-7)
    torch.testing.assert_close(entropy + divergence, loss)
    targets = ((TAUGHT_PATCHES - of_patches) / 0.055).softmax(dim=3).flatten(0, 1)
    found = patch_losses(targets, (OWN_PATCHES / 0.1).log_softmax(dim=3).flatten(0, 1), MASKS.flatten(0, 1))
    assert found.mean().item() == pytest.approx(0.28639045719068507, rel=1e-7)


def test_the_losses_of_dinov2() -> None:
    every = torch.ones(6, dtype=torch.bool)
    centre = sinkhorn_centre(TAUGHT.flatten(0, 1), every, 0.06, Processes())
    targets = ((TAUGHT - centre) / 0.06).softmax(dim=2)
    first = [
        0.0005087094840341696, 0.9697224942579283, 1.1184647385134978e-11, 2.868850353057556e-14, 0.02976879624682428,
    ]  # fmt: skip
    assert targets[0, 0].tolist() == pytest.approx(first, rel=1e-9)
    loss = view_losses(targets, (OWN / 0.1).log_softmax(dim=2))[0].mean()
    assert loss.item() == pytest.approx(10.030521770624588, rel=1e-12)
    masked, outputs = MASKS.flatten(), TAUGHT_PATCHES.flatten(0, 2)
    centre = sinkhorn_centre(outputs, masked, 0.06, Processes())
    targets = ((TAUGHT_PATCHES - centre) / 0.06).softmax(dim=3).flatten(0, 1)
    found = patch_losses(targets, (OWN_PATCHES / 0.1).log_softmax(dim=3).flatten(0, 1), MASKS.flatten(0, 1))
    assert found.mean().item() == pytest.approx(0.21078816760694577, rel=1e-12)


def test_sinkhorn_knopp_is_the_division_of_rows_and_columns() -> None:
    """Rows that are not counted change nothing, and no counted row gives no centre."""
    outputs, counted = wave(7, 4, first=0.6), torch.tensor([True, True, False, True, True, True, False])
    matrix = torch.exp(outputs[counted] / 0.2)
    for _ in range(3):
        matrix = matrix / matrix.sum(dim=0)
        matrix = matrix / matrix.sum(dim=1, keepdim=True)
    centre = sinkhorn_centre(outputs, counted, 0.2, Processes())
    torch.testing.assert_close(((outputs[counted] - centre) / 0.2).softmax(dim=1), matrix)
    assert not sinkhorn_centre(outputs, torch.zeros(7, dtype=torch.bool), 0.2, Processes()).any()


def test_koleo_is_the_logarithm_of_the_distance_of_the_nearest_neighbour() -> None:
    embeddings, every = wave(5, 2, 6, first=0.5), torch.ones(5, dtype=torch.bool)
    found = [koleo(embeddings[:, view], every).mean().item() for view in range(2)]
    assert found == pytest.approx([0.7558150310413178, 0.8413884202420414], rel=1e-12)
    counted = torch.tensor([True, True, False, True, True])
    torch.testing.assert_close(koleo(embeddings[:, 0], counted)[counted], koleo(embeddings[counted, 0], every[:4]))
