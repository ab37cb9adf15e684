"""Tests of the images that summaries look at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analysis.test_comparison import bundle_of
from tests.make import encode
from vitrail.analysis.samples import in_batches, inputs_of, picture_of


def test_inputs_are_files_or_pixels_and_can_be_written_to() -> None:
    """PyTorch warns of arrays that are not writable, which is an error in tests."""
    bundle = bundle_of(size=(12, 8))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    file = encode(pixels, "PNG")
    alone, both = inputs_of(bundle, [pixels]), inputs_of(bundle, iter([pixels, file]))
    assert alone.shape == (1, 3, 12, 8)
    assert torch.equal(both[0], both[1]) and torch.equal(both[0], alone[0])
    assert np.array_equal(picture_of(file), pixels)


@pytest.mark.parametrize(("images", "sizes"), [(20, [16, 4]), (19, [16]), (3, [])])
def test_batches_that_are_too_small_for_cka_are_left_out(images: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in in_batches(torch.zeros(images, 1, 1, 1))] == sizes
