"""The learning rate in closed form, what holds for every schedule, and lengths of parts of a run with their units."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.training.optimizer import OptimizerConfig
from vitrail.training.schedule import Duration, RunLength, Schedule, ScheduleName, duration_problems, is_zero, steps_of

KINDS = get_args(ScheduleName)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pipeline" / "schedules.json").read_text())


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule("cosine", 0.8, 12, 4),
         [0.2, 0.4, 0.6, 0.8, *(0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(8))]),
        (Schedule("constant", 0.8, 6, 2), [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (Schedule("staircase", 8.0, 10, 4, boundaries=(2, 6), factors=(0.5, 0.25)), [2, 4, 3, 4, 4, 4, 2, 2, 2, 2]),
    ],
    ids=["cosine", "constant", "stairs within and after the warm-up"],
)  # fmt: skip
def test_rates_are_those_of_the_closed_form(schedule: Schedule, rates: list[float]) -> None:
    assert [schedule(step) for step in range(len(rates))] == pytest.approx(rates)


def of_big_vision(case: dict[str, Any]) -> Schedule:
    """The schedule of big_vision's arguments, by way of the settings of a run."""
    given = dict(case["arguments"])
    run = RunLength(case["total_steps"], case["batch_size"], case["data_size"])
    kind = {"stair": "staircase"}.get(given.pop("decay_type"), case["arguments"]["decay_type"])
    names = {
        "base": "learning_rate", "warmup_steps": "warmup", "warmup_epochs": "warmup", "warmup_percent": "warmup",
        "cooldown_steps": "cooldown", "timescale": "rsqrt_timescale", "timescale_examples": "rsqrt_timescale",
        "shift_examples": "rsqrt_shift", "linear_end": "end_learning_rate", "end": "end_learning_rate",
        "steps": "stair_at", "mults": "stair_factors", "power": "power", "scale_with_batchsize": "base_batch_size",
    }  # fmt: skip
    units = {"epochs": "epochs", "percent": "%", "examples": "images"}
    settings: dict[str, Any] = {"warmup": 0.0}
    for name, value in given.items():
        field, unit = names[name], units.get(name.rpartition("_")[2], "steps")
        if field in ("warmup", "cooldown", "rsqrt_timescale", "rsqrt_shift"):
            settings[field] = f"{100 * value if unit == '%' else value:g} {unit}"
        elif field == "stair_at":
            settings[field] = tuple(f"{step} steps" for step in value)
        else:
            settings[field] = tuple(value) if isinstance(value, list) else float(value)
    if settings.pop("base_batch_size", False):
        settings["base_batch_size"] = 256
    return OptimizerConfig(schedule=kind, warmup_from_zero=True, **settings).schedule_of(run)


def assert_rates(schedule: Schedule, case: dict[str, Any]) -> None:
    for step, value in zip(case["steps"], case["values"], strict=True):
        assert schedule(step) == pytest.approx(value, abs=1e-6 * schedule.peak), step


@pytest.mark.parametrize("case", GOLDEN["big_vision"], ids=lambda case: str(case["arguments"]))
def test_rates_are_those_of_big_vision(case: dict[str, Any]) -> None:
    assert_rates(of_big_vision(case), case)


@pytest.mark.parametrize("case", GOLDEN["vision_transformer"], ids=lambda case: f"{case['decay_type']} {case['base']}")
def test_rates_are_those_of_vision_transformer(case: dict[str, Any]) -> None:
    kind, warmup = case["decay_type"], f"{case['warmup_steps']} steps"
    config = OptimizerConfig(
        learning_rate=case["base"], schedule=kind, warmup=warmup, warmup_from_zero=True,
        end_learning_rate=1e-5 if kind == "linear" else 0.0,
    )  # fmt: skip
    assert_rates(config.schedule_of(RunLength(case["total_steps"], 512, 1000)), case)


@pytest.mark.parametrize("case", GOLDEN["bit"], ids=lambda case: str(case["dataset_size"]))
def test_rates_are_those_of_the_hyperrule(case: dict[str, Any]) -> None:
    """Big Transfer changes the rate after the step at a boundary, and ends the run after its last boundary."""
    warmup, *supports, end = case["supports"]
    stairs = tuple(f"{support + 1} steps" for support in supports)
    config = OptimizerConfig(
        learning_rate=case["base_lr"], schedule="staircase", stair_at=stairs, warmup=f"{warmup} steps",
        warmup_from_zero=True,
    )  # fmt: skip
    schedule = config.schedule_of(RunLength(end, 512, case["dataset_size"]))
    for step, value in zip(case["steps"], case["values"], strict=True):
        assert (value is None) == (step >= end)
        if value is not None:
            assert schedule(step) == pytest.approx(value, abs=1e-6 * case["base_lr"]), step


def test_the_last_rate_is_compared_with_the_peak_of_the_batch_size() -> None:
    config = OptimizerConfig(learning_rate=1e-5, base_batch_size=8, end_learning_rate=1e-4)
    assert config.schedule_of(RunLength(100, 1024, 10_000)).peak == pytest.approx(1.28e-3)
    with pytest.raises(ConfigError, match="end_learning_rate"):
        config.schedule_of(RunLength(100, 8, 10_000))


