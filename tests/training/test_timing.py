"""Tests of the times of a run, with a clock that the test sets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.jobs import job_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.training import clock as timing
from vitrail.training.clock import Timing
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.job import Job, Phase

STEPS = 10
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
    assert times.summary() == {
        "seconds": 2.0 + 55.0,
        "seconds_to_first_step": 4.0,
        "training_seconds": 5.0,
        "images_per_second": 18 / 5,
        "waiting_share": 1 / 5,
    }


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
    assert times.report(5)[:2] == (
        1,
        {"images_per_second": 12 / 10, "waiting_share": 0.0},
    )  # the time of lost steps is training


def test_a_run_without_steps_has_no_speed(clock: Clock) -> None:
    assert made().summary() == {
        "seconds": 2.0,
        "seconds_to_first_step": 0.0,
        "training_seconds": 0.0,
        "images_per_second": 0.0,
        "waiting_share": 0.0,
    }
