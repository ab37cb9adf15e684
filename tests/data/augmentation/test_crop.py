"""Random boxes: inside the image, of the shares and ratios asked for, and where they cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.augmentation.crop import crop_box

sides = st.integers(1, 3000)


@given(st.integers(0, 2**32 - 1), st.integers(0, 500), st.integers(0, 10**7), sides, sides, st.floats(0.001, 1))
def test_a_box_lies_inside(seed: int, epoch: int, sample: int, height: int, width: int, least: float) -> None:
    top, left, h, w = crop_box(seed, epoch, sample, height, width, area=(least, 1.0))
    assert all(type(number) is int for number in (top, left, h, w))
    assert min(top, left) >= 0 and min(h, w) >= 1
    assert top + h <= height and left + w <= width
    assert crop_box(seed, epoch, sample, height, width, area=(least, 1.0)) == (top, left, h, w)


@given(st.integers(0, 10**6), st.integers(60, 3000), st.integers(60, 3000), st.floats(0.05, 0.5))
def test_area_and_ratio_are_in_their_ranges(sample: int, height: int, width: int, least: float) -> None:
    _, _, h, w = crop_box(3, 0, sample, height, width, area=(least, 0.8), ratio=(0.5, 2.0))
    if max(height, width) < 1.9 * min(height, width):  # boxes of half the area always fit within ten tries, or nearly
        rounding = (1 + 0.5 / min(h, w)) ** 2
        assert 0.5 / rounding <= w / h <= 2 * rounding
        assert h * w <= height * width and (h * w >= least * height * width / rounding)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (500, 375), (224, 224)])
def test_shares_places_and_ratios_are_uniform(height: int, width: int) -> None:
    count, ratios, limits = 3000, (3 / 4, 4 / 3), (0.1, 0.4)  # small enough that the first try always fits
    boxes = np.array([crop_box(1, 0, n, height, width, area=limits, ratio=ratios) for n in range(count)])
    top, left, h, w = boxes.T
    share = (h * w / (height * width) - limits[0]) / (limits[1] - limits[0])
    log_ratio = (np.log(w / h) - math.log(ratios[0])) / (math.log(ratios[1]) - math.log(ratios[0]))
    for numbers in (share, log_ratio, (top + 0.5) / (height - h + 1), (left + 0.5) / (width - w + 1)):
        assert abs(numbers.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / count**0.5
        counts = np.histogram(numbers, 10, (0, 1))[0]
        assert ((counts - count / 10) ** 2 / (count / 10)).sum() < 28  # 9 degrees of freedom, 0.1 %
    corners = np.corrcoef([share, log_ratio, top / (height - h + 1), left / (width - w + 1)])
    assert np.abs(corners - np.eye(4)).max() < 5 / count**0.5


@pytest.mark.parametrize("size", [(10, 1000), (1000, 10), (1, 1), (3, 700)])
def test_where_no_box_fits_it_is_the_largest_in_the_centre(size: tuple[int, int]) -> None:
    height, width = size
    for sample in range(20):
        top, left, h, w = crop_box(0, 0, sample, height, width, area=(0.9, 1.0))
        assert h == min(height, round(width / (3 / 4))) and w == min(width, round(height * 4 / 3))
        assert (top, left) == ((height - h) // 2, (width - w) // 2)


@pytest.mark.parametrize("part", range(3))
def test_another_seed_epoch_or_sample_gives_another_box(part: int) -> None:
    keys = [[number if place == part else 7 for place in range(3)] for number in range(50)]
    assert len({crop_box(*key, 300, 400) for key in keys}) == 50


def test_every_place_occurs_the_last_row_and_column_too() -> None:
    boxes = [crop_box(0, 0, sample, 6, 6, area=(0.25, 0.25), ratio=(1.0, 1.0)) for sample in range(1600)]
    counts = np.zeros((4, 4), int)
    for top, left, h, w in boxes:
        assert (h, w) == (3, 3)
        counts[top, left] += 1
    assert counts.min() > 100 - 4 * 10 and counts.max() < 100 + 4 * 10