RUN = RunLength(steps=300, batch_size=20, images=1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": "7 epochs"}, "warmup='7 epochs' is 350 steps, more than the 300 steps of the run"),
        ({"warmup": 0.6, "cooldown": "2.5 epochs"}, "warmup=0.6 and cooldown='2.5 epochs' are 180 and 125 steps"),
        ({"stair_at": (0.5, "149 steps")}, "stair_at=(0.5, '149 steps') does not increase"),
        ({"stair_at": (0.5, "300 steps")}, "stair_at=(0.5, '300 steps'): step 300 is not within the 300 steps"),
        ({"schedule": "rsqrt", "rsqrt_timescale": 0.0}, "rsqrt_timescale=0.0 is less than one step"),
    ],
)
def test_a_schedule_that_does_not_fit_into_the_run_is_named(settings: dict[str, Any], message: str) -> None:
    kind = {"schedule": "staircase"} if "stair_at" in settings else {}
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        OptimizerConfig(**kind, **settings).schedule_of(RUN)


@given(data=st.data(), kind=st.sampled_from(KINDS), peak=st.floats(1e-8, 10), steps=st.integers(1, 200))
def test_every_schedule_rises_to_the_peak_and_then_never_rises(
    data: st.DataObject, kind: ScheduleName, peak: float, steps: int
) -> None:
    warmup = data.draw(st.integers(0, steps))
    schedule = Schedule(kind, peak, steps, warmup, boundaries=(steps,), factors=(0.1,))
    rates = [schedule(step) for step in range(schedule.steps)]
    assert min(rates) > 0 and max(rates) <= schedule.peak * (1 + 1e-12)
    rising, falling = rates[: schedule.warmup_steps], rates[max(schedule.warmup_steps - 1, 0) :]
    assert all(first < second for first, second in pairwise(rising))
    assert all(first * (1 + 1e-12) >= second for first, second in pairwise(falling))
    assert falling[0] == pytest.approx(schedule.peak)


@pytest.mark.parametrize("kind", ["cosine", "constant", "rsqrt"])
def test_weights_below_the_head_begin_later(kind: ScheduleName) -> None:
    config = OptimizerConfig(
        learning_rate=0.5, schedule=kind, warmup="5 steps", backbone_wait="10 steps", backbone_warmup="20 steps",
        cooldown="4 steps",
    )  # fmt: skip
    length = RunLength(100, 8, 1000)
    below, alone = config.backbone_schedule_of(length), Schedule(kind, 0.5, 90, 20, cooldown_steps=4)
    assert [below(step) for step in range(101)] == [0.0] * 10 + [alone(step) for step in range(91)]
    assert config.schedule_of(length)(5) == 0.5 and OptimizerConfig().backbone_schedule_of(length)(9) > 0
    assert is_zero("0 epochs") and is_zero(0.0) and not is_zero("1%") and not is_zero(0.1)
    stairs = replace(config, schedule="staircase", stair_at=(0.5,), cooldown=0.0).backbone_schedule_of(length)
    assert [stairs(step) for step in (9, 30, 49, 50, 99)] == pytest.approx([0, 0.5, 0.5, 0.05, 0.05])
    with pytest.raises(ConfigError, match="34 steps together, more than the 33 steps"):
        config.backbone_schedule_of(RunLength(33, 8, 1000))
    with pytest.raises(ConfigError, match="backbone_wait='10' is not a length"):
        OptimizerConfig(backbone_wait="10")


LENGTH = RunLength(steps=700, batch_size=48, images=1000)
UNITS = {"warmup_epochs": "{:g} epochs", "warmup_examples": "{:g} images", "warmup_percent": "{:%}"}


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (0.0, 0), (0.1, 70), (0.0003, 0), (0.5, 350),
        ("0 steps", 0), ("1 step", 1), ("500 steps", 500), ("500steps", 500), ("900 steps", 900), ("0.2 steps", 1),
        ("1 epoch", 21), ("2.5 epochs", 52), ("0.001 epochs", 1),
        ("1 image", 1), ("72 images", 2), ("168 images", 4), ("480 images", 10),
        ("10%", 70), ("2.5 %", 18), ("100%", 700), ("0%", 0),
    ],
)  # fmt: skip
def test_units(duration: Duration, steps: int) -> None:
    assert list(duration_problems("warmup", duration)) == []
    assert steps_of(duration, LENGTH) == steps


@pytest.mark.parametrize("case", GOLDEN["duration_to_steps"], ids=lambda case: str(case["arguments"]))
def test_lengths_are_those_of_big_vision(case: dict) -> None:
    ((name, value),) = case["arguments"].items()
    run = RunLength(case["total_steps"], case["batch_size"], case["data_size"])
    assert steps_of(UNITS[name].format(value), run) == case["result"]


NO_LENGTHS = ("", "500", "five steps", "-5 steps", "5 minutes", "5 steps 3", "nan steps")


@pytest.mark.parametrize(
    ("duration", "rule"),
    [
        (-0.1, "is not in [0, 1), the range of a fraction of the run"),
        (500.0, "is not in [0, 1), the range of a fraction of the run; if steps are meant, write '500 steps'"),
        *(
            (text, "is not a length; write for example 0.1 (a fraction of the run), '500 steps',")
            for text in NO_LENGTHS
        ),
    ],
)
def test_what_is_no_length_is_named(duration: Duration, rule: str) -> None:
    (problem,) = duration_problems("warmup", duration)
    assert problem.startswith(f"warmup={duration!r} {rule}")
