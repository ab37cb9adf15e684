"""The learning rate in closed form, and what holds for every schedule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.training.optimization.schedule import Schedule, ScheduleName

KINDS = get_args(ScheduleName)
schedules = st.integers(1, 200).flatmap(
    lambda steps: st.builds(
        Schedule,
        kind=st.sampled_from(KINDS),
        peak=st.floats(1e-8, 10),
        steps=st.just(steps),
        warmup_steps=st.integers(0, steps),
    )
)


def test_cosine() -> None:
    rates = [Schedule("cosine", 0.8, 12, 4)(step) for step in range(12)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4:] == pytest.approx([0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
    assert rates[8] == pytest.approx(0.4)


def test_linear() -> None:
    rates = [Schedule("linear", 0.8, 12, 4)(step) for step in range(12)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_constant() -> None:
    rates = [Schedule("constant", 0.8, 6, 2)(step) for step in range(6)]
    assert rates == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.8, 0.8])


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup_it_starts_on_the_peak(kind: ScheduleName) -> None:
    assert Schedule(kind, 0.3, 5, 0)(0) == pytest.approx(0.3)


@given(schedules)
def test_never_negative_never_above_the_peak(schedule: Schedule) -> None:
    rates = [schedule(step) for step in range(schedule.steps)]
    assert min(rates) > 0
    assert max(rates) <= schedule.peak * (1 + 1e-12)


@given(schedules)
def test_rises_to_the_peak_then_never_rises(schedule: Schedule) -> None:
    rates = [schedule(step) for step in range(schedule.steps)]
    rising, falling = rates[: schedule.warmup_steps], rates[max(schedule.warmup_steps - 1, 0) :]
    assert all(first < second for first, second in pairwise(rising))
    assert all(first * (1 + 1e-12) >= second for first, second in pairwise(falling))
    assert falling[0] == pytest.approx(schedule.peak)
