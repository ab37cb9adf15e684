"""Tests of the comparison of 8-bit integers with the network: which losses of accuracy are refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.serving.conftest import make_bundle
from vitrail.errors import ExportFailed
from vitrail.export.parity import Expected, compare_int8, undecided_drop
from vitrail.weights.exported import ExportedNetwork, Interface

IMAGES = 205


def outputs_of(images: np.ndarray, wrong: int) -> dict[str, np.ndarray]:
    """Return the outputs for images of one pixel, whose level is the number of the image. The first `wrong` images are
    classified wrongly."""
    rows = images.reshape(len(images)).astype(int)
    return {"logits": np.where(rows[:, None] < wrong, [[0.0, 1.0]], [[1.0, 0.0]]).astype(np.float32)}


def file_of(wrong: int) -> ExportedNetwork:
    bundle, run = make_bundle(), partial(outputs_of, wrong=wrong)
    return ExportedNetwork(bundle.network.config, bundle.preprocess, Interface(), run, "a.onnx", "")


def expected_of(wrong: int) -> Expected:
    """Return what a network says that errs on the first images. The label of every image is 0."""
    pictures = np.arange(IMAGES, dtype=np.uint8).reshape(-1, 5, 1, 1, 1)
    outputs = [torch.from_numpy(outputs_of(batch, wrong)["logits"]) for batch in pictures]
    return Expected(lambda _: outputs[0], list(pictures), outputs, "logits", IMAGES, [0] * IMAGES)


def test_a_loss_is_refused_if_chance_does_not_explain_it() -> None:
    with pytest.raises(ExportFailed, match=r"20 are right with the network only .* max_drop=0\.5"):
        compare_int8(expected_of(5), file_of(25), max_drop=0.5)
    assert compare_int8(expected_of(5), file_of(25), max_drop=10.0).drop == pytest.approx(100 * 20 / IMAGES)


def test_a_loss_that_the_images_cannot_show_is_accepted_with_a_note() -> None:
    found = compare_int8(expected_of(5), file_of(7), max_drop=0.5)
    low, high = found.drop_interval
    assert (found.lost, found.gained) == (2, 0) and low < 0.5 < found.drop < high
    assert "not decided" in (undecided_drop(found, 0.5) or "")
    assert undecided_drop(found, 5.0) is None


def test_a_gain_is_no_loss() -> None:
    found = compare_int8(expected_of(30), file_of(5), max_drop=0.0)
    assert (found.lost, found.gained) == (0, 25) and found.drop_interval[1] < 0 and undecided_drop(found, 0.0) is None
