"""Tests of the comparison of 8-bit integers with the network: which losses of accuracy are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.serving.conftest import make_bundle
from vitrail.errors import ExportFailed
from vitrail.serving.export.parity import Expected, compare_int8, undecided_drop
from vitrail.serving.export.program import describe
from vitrail.weights.exported.network import ExportedNetwork

IMAGES = 205


class Session:
    """A file for images of one pixel, whose level is the number of the image. It errs on some of them."""

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        rows = images.reshape(len(images)).astype(int)
        return {"logits": np.where(rows[:, None] < self._wrong, [[0.0, 1.0]], [[1.0, 0.0]]).astype(np.float32)}


def file_of(session: Session) -> ExportedNetwork:
    return ExportedNetwork(describe(make_bundle(), "logits"), session, "a.onnx", "")


def expected_of(wrong: int) -> Expected:
    """Return what a network says that errs on the first images. The label of every image is 0."""
    pictures = np.arange(IMAGES, dtype=np.uint8).reshape(-1, 5, 1, 1, 1)
    outputs = [torch.from_numpy(Session(wrong).run(batch)["logits"]) for batch in pictures]
    return Expected(list(pictures), outputs, "logits", IMAGES, [0] * IMAGES)


def test_a_loss_is_refused_if_chance_does_not_explain_it() -> None:
    with pytest.raises(ExportFailed, match=r"20 are right with the network only .* max_drop=0\.5"):
        compare_int8(expected_of(5), file_of(Session(25)), max_drop=0.5)
    assert compare_int8(expected_of(5), file_of(Session(25)), max_drop=10.0).drop == pytest.approx(100 * 20 / IMAGES)


def test_a_loss_that_the_images_cannot_show_is_accepted_with_a_note() -> None:
    found = compare_int8(expected_of(5), file_of(Session(7)), max_drop=0.5)
    low, high = found.drop_interval
    assert (found.lost, found.gained) == (2, 0) and low < 0.5 < found.drop < high
    assert "not decided" in (undecided_drop(found, 0.5) or "")
    assert undecided_drop(found, 5.0) is None


def test_a_gain_is_no_loss() -> None:
    found = compare_int8(expected_of(30), file_of(Session(5)), max_drop=0.0)
    assert (found.lost, found.gained) == (0, 25) and found.drop_interval[1] < 0 and undecided_drop(found, 0.0) is None
