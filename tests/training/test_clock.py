"""Tests of the times of a run, its smoothed rate and the time left, and of the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.listening import Display
from tests.training import ranks
from tests.training.curves import events_of
from tests.training.jobs import Blank, Finished, Initial, Make, job_of, results_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.models.variants import variant_config
from vitrail.tasks.classification import Classification
from vitrail.training import clock as clock_module
from vitrail.training.clock import SmoothedRate, TimeLeft, Timing
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.job import Job, Phase
from vitrail.training.log import Log
from vitrail.training.run import train

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
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=clock))
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
    reported = times.summary()
    assert times.after_step(3, 6, was_taken=True) == (1.0, 0.5)
    assert times.summary()["images_per_second"] == reported["images_per_second"], "speeds are up to the last report"
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


LIMIT = 3e12
CPU = torch.device("cpu")


@pytest.fixture
def measured() -> Iterator[Any]:
    """The measurement without what it remembers."""
    clock_module._measured.cache_clear()
    yield clock_module._measured
    clock_module._measured.cache_clear()


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    clock, sides = [0.0], list[int]()
    times = {256: (0.001, 0.004), 512: (0.0015, 0.001), 1024: (0.006, 0.005)}

    def seconds(multiply: Any, left: torch.Tensor, right: torch.Tensor) -> float:
        assert left.dtype == right.dtype == torch.bfloat16 and not torch.is_grad_enabled()
        sides.append(len(left))
        clock[0] += 1 / 128
        return times[len(left)][0 if multiply is torch.mm else 1]

    monkeypatch.setattr(clock_module, "_seconds", seconds)
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(clock_module, "_kernels", lambda precision, device: [torch.mm, torch.matmul])
    found = clock_module.product_limit("bf16", CPU)
    assert found == 2 * 1024**3 / 0.005
    assert sides == [256] * 4 + [512] * 2 + [1024] * 2, "two calls that are not counted, then 40 ms"
    assert clock_module.product_limit("bf16", CPU) == found and len(sides) == 8
    assert clock_module.product_limit("bf16", CPU, again=True) == found and len(sides) == 16


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_measuring_draws_no_random_number_and_is_short(
    precision: Any, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    monkeypatch.setattr(clock_module, "SECONDS", 0.002)
    before = torch.get_rng_state()
    assert 1e8 < clock_module.product_limit(precision, CPU) < 1e15
    assert torch.equal(before, torch.get_rng_state())
    left, right = clock_module._factors(8, precision, CPU)
    for multiply in clock_module._kernels(precision, CPU):
        expected = left.double() @ (right if multiply is torch.mm else right.t()).double()
        torch.testing.assert_close(multiply(left, right).double(), expected, rtol=0.02, atol=0.05)


def limit_of(monkeypatch: pytest.MonkeyPatch, *measured: float) -> tuple[clock_module.MachineLimit, list[str]]:
    """Return a limit whose measurements have these results in turn, and the calls that it makes."""
    left, calls = list(measured), list[str]()

    def measure(*rest: Any, again: bool) -> float:
        calls.append("again" if again else "first")
        return left.pop(0)

    monkeypatch.setattr(clock_module, "product_limit", measure)
    job, state = job_of(TrainConfig().override(steps=1), images=1), SimpleNamespace(step=0)
    log = Log(lambda event: calls.append("too low") if event["event"] == "limit too low" else None)
    return clock_module.MachineLimit(job, log, state), calls  # type: ignore[arg-type]


def test_steps_that_are_faster_than_the_limit_measure_it_again(
    monkeypatch: pytest.MonkeyPatch, types_unchecked: None
) -> None:
    found, calls = limit_of(monkeypatch, 100.0, 160.0)
    found.check(99.0)
    assert found.flops_per_second == 100.0 and calls == ["first"]
    found.check(150.0)
    assert found.flops_per_second == 160.0 and calls == ["first", "again"]
    found.check(161.0)
    found.check(1.0)
    assert found.flops_per_second is None and calls == ["first", "again", "too low"], "measured twice at most"


def test_a_slower_second_measurement_does_not_count(monkeypatch: pytest.MonkeyPatch, types_unchecked: None) -> None:
    found, calls = limit_of(monkeypatch, 100.0, 20.0)
    found.check(101.0)
    assert found.flops_per_second is None and calls == ["first", "again", "too low"]


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
    """A display that keeps the fractions of the limit."""

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


@pytest.mark.slow
def test_frozen_blocks_have_no_backward_pass(
    initial: Initial, from_model: Make, colour_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "product_limit", lambda *_, **__: LIMIT)
    config = from_model(initial(), colour_folder, train_blocks=1, steps=1)
    result = train(config)
    (event,) = events_of(result.folder)
    network = result.bundle.network.config
    flops = network.training_flops(trained_blocks=1)
    assert flops < 0.8 * network.training_flops() and network.num_classes == 3
    assert event["limit_fraction"] == pytest.approx(flops * event["images_per_second"] / LIMIT, rel=1e-9)


@pytest.mark.slow
def test_unknown_flops_are_left_out(
    initial: Initial, from_model: Make, small: Make, colour_folder: Path, tmp_path: Path
) -> None:
    adapted = train(from_model(initial(), colour_folder, lora_rank=2, steps=2)).folder
    plain = small(tmp_path / "own", steps=2, variant=None, width=None, depth=None, heads=None, mlp_width=None)
    own = train(plain, network=nn.Sequential(nn.Flatten(), nn.Linear(784, 10))).folder
    for run in (adapted, own):
        steps = events_of(run)
        assert events_of(run, "limit") == [] and steps and not any("limit_fraction" in event for event in steps)


@pytest.mark.slow
def test_processes_add_their_limits(three_splits: Path, tmp_path: Path) -> None:
    results_of(2, ranks.trained_with_limits, ranks.config_of(three_splits, tmp_path / "run"))
    (event,) = events_of(tmp_path / "run", "limit")
    assert event["flops_per_second"] == 3e12, "1e12 of the first process, and 2e12 of the second"
    flops = network_of().training_flops()
    for step in events_of(tmp_path / "run"):
        assert step["limit_fraction"] == pytest.approx(flops * step["images_per_second"] / 3e12, rel=1e-9)


@pytest.mark.slow
def test_the_task_decides_about_its_views(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "product_limit", lambda *_, **__: LIMIT)
    cost = Classification.step_cost
    monkeypatch.setattr(Classification, "step_cost", lambda *given: cost(*given)._replace(flops=1000))  # per image
    train(small(tmp_path / "run", steps=1))
    (event,) = events_of(tmp_path / "run")
    flops = network_of().training_flops() + 1000
    assert event["limit_fraction"] == pytest.approx(flops * event["images_per_second"] / LIMIT, rel=1e-9)
