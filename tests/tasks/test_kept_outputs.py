"""Tests of outputs that are computed once for each image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.make import randomised, small_config
from vitrail.tasks.kept_outputs import KeptOutputs


@pytest.mark.parametrize("is_bf16", [False, True])
def test_each_image_is_computed_once_and_as_if_it_were_alone(is_bf16: bool) -> None:
    network, seen = randomised(small_config()), []

    def compute(image: Tensor) -> Tensor:
        seen.append(image)
        return network.embed(image)

    x = torch.randn(7, 3, *network.config.image_size)
    x[5] = x[1]
    keep = KeptOutputs()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
        first, again = keep(x, compute), keep(x[[6, 1, 0]], compute)
        with torch.no_grad():
            alone = torch.cat([network.embed(image[None]) for image in x])
    assert len(seen) == 6 and not first.requires_grad
    assert torch.equal(first, alone) and torch.equal(again, alone[[6, 1, 0]])
