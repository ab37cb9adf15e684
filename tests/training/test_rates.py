"""Tests of the smoothed rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.listening import Display
from vitrail.training.clock import SmoothedRate, TimeLeft
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, read_journal
from vitrail.training.run import train


def test_the_start_up_is_dropped_when_more_is_known() -> None:
    rate = SmoothedRate()
    assert rate.add(10, 20.0) == 0.5
    assert rate.add(300, 3.0) == 100
    assert rate.add(300, 3.0) == pytest.approx(100)


def test_short_reports_change_the_rate_little() -> None:
    rate = SmoothedRate()
    for _ in range(10):
        rate.add(1000, 10.0)
    assert rate.add(9, 0.01) == pytest.approx(100, rel=0.02)  # 900 per second for a hundredth of a second
    assert rate.add(1, 0.04) == pytest.approx(100, rel=0.02)  # 25 per second


def test_a_lasting_change_is_shown_after_minutes() -> None:
    rate = SmoothedRate()
    rate.add(1, 1.0)
    for _ in range(300):
        rate.add(600, 6.0)
    for _ in range(10):
        shown = rate.add(300, 6.0)
    # A geometric sum: after a minute, exp(-1) of the weight is on what was before.
    assert shown == pytest.approx(50 + 50 * math.exp(-1))


def test_the_display_shows_the_smoothed_rate_and_the_journal_that_of_each_report(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    class Shown(Display):
        def __init__(self) -> None:
            self.rates: list[tuple[int, float]] = []

        def step(self, step: int, metrics: dict[str, float]) -> None:
            self.rates.append((step, metrics["images_per_second"]))

    display, rate, last = Shown(), SmoothedRate(), 0
    train(small(tmp_path / "run"), log=Log(display))
    events = [event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "step"]
    assert len(events) == len(display.rates) > 3
    for event, (step, shown) in zip(events, display.rates, strict=True):
        images, last = 20 * (step - last), step
        assert shown == pytest.approx(rate.add(images, images / event["images_per_second"]))


def test_the_time_left_counts_steps_and_all_pauses() -> None:
    left = TimeLeft(100, {"evaluation": 10, "checkpoint": 40}, batch_size=20, evaluated=30, at_end=50)
    assert left.seconds(0) is None
    left.add(1, 20.0)
    assert left.seconds(1) is None, "the first step contains the start-up"
    left.add(1, 3.0)
    # 98 steps, 10 evaluations of 30 images and the last 50 images, each a third of the time of a training image
    assert left.seconds(2) == pytest.approx(98 * 3 + (10 * 30 + 50) * 3 / (3 * 20))
    for _ in range(8):
        left.add(1, 3.0)
    left.pause("evaluation", 6.0)
    left.pause("checkpoint", 2.0)
    # 9 more evaluations, checkpoints after steps 40, 80 and 100, and the last 50 images
    assert left.seconds(10) == pytest.approx(90 * 3 + 9 * 6 + 3 * 2 + 50 * 6 / 30)
    assert left.seconds(100) == pytest.approx(50 * 6 / 30)


def test_without_evaluations_the_steps_alone_are_left() -> None:
    left = TimeLeft(7, {})
    left.add(1, 9.0)
    left.add(2, 3.0)
    assert left.seconds(3) == pytest.approx(4 * 1.5)


@pytest.mark.slow
def test_a_run_shows_the_time_left_from_its_second_step(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    class Shown(Display):
        def __init__(self) -> None:
            self.ticks: list[tuple[int, float]] = []

        def tick(self, step: int, seconds_left: float) -> None:
            self.ticks.append((step, seconds_left))

    display = Shown()
    train(small(tmp_path / "run"), log=Log(display))
    assert [step for step, _ in display.ticks] == list(range(2, 25))
    assert all(left > 0 for _, left in display.ticks)
