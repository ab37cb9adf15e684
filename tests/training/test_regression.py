"""Tests of runs that learn numbers, from a table to a saved model in the units of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.jobs import Make
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


@pytest.mark.slow
def test_a_run_learns_numbers_in_the_units_of_the_data_and_is_trained_further(
    folder_config: Make, bars: Path, tmp_path: Path
) -> None:
    config = folder_config(
        bars, task="regression", numbers=("height", "light"), image_size=(14, 21), channels=1, flip=True, shift=0,
        batch_size=16, steps=150, learning_rate=3e-3, depth=2,
    )  # fmt: skip
    first = train(config)
    assert first.metrics["validation_r2"] > 0.8
    (found,) = load(first.folder / "model").predict([bars.parent / "03.png"])
    row = bars.read_text(encoding="utf-8").splitlines()[4].split(",")
    assert found.values == pytest.approx((float(row[1]), float(row[2])), abs=6)
    of_model = dict.fromkeys(("variant", "position_std", "width", "depth", "heads", "mlp_width"))
    short = {"run": str(tmp_path / "again"), "steps": 1, "learning_rate": 1e-9, "evaluations": 1}
    second = train(config.override(init=str(first.folder), **of_model, **short))
    assert second.metrics["validation_r2"] == pytest.approx(first.metrics["validation_r2"], abs=1e-3)
