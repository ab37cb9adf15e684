"""Tests of the times of a run, its smoothed rate and the time left, and of the machine's limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.listening import Display
from tests.tasks.images import Pictures
from tests.training.jobs import Make, events_of, job_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.models.variants import variant_config
from vitrail.training import clock as clock_module
from vitrail.training.clock import TimeLeft, Timing
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.job import Job, Phase
from vitrail.training.log import Log
from vitrail.training.run import train

SUMMARY = "seconds", "seconds_to_first_step", "training_seconds", "images_per_second", "waiting_share"
PHASES = (
    Phase(0, 4, (16, 24), patch_dropout=0.0, batch_size=3, cost=0.5, flops=100),
    Phase(4, 6, (32, 48), patch_dropout=0.0, batch_size=3, flops=200),
)
JOB = job_of(
    TrainConfig(images=Preprocess(image_size=(32, 48)), run=RunConfig(steps=10, batch_size=3, precision="float32")),
    images=30,
    phases=PHASES,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock in place of `time.perf_counter`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def made(job: Job = JOB, limit: Any = None, step: int = 0) -> Timing:
    times = Timing(job, started=98.0)
    times.begin(step, limit)
    return times


def test_a_report_counts_steps_without_pauses(clock: SimpleNamespace) -> None:
    times = made(limit=SimpleNamespace(flops_per_second=1000.0, check=lambda rate: None))
    clock.now += 1
    with times.waiting():
        clock.now += 1
    assert times.after_step(1, 6, was_taken=True) == (2.0, 0.5)
    with times.pause("evaluation"):
        clock.now += 50
    clock.now += 2
    assert times.after_step(2, 6, was_taken=False) == (2.0, 0.5)  # skipped: its images were read, and no FLOPs counted
    steps, exact, smoothed = times.report(2)
    assert steps == 2
    assert exact == {"images_per_second": 3.0, "waiting_share": 0.25, "limit_fraction": 100 / 4 / 1000}
    assert smoothed["images_per_second"] == 3.0 and smoothed["limit_fraction"] == 0.025
    clock.now += 1
    reported = times.summary()
    assert times.after_step(3, 6, was_taken=True) == (1.0, 0.5)
    assert times.summary()["images_per_second"] == reported["images_per_second"], "speeds are up to the last report"
    assert times.report(3)[:2] == (1, {"images_per_second": 6, "waiting_share": 0, "limit_fraction": 0.1})
    assert times.summary() == dict(zip(SUMMARY, (2.0 + 55.0, 4.0, 5.0, 18 / 5, 1 / 5), strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_time_left_follows_from_the_cost_of_the_steps(device: str, clock: SimpleNamespace) -> None:
    """On a GPU the time is known after reports only, because it computes several steps ahead."""
    times = made(replace(JOB, device=torch.device(device)))
    assert times.times_each_step == (device == "cpu")
    for step in (1, 2):
        clock.now += 30
        times.after_step(step, 3, was_taken=True)
        assert (times.seconds_left(step) is None) == (device == "cuda" or step == 1)
        _, _, shown = times.report(step)
        assert ("seconds_left" in shown) == (step == 2)
    assert shown["seconds_left"] == pytest.approx(60 * (2 * 0.5 + 6))  # two cheap steps and six of the last phase


def test_a_rollback_counts_the_steps_again(clock: SimpleNamespace) -> None:
    times = made(step=4)
    for step in (5, 6, 7):
        clock.now += 1
        times.after_step(step, 3, was_taken=True)
    clock.now += 5
    times.go_back(4)
    clock.now += 2
    assert times.after_step(5, 3, was_taken=True) == (2.0, 1.0)
    expected = {"images_per_second": 12 / 10, "waiting_share": 0.0}  # the time of lost steps is training
    assert times.report(5)[:2] == (1, expected)


def test_a_run_without_steps_has_no_speed(clock: SimpleNamespace) -> None:
    assert made().summary() == {**dict.fromkeys(SUMMARY, 0.0), "seconds": 2.0}


def left_of(steps: int, evaluations: int = 0, checkpoints: int = 1, **fields: Any) -> TimeLeft:
    """Return the forecast of a run with batches of 20 images."""
    config = TrainConfig().override(
        steps=steps, batch_size=20, evaluations=evaluations, checkpoints=checkpoints, keep="last"
    )
    return TimeLeft(job_of(config, images=2000, **fields))


def test_the_time_left_counts_steps_and_all_pauses() -> None:
    splits = Splits(Pictures(2000), Pictures(30), Pictures(20))
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


LIMIT = 3e12


@pytest.fixture
def measured() -> Iterator[Any]:
    """The measurement without what it remembers."""
    clock_module._measured.cache_clear()
    yield clock_module._measured
    clock_module._measured.cache_clear()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_measuring_draws_no_random_number_and_is_short(
    precision: Any, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    monkeypatch.setattr(clock_module, "SECONDS", 0.002)
    before = torch.get_rng_state()
    assert 1e8 < clock_module.product_limit(precision, torch.device("cpu")) < 1e15
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_no_fraction_is_above_one(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "product_limit", lambda *_, again=False: 2.0 if again else 1.0)
    display = Fractions()
    train(small(tmp_path / "run", steps=4, evaluations=1), log=Log(display))
    assert [event["flops_per_second"] for event in events_of(tmp_path / "run", "limit")] == [1.0, 2.0]
    steps = events_of(tmp_path / "run")
    assert len(steps) > 1 and not any("limit_fraction" in event for event in steps)
    assert set(display.fractions) == {None}
    assert [note for note in display.notes if "faster than the matrix products" in note] == display.notes[-1:]


class Fractions(Display):
    def __init__(self) -> None:
        self.fractions: list[float | None] = []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.fractions.append(metrics.get("limit_fraction"))


def network_of(**fields: Any) -> Any:
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "channels": 1, "num_classes": 10}
    return variant_config("ViT-Pico/7", **{**sizes, "image_size": (28, 28), **fields})


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_fraction_is_that_of_the_closed_form(
    accumulation: int, small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "product_limit", lambda *_, **__: LIMIT)
    display = Fractions()
    early = {"early_image_size": ("14x21:0.5",), "early_batch_size": ("12:0.5",)}
    train(small(tmp_path / "run", steps=4, evaluations=1, accumulation=accumulation, **early), log=Log(display))
    (found,), steps = events_of(tmp_path / "run", "limit"), events_of(tmp_path / "run")
    assert found["flops_per_second"] == LIMIT and found["precision"] == "float32" and found["step"] == 0
    assert found["threads"] == torch.get_num_threads()
    each = [network_of(image_size=(14, 21)).training_flops()] * 2 + [network_of().training_flops()] * 2
    assert len(steps) == 4
    for event, flops in zip(steps, each, strict=True):
        assert event["limit_fraction"] == pytest.approx(flops * event["images_per_second"] / LIMIT, rel=1e-9)
    assert display.fractions[0] == steps[0]["limit_fraction"] and None not in display.fractions
