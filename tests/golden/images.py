"""The test images of the goldens in `pipeline/`, and comparisons with the outputs that the original code gave for them.

An image is named by its kind, height, width and seed; a checksum says whether it was made right. An output is stored
whole, or as 200 of its values with the mean and the standard deviation of each channel.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "pipeline"


def read(name: str) -> dict[str, Any]:
    """The content of a golden file."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def image(spec: dict[str, Any]) -> np.ndarray:
    """The uint8 image (h w 3) of a specification."""
    shape, seed = (spec["h"], spec["w"], 3), spec["seed"]
    y, x, c = np.indices(shape)
    random = np.random.default_rng(seed)
    if spec["kind"] == "sheet":
        made = _folded(np.cumsum(np.cumsum(random.integers(-9, 10, shape), 0), 1) + 128)
    elif spec["kind"] == "waves":
        slow, middle = np.sin(0.11 * x + 0.05 * y + c + seed), np.sin(0.37 * y - 0.29 * x + 2 * c)
        fast = np.sin(1.9 * x + 1.3 * y + 0.5 * seed)
        made = np.floor(128 + 60 * slow + 40 * middle + 25 * fast).clip(0, 255)
    elif spec["kind"] == "chirp":
        made = _folded(((3 + seed) * x**2 + 5 * y**2 + 7 * x * y) // 64 + 85 * c)
    else:
        made = random.integers(0, 256, shape)
    found = made.astype(np.uint8)
    assert zlib.crc32(found.tobytes()) == spec["crc32"], spec
    return found


def _folded(values: np.ndarray) -> np.ndarray:
    """Values that rise from 0 to 255 and fall again, over and over."""
    turn = values % 510
    return np.minimum(turn, 510 - turn)


def pixels(text: str, shape: tuple[int, ...]) -> np.ndarray:
    """The uint8 values of an image that is stored whole."""
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


def compare(found: np.ndarray, output: dict[str, Any]) -> tuple[np.ndarray, float]:
    """The absolute differences of the stored values, and the largest of those of the channels' means and deviations."""
    assert list(found.shape) == output["shape"], (found.shape, output["shape"])
    assert found.dtype == np.dtype(output["dtype"]), (found.dtype, output["dtype"])
    values = found.astype(np.float64)
    if "base64" in output:
        return np.abs(values - pixels(output["base64"], found.shape)).ravel(), 0.0
    if "values" in output:
        return np.abs(values.ravel() - output["values"]), 0.0
    sampled = values.ravel()[(np.arange(200) * 7919 + 13) % values.size]
    moments = np.stack([values.mean((0, 1)), values.std((0, 1))])
    stored = np.array([output["channel_mean"], output["channel_std"]])
    return np.abs(sampled - output["samples"]), float(np.abs(moments - stored).max())
