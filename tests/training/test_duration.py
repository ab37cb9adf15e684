"""Lengths of parts of a run: units, rounding as in big_vision, and texts that are not a length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.training.schedule import Duration, RunLength, duration_problems, steps_of

RUN = RunLength(steps=700, batch_size=48, images=1000)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pipeline" / "schedules.json").read_text())
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
    assert steps_of(duration, RUN) == steps


@pytest.mark.parametrize("case", GOLDEN["duration_to_steps"], ids=lambda case: str(case["arguments"]))
def test_lengths_are_those_of_big_vision(case: dict) -> None:
    ((name, value),) = case["arguments"].items()
    run = RunLength(case["total_steps"], case["batch_size"], case["data_size"])
    assert steps_of(UNITS[name].format(value), run) == case["result"]


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        (-0.1, "warmup=-0.1 is not in [0, 1), the range of a fraction of the run"),
        (
            500.0,
            "warmup=500.0 is not in [0, 1), the range of a fraction of the run; if steps are meant, write '500 steps'",
        ),
        *(
            (
                text,
                f"warmup={text!r} is not a length; write for example 0.1 (a fraction of the run), '500 steps', "
                "'5 epochs', '64000 images' or '2.5%'",
            )
            for text in ("", "500", "five steps", "-5 steps", "5 minutes", "5 steps 3", "nan steps")
        ),
    ],
)
def test_what_is_no_length_is_named(duration: Duration, message: str) -> None:
    assert list(duration_problems("warmup", duration)) == [message]
