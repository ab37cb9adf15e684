"""Tests of the times of a run, with a clock that the test sets, of the smoothed rate, and of the time left."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.curves import events_of
from tests.training.jobs import Blank, Finished, job_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.training import clock as timing
from vitrail.training.clock import SmoothedRate, TimeLeft, Timing
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.job import Job, Phase

STEPS = 10
SUMMARY = "seconds", "seconds_to_first_step", "training_seconds", "images_per_second", "waiting_share"
PHASES = (
    Phase(0, 4, (16, 24), patch_dropout=0.0, batch_size=3, cost=0.5, flops=100),
    Phase(4, 6, (32, 48), patch_dropout=0.0, batch_size=3, flops=200),
)
JOB = job_of(
    TrainConfig(images=Preprocess(image_size=(32, 48)), run=RunConfig(steps=STEPS, batch_size=3, precision="float32")),
    images=30,
    phases=PHASES,
)


class Clock:
    """A clock in place of `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))
    return clock


def made(job: Job = JOB, limit: Any = None, step: int = 0) -> Timing:
    times = Timing(job, started=98.0)
    times.begin(step, limit)
    return times


def test_a_report_counts_steps_without_pauses(clock: Clock) -> None:
    times = made(limit=SimpleNamespace(flops_per_second=1000.0, check=lambda rate: None))
    clock.passes(1)
    with times.waiting():
        clock.passes(1)
    assert times.after_step(1, 6, was_taken=True) == (2.0, 0.5)
    with times.pause("evaluation"):
        clock.passes(50)
    clock.passes(2)
    assert times.after_step(2, 6, was_taken=False) == (2.0, 0.5)  # skipped: its images were read, and no FLOPs counted
    steps, exact, smoothed = times.report(2)
    assert steps == 2
    assert exact == {"images_per_second": 3.0, "waiting_share": 0.25, "limit_fraction": 100 / 4 / 1000}
    assert smoothed["images_per_second"] == 3.0 and smoothed["limit_fraction"] == 0.025
    clock.passes(1)
    assert times.after_step(3, 6, was_taken=True) == (1.0, 0.5)
    assert times.report(3)[:2] == (1, {"images_per_second": 6, "waiting_share": 0, "limit_fraction": 0.1})
    assert times.summary() == dict(zip(SUMMARY, (2.0 + 55.0, 4.0, 5.0, 18 / 5, 1 / 5), strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_time_left_follows_from_the_cost_of_the_steps(device: str, clock: Clock) -> None:
    """On a GPU the time is known after reports only, because it computes several steps ahead."""
    times = made(replace(JOB, device=torch.device(device)))
    assert times.times_each_step == (device == "cpu")
    for step in (1, 2):
        clock.passes(30)
        times.after_step(step, 3, was_taken=True)
        assert (times.seconds_left(step) is None) == (device == "cuda" or step == 1)
        _, _, shown = times.report(step)
        assert ("seconds_left" in shown) == (step == 2)
    assert shown["seconds_left"] == pytest.approx(60 * (2 * 0.5 + 6))  # two cheap steps and six of the last phase


def test_a_rollback_counts_the_steps_again(clock: Clock) -> None:
    times = made(step=4)
    for step in (5, 6, 7):
        clock.passes(1)
        times.after_step(step, 3, was_taken=True)
    clock.passes(5)
    times.go_back(4)
    clock.passes(2)
    assert times.after_step(5, 3, was_taken=True) == (2.0, 1.0)
    expected = {"images_per_second": 12 / 10, "waiting_share": 0.0}  # the time of lost steps is training
    assert times.report(5)[:2] == (1, expected)


def test_a_run_without_steps_has_no_speed(clock: Clock) -> None:
    assert made().summary() == {**dict.fromkeys(SUMMARY, 0.0), "seconds": 2.0}


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


def test_the_display_shows_the_smoothed_rate_and_the_journal_that_of_each_report(finished: Finished) -> None:
    rate, last = SmoothedRate(), 0
    events = events_of(finished.result.folder)
    assert len(events) == len(finished.shown.reports) > 3
    for event, (step, shown) in zip(events, finished.shown.reports, strict=True):
        images, last = 20 * (step - last), step
        assert shown["images_per_second"] == pytest.approx(rate.add(images, images / event["images_per_second"]))
    assert [step for step, _ in finished.shown.ticks] == list(range(2, 25)), "the first step contains the start-up"
    assert all(left > 0 for _, left in finished.shown.ticks)


def left_of(steps: int, evaluations: int = 0, checkpoints: int = 1, **fields: Any) -> TimeLeft:
    """Return the forecast of a run with batches of 20 images."""
    config = TrainConfig().override(
        steps=steps, batch_size=20, evaluations=evaluations, checkpoints=checkpoints, keep="last"
    )
    return TimeLeft(job_of(config, images=2000, **fields))


def test_the_time_left_counts_steps_and_all_pauses() -> None:
    splits = Splits(Blank(2000), Blank(30), Blank(20))
    left = left_of(steps=100, evaluations=10, checkpoints=3, splits=splits)
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
    # 9 more evaluations, checkpoints after steps 34, 68 and 100, and the last 50 images
    assert left.seconds(10) == pytest.approx(90 * 3 + 9 * 6 + 3 * 2 + 50 * 6 / 30)
    assert left.seconds(100) == pytest.approx(50 * 6 / 30)


def test_without_evaluations_the_steps_alone_are_left() -> None:
    left = left_of(steps=7)
    left.add(1, 9.0)
    left.add(2, 3.0)
    assert left.seconds(3) == pytest.approx(4 * 1.5)


def test_the_time_left_weighs_steps_by_their_cost() -> None:
    cheap = Phase(0, 50, (28, 28), patch_dropout=0.0, batch_size=20, cost=0.25)
    left = left_of(steps=100, phases=(cheap, replace(cheap, first=50, cost=1.0)))
    for _ in range(2):
        left.add(0.25, 0.25)
    assert left.seconds(2) == pytest.approx(0.25 * 48 + 50)
