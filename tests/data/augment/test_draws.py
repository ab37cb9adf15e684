"""Tests of the keyed random numbers, of the beta distribution, and of random boxes, against published code."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import images as goldens
from vitrail.data.augment import settings
from vitrail.data.augment.draws import (
    CROPS,
    Slot,
    first_fit,
    keyed_uniform,
    symmetric_beta,
    tensorflow_crop,
    torchvision_crop,
)
from vitrail.data.augment.operations import JITTER_DRAWS, RANDAUGMENT_DRAWS
from vitrail.data.pixels.geometry import Box

MASK = (1 << 64) - 1


class SplitMix64:
    """The generator from its authors' C source (Vigna), in Python's integers."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def __call__(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def reference_uniform(seed: int, epoch: int, sample: int, view: int, draws: range) -> list[float]:
    state = SplitMix64(seed)()
    for part in (epoch, sample, *([view] if view else [])):
        state = SplitMix64(state ^ part)()
    numbers = [SplitMix64(state + (draw + 1) * 0x9E3779B97F4A7C15)() for draw in draws]
    return [(number >> 40) / 2**24 for number in numbers]


def longs(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_reference_is_splitmix64() -> None:
    generator = SplitMix64(1234567)
    assert [generator() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.lists(st.tuples(*[st.integers(0, 2**40)] * 2, st.integers(0, 100)), min_size=1, max_size=5),
    draws=st.integers(1, 5),
    first=st.integers(0, 100),
)
def test_keyed_uniform_is_the_reference(seed: int, keys: list[tuple[int, int, int]], draws: int, first: int) -> None:
    epochs, samples, views = (longs(*column) for column in zip(*keys, strict=True))
    found = keyed_uniform(seed, epochs, samples, views, draws=draws, first=first)
    assert found.dtype == np.float32
    numbers = range(first, first + draws)
    assert found.tolist() == [reference_uniform(seed, *key, numbers) for key in keys]
    without = keyed_uniform(seed, epochs, samples, draws=draws, first=first)
    assert without.tolist() == [reference_uniform(seed, epoch, sample, 0, numbers) for epoch, sample, _ in keys]


def test_no_two_uses_share_a_draw() -> None:
    used = {Slot.MOVE: 3, Slot.ERASE: 5, Slot.CROP: 40, Slot.JITTER: JITTER_DRAWS, Slot.MIX: settings.MIX_DRAWS}
    numbers = [first + draw for first, draws in used.items() for draw in range(draws)]
    assert len(set(numbers)) == len(numbers) and max(numbers) < Slot.RANDAUGMENT
    large = {
        Slot.RANDAUGMENT: 1000 * RANDAUGMENT_DRAWS, Slot.TENSORFLOW_CROP: 400, Slot.WINDOW: 2, Slot.VIEW: 5,
        Slot.ERASED_BOX: 40, Slot.TEXT: 1, Slot.PATCH_ORDER: 10**6, Slot.PATCH_SOURCE: 10**6,
        Slot.CODE_RESTART: 10**6, Slot.PATCH_BLOCKS: 10**6, Slot.ERASED_PIXELS: 10**6,
    }  # fmt: skip
    assert all(first + draws < later for (first, draws), later in zip(large.items(), [*large][1:], strict=False))
    assert {*used, *large} == set(Slot)


def moment(alpha: float, power: int) -> float:
    """Return E[X^power] for X from Beta(alpha, alpha)."""
    return math.prod((alpha + r) / (2 * alpha + r) for r in range(power))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 7.5])
def test_beta_has_the_moments_of_its_distribution(alpha: float) -> None:
    count = 100_000
    uniform = keyed_uniform(11, np.zeros(count, np.int64), np.arange(count), draws=2)
    found = symmetric_beta(uniform, alpha)
    assert found.dtype == np.float64 and found.min() >= 0 and found.max() <= 1
    for power in range(1, 7):
        error = (moment(alpha, 2 * power) - moment(alpha, power) ** 2) ** 0.5 / count**0.5
        assert abs((found**power).mean() - moment(alpha, power)) < 4 * error


def test_the_least_draw_gives_a_share_of_0_or_1() -> None:
    uniform = np.array([[0, 0], [0, 0.5], [0, 0.25], [2**-24, 0.1]], np.float32)
    assert symmetric_beta(uniform[:2], 0.01).tolist() == [1, 0]
    assert np.isfinite(symmetric_beta(uniform, 0.01)).all()


sides = st.integers(1, 3000)


rules = st.sampled_from(list(CROPS.values()))


@given(rules, st.integers(0, 2**32 - 1), st.integers(0, 500), st.integers(0, 10**7), sides, sides, st.floats(0.001, 1))
def test_a_box_lies_inside(
    rule: Callable[..., Box], seed: int, epoch: int, sample: int, height: int, width: int, least: float
) -> None:
    top, left, h, w = rule(seed, epoch, sample, height, width, area=(least, 1.0))
    assert all(type(number) is int for number in (top, left, h, w))
    assert min(top, left) >= 0 and min(h, w) >= 1
    assert top + h <= height and left + w <= width
    assert rule(seed, epoch, sample, height, width, area=(least, 1.0)) == (top, left, h, w)


