"""Tests of axes: round ticks, even steps, and a range that contains the values."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vitrail.report.charts import make_axis

VALUES = st.one_of(*(st.floats(-most, most, width=32) for most in (2.0**40, 1.0, 2.0**-30)))


@settings(max_examples=25)
@given(st.lists(VALUES, min_size=1, max_size=9), st.booleans())
@example([0.0], True)
@example([0.1, 0.3], True)
@example([1e-45, 2e-45], True)
@example([1.0, 1.0 + 1e-12], True)
@example([0.30000000000000004, 0.9], True)
def test_ticks_are_round_even_and_inside(values: list[float], round_ends: bool) -> None:
    found = make_axis(values, round_ends=round_ends)
    assert found.low < found.high
    slack = 1e-6 * (found.high - found.low)
    assert found.low <= min(values) + slack and found.high >= max(values) - slack
    assert all(found.low <= tick <= found.high for tick in found.ticks)
    assert 2 <= len(found.ticks) <= 8 if round_ends else len(found.ticks) <= 7
    factor = found.step / 10.0 ** math.floor(math.log10(found.step) + 1e-9)
    assert min(abs(factor - round_number) for round_number in (1, 2, 5)) < 1e-9
    for tick in found.ticks:
        assert abs(tick / found.step - round(tick / found.step)) < 1e-4
    for before, after in itertools.pairwise(found.ticks):
        assert after - before == pytest.approx(found.step, rel=1e-4)
    labels = [found.label(tick) for tick in found.ticks]
    assert len({*labels}) == len(labels)
    for label, tick in zip(labels, found.ticks, strict=True):
        assert float(label.replace(",", "")) == pytest.approx(tick, rel=1e-6, abs=1e-9 * found.step)
    if round_ends:
        assert (found.ticks[0], found.ticks[-1]) == (found.low, found.high)
        span = max(values) - min(values)
        if span > 1e-6 * max(map(abs, values)):
            assert found.high - found.low <= 2.01 * span, "the values fill half of the axis"


@pytest.mark.parametrize(
    ("values", "options", "ticks"),
    [
        ([0.43, 0.78], {}, (0.4, 0.5, 0.6, 0.7, 0.8)),
        ([0.0, 2.3], {}, (0, 0.5, 1, 1.5, 2, 2.5)),
        ([91.0, 100.0], {"bounds": (0.0, 100.0)}, (90, 92, 94, 96, 98, 100)),
        ([100.0], {"bounds": (0.0, 100.0)}, (90, 92, 94, 96, 98, 100)),
        ([0.0], {"bounds": (0.0, 100.0)}, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        ([0.0, 374.0], {"round_ends": False, "integers": True}, (0, 100, 200, 300)),
        ([0.0, 2.0], {"round_ends": False, "integers": True}, (0, 1, 2)),
        ([0.0, 3e5], {"round_ends": False, "integers": True}, (0, 100_000, 200_000, 300_000)),
        ([-3e-5, 5e-5], {}, (-4e-5, -2e-5, 0, 2e-5, 4e-5, 6e-5)),
    ],
)
def test_axes_as_one_would_draw_them(values: list[float], options: dict[str, object], ticks: tuple[float, ...]) -> None:
    found = make_axis(values, **options)  # type: ignore[arg-type]
    assert found.ticks == ticks
    assert found.fraction(found.low) == 0 and found.fraction(found.high) == 1


def test_labels() -> None:
    assert [make_axis([0.0, 1.0]).label(tick, "%") for tick in (0.0, 0.2)] == ["0.0%", "0.2%"]
    assert [make_axis([0.0, 3e4]).label(tick) for tick in (0.0, 10_000.0)] == ["0", "10,000"]
    assert make_axis([0.0, 3e-6]).label(2e-6) == "2e-06" and make_axis([0.0, 1e9]).label(8e8) == "8e+08"
