"""Tests of runs that learn numbers, from a table to a saved model in the units of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.training.curves import events_of
from tests.training.jobs import Make
from vitrail.errors import ConfigError, DataError
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.weights.load import load


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    """A table of grey images with a white bar: its height in pixels, and its brightness, which is sometimes unknown."""
    random, lines = np.random.default_rng(0), ["file,height,light,name"]
    for number in range(60):
        pixels = random.integers(0, 30, (16, 24, 1), dtype=np.uint8)
        height = int(random.integers(1, 16))
        pixels[:height, 4:20] = 200
        Image.fromarray(pixels[..., 0]).save(tmp_path / f"{number:02}.png")
        light = "" if number % 5 == 0 else f"{1000 + pixels.mean():.3f}"
        lines.append(f"{number:02}.png,{height},{light},bar {number}")
    path = tmp_path / "bars.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def number_config(folder_config: Make, bars: Path) -> Make:
    """Makes configs that learn the table's numbers."""

    def make(**fields: Any) -> TrainConfig:
        defaults: dict[str, Any] = {
            "task": "regression", "numbers": ("height", "light"), "image_size": (14, 21), "channels": 1, "flip": True,
            "shift": 0, "batch_size": 16, "steps": 150, "learning_rate": 3e-3, "evaluations": 3, "depth": 2,
        }  # fmt: skip
        return folder_config(bars, **{**defaults, **fields})

    return make


@pytest.mark.slow
def test_a_run_learns_numbers_in_the_units_of_the_data(number_config: Make, bars: Path) -> None:
    result = train(number_config())
    assert set(result.metrics) == {
        "validation_r2", "validation_standardised_error", "validation_height:mean_absolute_error",
        "validation_light:mean_absolute_error",
    }  # fmt: skip
    assert result.metrics["validation_r2"] > 0.8
    bundle = load(result.folder / "model")
    assert (bundle.output, bundle.classes) == ("numbers", ("height", "light"))
    (first,) = bundle.predict([bars.parent / "03.png"])
    row = bars.read_text(encoding="utf-8").splitlines()[4].split(",")
    assert first.values == pytest.approx((float(row[1]), float(row[2])), abs=6)
    assert all("height" in example.label for example in result.examples)


@pytest.mark.slow
def test_the_lowest_error_can_choose_the_weights(number_config: Make) -> None:
    config = number_config(select="standardised_error", steps=12, evaluations=6)
    result = train(config)
    events = [event for event in events_of(result.folder, "evaluation") if "best" in event]
    errors = [event["standardised_error"] for event in events]
    assert [event["best"] for event in events] == [error == min(errors[: at + 1]) for at, error in enumerate(errors)]
    assert result.metrics["validation_standardised_error"] == pytest.approx(min(errors), rel=1e-4)


@pytest.mark.slow
def test_a_model_of_numbers_is_trained_further(number_config: Make, tmp_path: Path) -> None:
    first = train(number_config(steps=5, evaluations=1))
    fields = {"init": str(first.folder), "variant": None, "position_std": None, "width": None, "heads": None}
    again = number_config(
        **fields, depth=None, mlp_width=None, run=str(tmp_path / "again"), steps=1, learning_rate=1e-9, evaluations=1
    )
    second = train(again)
    assert second.metrics["validation_r2"] == pytest.approx(first.metrics["validation_r2"], abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"numbers": ("name",)}, DataError, "'bar 0'"),
        ({"numbers": ("width",)}, DataError, "width"),
        ({"numbers": ()}, ConfigError, "^numbers: the task regression needs the names of numeric columns"),
    ],
)
def test_regression_on_other_columns_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str, number_config: Make
) -> None:
    with pytest.raises(error, match=message):
        train(number_config(**fields))


def test_classes_are_not_numbers(folder_config: Make, colour_folder: Path) -> None:
    with pytest.raises(DataError, match="numbers"):
        train(folder_config(colour_folder, task="regression", numbers=("age",)))