@pytest.mark.parametrize(
    ("height", "width"),
    [(480, 640), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((500, 375), (224, 224)))],
)
def test_shares_places_and_ratios_are_uniform(height: int, width: int) -> None:
    count, ratios, limits = 1500, (3 / 4, 4 / 3), (0.1, 0.4)  # small enough that the first try always fits
    boxes = np.array([torchvision_crop(1, 0, n, height, width, area=limits, ratio=ratios) for n in range(count)])
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
        top, left, h, w = torchvision_crop(0, 0, sample, height, width, area=(0.9, 1.0))
        assert h == min(height, round(width / (3 / 4))) and w == min(width, round(height * 4 / 3))
        assert (top, left) == ((height - h) // 2, (width - w) // 2)


@pytest.mark.parametrize("rule", CROPS.values())
@pytest.mark.parametrize("part", range(4))
def test_another_seed_epoch_sample_or_view_gives_another_box(part: int, rule: Callable[..., Box]) -> None:
    keys = [[number if place == part else 7 for place in range(4)] for number in range(50)]
    found = {rule(seed, epoch, sample, 300, 400, area=(0.05, 1.0), view=view) for seed, epoch, sample, view in keys}
    assert len(found) == 50


@pytest.mark.slow
def test_every_place_occurs_the_last_row_and_column_too() -> None:
    boxes = [torchvision_crop(0, 0, sample, 6, 6, area=(0.25, 0.25), ratio=(1.0, 1.0)) for sample in range(1600)]
    counts = np.zeros((4, 4), int)
    for top, left, h, w in boxes:
        assert (h, w) == (3, 3)
        counts[top, left] += 1
    assert counts.min() > 100 - 4 * 10 and counts.max() < 100 + 4 * 10


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2)), 3])
def test_boxes_are_distributed_as_those_of_the_original_code(number: int, types_unchecked: None) -> None:
    """The boxes are compared with 20,000 draws of the original. The means agree within four standard errors, and the
    distribution functions agree at the 0.1 % level of the two-sample Kolmogorov-Smirnov test.
    """
    golden = goldens.read("random_crop")
    case, levels = golden["cases"][number], np.array(golden["quantiles_percent"]) / 100
    count, height, width = case["draws"], case["image_h"], case["image_w"]
    none, samples = np.zeros(count, np.int64), np.arange(count)
    draws = keyed_uniform(1, none, samples, none, draws=40, first=Slot.TENSORFLOW_CROP).reshape(count, 10, 4)
    boxes = [first_fit(tries, height, width) for tries in draws.tolist()]
    boxes = [box or tensorflow_crop(1, 0, n, height, width) for n, box in enumerate(boxes)]
    assert boxes[:50] == [tensorflow_crop(1, 0, n, height, width) for n in range(50)]
    top, left, h, w = np.array(boxes).T
    shares = h * w / (height * width)
    for name, values in (
        ("area_share", shares), ("aspect_w_over_h", w / h), ("height", h), ("width", w),
        ("left_share", left / width), ("top_share", top / height),
    ):  # fmt: skip
        for level, value in zip(levels, case[name], strict=True):
            below, up_to = (values < value - 1e-7).mean(), (values < value + 1e-7).mean()
            assert below - 0.02 < level < up_to + 0.02, (name, level)
    for (mean, deviation), values in (
        (case["area_share_mean_std"], shares), (case["aspect_mean_std"], w / h),
    ):  # fmt: skip
        assert abs(values.mean() - mean) < 4 * deviation * (2 / count) ** 0.5
        assert abs(values.std() / deviation - 1) < 0.03
    for name, cut in (
        ("full_height_share", h == height), ("full_width_share", w == width),
        ("whole_image_share", (h == height) & (w == width)),
    ):  # fmt: skip
        share = case[name]
        assert abs(cut.mean() - share) < 4 * (2 * max(share, 1e-4) / count) ** 0.5 + 2 / count, name
    assert (top + h)[h < height].max() == case["largest_bottom_when_height_is_cut"] == height - 1
    assert (left + w)[w < width].max() == case["largest_right_when_width_is_cut"] == width - 1
    assert [top[h < height].min(), left[w < width].min()] == case["smallest_top_left_when_cut"]
    assert shares.min() >= case["area_share_min_max"][0] - 1e-3


def test_tensorflows_rule_takes_the_whole_image_after_100_tries() -> None:
    """No box with a third of a strip's area has an allowed shape. A box of the only allowed area needs a few tries."""
    assert {tensorflow_crop(0, 0, n, 300, 20, area=(0.3, 1.0)) for n in range(20)} == {(0, 0, 300, 20)}
    found = [tensorflow_crop(0, 0, n, 100, 100, area=(0.985, 1.0)) for n in range(300)]
    whole = sum(box == (0, 0, 100, 100) for box in found)
    assert 0 < whole < 300 and all(h * w >= 9850 for _, _, h, w in found)
