"""Tests of the images that summaries look at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.analysis.test_comparison import bundle_of
from tests.make import encode
from vitrail.analysis.samples import answer_about, in_batches, inputs_of, picture_of
from vitrail.analysis.similarity import layer_similarity
from vitrail.evaluation.metrics.classes import per_sample


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


def test_pictures_and_their_relevance_need_little_memory() -> None:
    bundle, photo = bundle_of(), Image.new("RGB", (3000, 1000), "red")
    image = encode(photo, "PNG")
    judged = per_sample(np.array([[0.0, 1.0, 0.0]]), np.array([0]))
    assert picture_of(image).shape == (160, 480, 3)
    relevance = answer_about(bundle, image, judged, 0).relevance
    assert relevance is not None and relevance.shape == (160, 480)


@pytest.mark.parametrize(("images", "sizes"), [(64, [16] * 4), (20, [10, 10]), (19, [10, 9]), (4, [4])])
def test_batches_for_cka_have_every_image_once(images: int, sizes: list[int]) -> None:
    batches = [*in_batches(torch.arange(float(images))[:, None, None, None])]
    assert [len(batch) for batch in batches] == sizes
    assert sorted(torch.cat(batches).ravel().tolist()) == list(range(images))


def test_the_similarity_of_layers_does_not_depend_on_the_order_of_the_data() -> None:
    random = torch.Generator().manual_seed(0)
    colours = torch.randn(4, 3, 1, 1, generator=random)
    images = colours.repeat_interleave(16, dim=0) + 0.3 * torch.randn(64, 3, 12, 8, generator=random)  # class by class
    first, second = bundle_of(seed=3).network, bundle_of(seed=4).network
    expected = layer_similarity(first, [images], second).values
    found = layer_similarity(first, in_batches(images), second).values
    assert np.abs(found - expected).max() < 0.1
