"""Scaling as TensorFlow scales: against its own results, and what follows from the definition at any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import images as goldens
from vitrail.data.pixels.tensorflow import resize

METHODS = ["nearest", "bilinear", "bicubic", "area"]
methods: Any = st.sampled_from(METHODS)
sides = st.integers(1, 40)


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp_tf_resize_down", "pp_tf_resize_large"])
def test_results_are_tensorflows(name: str) -> None:
    golden = goldens.read(name)
    images = [goldens.image(spec) for spec in golden["images"]]
    for case in golden["cases"]:
        found = resize(images[case["image"]], tuple(case["size"]), case["method"], antialias=case["antialias"])
        apart, moments = goldens.compare(found, case["output"])
        assert apart.max() < 0.01 and moments < 1e-4, case["method"]
        if case["method"] == "bilinear" and not case["antialias"]:
            assert apart.max() < 1e-6, "the same operations in the same order"


@given(methods, st.booleans(), sides, sides, sides, sides, st.sampled_from([1, 3]), st.integers(0, 255))
def test_a_flat_image_stays_flat(
    method: Any, antialias: bool, height: int, width: int, down: int, across: int, channels: int, level: int
) -> None:
    image = np.full((height, width, channels), level, np.uint8)
    found = resize(image, (down, across), method, antialias=antialias)
    assert found.shape == (down, across, channels) and found.dtype == np.float32
    assert np.abs(found - level).max() < 1e-3


@given(methods, st.booleans(), sides, sides, sides, sides, st.data())
def test_a_window_is_a_part_of_the_whole(
    method: Any, antialias: bool, height: int, width: int, down: int, across: int, drawn: st.DataObject
) -> None:
    image, size = picture(height, width), (down, across)
    top, left = drawn.draw(st.integers(0, down - 1)), drawn.draw(st.integers(0, across - 1))
    window = slice(top, drawn.draw(st.integers(top + 1, down))), slice(left, drawn.draw(st.integers(left + 1, across)))
    whole = resize(image, size, method, antialias=antialias)
    assert np.array_equal(resize(image, size, method, antialias=antialias, window=window), whole[window])


@given(methods, st.booleans(), sides, sides)
def test_the_same_size_changes_nothing(method: Any, antialias: bool, height: int, width: int) -> None:
    image = picture(height, width)
    assert np.array_equal(resize(image, (height, width), method, antialias=antialias), image)


@pytest.mark.parametrize(("method", "antialias", "expected"), [
    ("nearest", False, [1, 3]), ("bilinear", False, [0.5, 2.5]), ("bilinear", True, [5 / 7, 16 / 7]),
    ("area", True, [0.5, 2.5]), ("bicubic", False, [7 / 17, 44 / 17]),
])  # fmt: skip
def test_half_of_a_ramp(method: Any, antialias: bool, expected: list[float]) -> None:
    """By hand: the first pixel lies halfway between pixels 0 and 1, and pixels outside the image have no weight."""
    ramp = np.arange(4, dtype=np.uint8).reshape(1, 4, 1)
    found = resize(ramp, (1, 2), method, antialias=antialias)
    assert found.ravel().tolist() == pytest.approx(expected, abs=1e-6)
