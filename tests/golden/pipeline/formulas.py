"""Inputs of the goldens in this folder, in plain numpy. All come from integers, so they are the same everywhere."""

import zlib
from typing import Any

import numpy as np

from tests.golden.weights import tensor


def fold(values: np.ndarray) -> np.ndarray:
    """Return a triangle wave over the integers, of period 510 and from 0 to 255."""
    values = np.mod(values, 510)
    return np.where(values < 256, values, 510 - values).astype(np.uint8)


def sheet(h: int, w: int, seed: int) -> np.ndarray:
    """Return smooth patches with large structures: a random walk in two directions."""
    steps = np.random.default_rng(seed).integers(-9, 10, (h, w, 3)).astype(np.int64)
    return fold(steps.cumsum(0).cumsum(1) + 128)


def waves(h: int, w: int, seed: int) -> np.ndarray:
    """Return a sum of three sines for each channel."""
    y, x, c = np.meshgrid(np.arange(h), np.arange(w), np.arange(3), indexing="ij")
    values = (
        128
        + 60 * np.sin(0.11 * x + 0.05 * y + c + seed)
        + 40 * np.sin(0.37 * y - 0.29 * x + 2 * c)
        + 25 * np.sin(1.9 * x + 1.3 * y + 0.5 * seed)
    )
    return np.clip(np.floor(values), 0, 255).astype(np.uint8)


def chirp(h: int, w: int, seed: int) -> np.ndarray:
    """Return a quadratic chirp, from smooth to aliased."""
    y, x, c = np.meshgrid(np.arange(h), np.arange(w), np.arange(3), indexing="ij")
    return fold(((3 + seed) * x * x + 5 * y * y + 7 * x * y) // 64 + 85 * c)


def noise(h: int, w: int, seed: int) -> np.ndarray:
    """Return independent uniform pixels."""
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3)).astype(np.uint8)


KINDS = {"sheet": sheet, "waves": waves, "chirp": chirp, "noise": noise}


def make_image(spec: dict[str, Any]) -> np.ndarray:
    """Return the image of a spec, which has the fields kind, h, w, seed and crc32."""
    image = KINDS[spec["kind"]](spec["h"], spec["w"], spec["seed"])
    assert "crc32" not in spec or zlib.crc32(image.tobytes()) == spec["crc32"], spec
    return image


def sample_positions(size: int) -> np.ndarray:
    """Return the flat positions, in C order, of the 200 values that a golden holds of a large output."""
    return (np.arange(200) * 7919 + 13) % size


def labels(step: int, batch: int, classes: int) -> np.ndarray:
    """Return the labels of a training step, counted from 0."""
    item = np.arange(batch)
    return (3 * step + 5 * item + step * item) % classes


def fewshot_data(spec: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training features and labels, and test features and labels, of a few-shot case."""
    n, m, d, classes, tag = spec["train"], spec["test"], spec["dim"], spec["classes"], spec["tag"]
    train_labels, test_labels = np.arange(n) % classes, (np.arange(m) * 3 + 1) % classes
    centres = tensor(f"{tag}/centres", (classes, d))
    scale = (1 + np.arange(d) % 5).astype(np.float32)
    shift = (0.25 * (np.arange(d) % 7)).astype(np.float32)
    pull = np.float32(spec["pull"])
    train = (tensor(f"{tag}/train", (n, d)) + pull * centres[train_labels]) * scale + shift
    test = (tensor(f"{tag}/test", (m, d)) + pull * centres[test_labels]) * scale + shift
    for column in spec["constant_features"]:
        train[:, column] = 0.25
        test[:, column] = 0.25
    return train.astype(np.float32), train_labels, test.astype(np.float32), test_labels
