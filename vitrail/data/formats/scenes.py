"""Drawn scenes with sentences: coloured shapes in the quarters of a picture, for tasks that learn from texts.

A scene has two groups of one to three equal shapes, each in a quarter of its own, and two sentences that name the
number, colour, shape and place of both. One shape of each colour never occurs in training scenes. Every scene of the
test split has such a new combination, so that it measures whether colours and shapes were learned apart. Pictures and
sentences are computed from hashes (`keyed_uniform`), so they are the same on every machine.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from vitrail.data.augment.draws import keyed_uniform
from vitrail.data.source import Sample, samples_of
from vitrail.data.splits import Splits
from vitrail.errors import DataError

COLOURS = {
    "red": (230, 40, 40), "green": (40, 180, 60), "blue": (50, 90, 240), "yellow": (240, 220, 50),
    "white": (245, 245, 245), "purple": (160, 60, 200), "orange": (250, 140, 30), "cyan": (50, 210, 220),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring")
NUMBERS = ("one", "two", "three")
PLACES = ("top left", "top right", "bottom left", "bottom right")

MAX_SAMPLES = 2**31 - 1
TEST_SAMPLES = 1000
"""Largest number of scenes of the test split."""
SIZES = 16, 512
"""Smallest and largest side of a picture in pixels."""


class Group(NamedTuple):
    """Equal shapes in a quarter of a scene, by their indices in the tables above."""

    number: int
    colour: int
    shape: int
    place: int

    @property
    def text(self) -> str:
        noun = SHAPES[self.shape] + ("" if self.number == 0 else "es" if SHAPES[self.shape] == "cross" else "s")
        return f"{NUMBERS[self.number]} {[*COLOURS][self.colour]} {noun}"


def is_new(colour: int, shape: int) -> bool:
    """Return True for a combination that only the test split has: one of the five shapes of each colour."""
    return (colour + 2 * shape) % len(SHAPES) == 0


KNOWN = [(colour, shape) for colour in range(len(COLOURS)) for shape in range(len(SHAPES)) if not is_new(colour, shape)]
NEW = [(colour, shape) for colour in range(len(COLOURS)) for shape in range(len(SHAPES)) if is_new(colour, shape)]


class SceneSource:
    """`samples` scenes with sentences, drawn on request. Scenes are numbered from `first`. With `new`, the first group
    of each scene has a combination of colour and shape that other scenes do not have. Raises `DataError`."""

    classes: tuple[str, ...] = ()
    target_kind = "texts"

    def __init__(self, samples: int, seed: int = 0, *, size: int = 32, first: int = 0, new: bool = False) -> None:
        for name, value, least, most in (
            ("samples", samples, 1, MAX_SAMPLES), ("seed", seed, 0, 2**31 - 1), ("size", size, *SIZES),
            ("first", first, 0, MAX_SAMPLES),
        ):  # fmt: skip
            if not least <= value <= most:
                raise DataError(f"scenes: {name}={value} is not from {least} to {most:,}")
        self.samples, self.seed, self.size, self.first, self.new = samples, seed, size, first, new

    @property
    def identity(self) -> str:
        """The settings that determine all samples."""
        return f"scenes:{self.samples}:{self.seed}:{self.size}:{self.first}:{self.new}"

    def held_out(self, fraction: float) -> SceneSource:
        """Return a source with more scenes of the same combinations. It holds about `fraction` of the scenes of both
        sources."""
        samples = max(1, round(self.samples * fraction / (1 - fraction)))
        return SceneSource(samples, self.seed, size=self.size, first=self.first + self.samples, new=self.new)

    def __len__(self) -> int:
        return self.samples

    def key(self, index: int) -> str:
        return f"scene-{'new-' if self.new else ''}{self._number(index):08}"

    def target(self, index: int) -> tuple[str, ...]:
        one, other = self.groups(index)
        first, second = (f"{group.text} at the {PLACES[group.place]}" for group in (one, other))
        return f"{first} and {second}", f"a picture with {second}, and with {first}"

    def groups(self, index: int) -> tuple[Group, Group]:
        """Return the groups of a scene."""
        draws = self._draws(index, 8)
        first, step = int(draws[6] * len(PLACES)), 1 + int(draws[7] * (len(PLACES) - 1))
        places = first, (first + step) % len(PLACES)
        tables = (NEW if self.new else KNOWN, KNOWN)
        found = []
        for number, table in enumerate(tables):
            colour, shape = table[int(draws[3 * number] * len(table))]
            found.append(Group(int(draws[3 * number + 1] * len(NUMBERS)), colour, shape, places[number]))
        return found[0], found[1]

    def __getitem__(self, index: int) -> Sample:
        size, draws = self.size, self._draws(index, 64)
        pixels = np.broadcast_to(20 + 60 * draws[8:11], (size, size, 3)).copy()
        for number, group in enumerate(self.groups(index)):
            shade = 0.8 + 0.2 * draws[12 + number]
            slots = draws[16 + 4 * number : 20 + 4 * number].argsort()[: group.number + 1]
            for slot, moved in zip(slots.tolist(), draws[24 + 8 * number :].reshape(-1, 2), strict=False):
                row, column = 2 * (group.place // 2) + slot // 2, 2 * (group.place % 2) + slot % 2
                drawn = _shape(group.shape, row, column, size, moved)
                pixels[drawn] = shade * np.array([*COLOURS.values()][group.colour])
        return Sample(self.key(index), pixels.clip(0, 255).astype(np.uint8), self.target(index))

    def _number(self, index: int) -> int:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self.first + index

    def _draws(self, index: int, count: int) -> np.ndarray:
        key = np.array([int(self.new)], np.int64), np.array([self._number(index)], np.int64)
        return keyed_uniform(self.seed, *key, draws=count)[0].astype(np.float64)


def _shape(shape: int, row: int, column: int, size: int, moved: np.ndarray) -> Bool[np.ndarray, "size size"]:
    """Return a mask of a shape in a cell of 4 x 4. `moved` moves it by at most a tenth of the cell."""
    places = (np.arange(size) + 0.5) / size * 8 - 1
    v = (places - 2 * row - 0.2 * (moved[0] - 0.5))[:, None]
    u = (places - 2 * column - 0.2 * (moved[1] - 0.5))[None]
    inside = np.maximum(abs(u), abs(v)) < 0.8
    radius = u * u + v * v
    drawn = (
        radius < 0.64,
        np.maximum(abs(u), abs(v)) < 0.7,
        (abs(v) < 0.75) & (abs(u) < (v + 0.75) / 2 + 0.05),
        (abs(u) < 0.26) | (abs(v) < 0.26),
        (radius < 0.64) & (radius > 0.16),
    )[shape]
    return inside & drawn


def open_scenes(spec: str) -> Splits:
    """Return the scenes that "scenes:SAMPLES[:SEED[:SIZE]]" describes, by default with seed 0 and 32 pixels a side.
    The test split has new combinations. Raise `DataError` for a part that is not a whole number or out of its range."""
    if re.fullmatch(r"scenes(:[0-9]{1,10}){1,3}", spec) is None:
        raise DataError(f"data {spec!r} is not scenes:SAMPLES[:SEED[:SIZE]]; for example, scenes:10000 makes 10,000")
    samples, *others = map(int, spec.split(":")[1:])
    seed, size = (*others, *(0, 32)[len(others) :])
    try:
        train = SceneSource(samples, seed, size=size)
        test = SceneSource(min(samples, TEST_SAMPLES), seed, size=size, new=True)
    except DataError as error:
        raise DataError(f"data {spec!r}: {error} (for example, scenes:10000)") from error
    return Splits(train, None, samples_of(test))
