"""Tests of the machine's limit: its measurement, and the fraction of it that the steps of a run reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.listening import Display
from tests.training import ranks
from tests.training.curves import events_of
from tests.training.jobs import Initial, Make, job_of, results_of
from vitrail.models.variants import variant_config
from vitrail.tasks.classification import Classification
from vitrail.training import clock as limit
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log
from vitrail.training.run import train

LIMIT = 3e12
CPU = torch.device("cpu")


@pytest.fixture
def measured() -> Iterator[Any]:
    """The measurement without what it remembers."""
    limit._measured.cache_clear()
    yield limit._measured
    limit._measured.cache_clear()


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    clock, sides = [0.0], list[int]()
    times = {256: (0.001, 0.004), 512: (0.0015, 0.001), 1024: (0.006, 0.005)}

    def seconds(multiply: Any, left: torch.Tensor, right: torch.Tensor) -> float:
        assert left.dtype == right.dtype == torch.bfloat16 and not torch.is_grad_enabled()
        sides.append(len(left))
        clock[0] += 1 / 128
        return times[len(left)][0 if multiply is torch.mm else 1]

    monkeypatch.setattr(limit, "_seconds", seconds)
    monkeypatch.setattr(limit.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(limit, "_kernels", lambda precision, device: [torch.mm, torch.matmul])
    found = limit.product_limit("bf16", CPU)
    assert found == 2 * 1024**3 / 0.005
    assert sides == [256] * 4 + [512] * 2 + [1024] * 2, "two calls that are not counted, then 40 ms"
    assert limit.product_limit("bf16", CPU) == found and len(sides) == 8
    assert limit.product_limit("bf16", CPU, again=True) == found and len(sides) == 16


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_measuring_draws_no_random_number_and_is_short(
    precision: Any, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    monkeypatch.setattr(limit, "SECONDS", 0.002)
    before = torch.get_rng_state()
    assert 1e8 < limit.product_limit(precision, CPU) < 1e15
    assert torch.equal(before, torch.get_rng_state())
    left, right = limit._factors(8, precision, CPU)
    for multiply in limit._kernels(precision, CPU):
        expected = left.double() @ (right if multiply is torch.mm else right.t()).double()
        torch.testing.assert_close(multiply(left, right).double(), expected, rtol=0.02, atol=0.05)


def limit_of(monkeypatch: pytest.MonkeyPatch, *measured: float) -> tuple[limit.MachineLimit, list[str]]:
    """Return a limit whose measurements have these results in turn, and the calls that it makes."""
    left, calls = list(measured), list[str]()

    def measure(*rest: Any, again: bool) -> float:
        calls.append("again" if again else "first")
        return left.pop(0)

    monkeypatch.setattr(limit, "product_limit", measure)
    job, state = job_of(TrainConfig().override(steps=1), images=1), SimpleNamespace(step=0)
    log = Log(lambda event: calls.append("too low") if event["event"] == "limit too low" else None)
    return limit.MachineLimit(job, log, state), calls  # type: ignore[arg-type]


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
    monkeypatch.setattr(limit, "product_limit", lambda *_, again=False: 2.0 if again else 1.0)
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
    monkeypatch.setattr(limit, "product_limit", lambda *_, **__: LIMIT)
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
    monkeypatch.setattr(limit, "product_limit", lambda *_, **__: LIMIT)
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
    monkeypatch.setattr(limit, "product_limit", lambda *_, **__: LIMIT)
    cost = Classification.step_cost
    monkeypatch.setattr(Classification, "step_cost", lambda *given: cost(*given)._replace(flops=1000))  # per image
    train(small(tmp_path / "run", steps=1))
    (event,) = events_of(tmp_path / "run")
    flops = network_of().training_flops() + 1000
    assert event["limit_fraction"] == pytest.approx(flops * event["images_per_second"] / LIMIT, rel=1e-9)
